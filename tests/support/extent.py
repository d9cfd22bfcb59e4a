"""How much of the long matrices a test run tries."""

from __future__ import annotations

import os
from typing import Final

# Set by `bootstrap.py test --all`.
EVERYTHING: Final = os.environ.get("VLLMOPS_TEST_ALL") == "1"
