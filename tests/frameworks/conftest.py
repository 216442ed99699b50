"""Tests that drive real frameworks run in environments of their own: `python tests/frameworks/run.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# pytest has put this folder on the path, where that of a group passes for the package of its name (jax, tensorflow).
sys.path[:] = [entry for entry in sys.path if entry != str(_HERE)]
_GROUP = os.environ.get("HOLDFAST_TEST_FRAMEWORKS")

collect_ignore = [str(path.parent) for path in _HERE.glob("*/requirements.txt") if path.parent.name != _GROUP]
