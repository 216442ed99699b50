"""Tests that drive real frameworks run in environments of their own: `python tests/frameworks/run.py`."""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_GROUP = os.environ.get("HOLDFAST_TEST_FRAMEWORKS")

collect_ignore = [str(path.parent) for path in _HERE.glob("*/requirements.txt") if path.parent.name != _GROUP]
