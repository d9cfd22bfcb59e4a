"""Fixtures of all tests of commands."""

from ..support.patience import patience

__all__ = ["patience"]
