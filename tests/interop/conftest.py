"""The builder of checkpoints of several ranks is that of tests/state."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "state"))
