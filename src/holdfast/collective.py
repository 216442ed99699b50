"""Small collectives among the workers of the function trainer: `barrier` and `broadcast_from_rank_zero`.

They need no process group and no GPU, and end with an error that names the ranks that did not come.
"""

from __future__ import annotations

from .trainers.function.worker.main import barrier, broadcast_from_rank_zero

__all__ = ["barrier", "broadcast_from_rank_zero"]
