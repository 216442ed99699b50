"""The builder of checkpoints is that of tests/checkpoint, the servers are those of tests/storage."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("checkpoint", "storage")]
