"""What tests of commands have in common."""

from ...support.patience import patience

__all__ = ["patience"]
