"""The builder of checkpoints is that of tests/checkpoint."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
