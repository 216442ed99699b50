"""The seam of `holdfast verify-resume`: the variable of the environment that makes a run report to a watcher.

In an ordinary life the variable is not set and `watcher` returns None: that is all it costs. Where it is set, it is the
path of a plan (`holdfast.verify`), and the watcher redirects the run, records its state at each boundary of a step,
and asks for saves at chosen boundaries. Watchers live in a layer above, so they are imported by name.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

from holdfast.config import VERIFY_VARIABLE

__all__ = ["Watcher", "watcher"]

_HOME = "holdfast.verify.witness"


class Watcher(Protocol):
    """Follows one `Checkpointer` through one life."""

    def arguments(self, path: Any, **options: Any) -> tuple[Any, ...]:
        """Return the path and the options to use instead of those given, in their order."""
        ...

    def entered(self, step: int, resumed: int | None, state: Callable[[], Mapping[Any, Any]]) -> None:
        """Take note of the state a life begins with.

        Args:
            step: the counter.
            resumed: step of the checkpoint that was resumed, None for a fresh start.
            state: returns the full state, as it would be saved.
        """
        ...

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note of the metrics of a step that was counted just now."""
        ...

    def boundary(self, step: int, state: Callable[[], Mapping[Any, Any]], save: Callable[[], object]) -> None:
        """Take note of the state at the boundary of a step, save it if that is planned, and stop there if asked to.

        Args:
            step: the step that is over. It may come more than once, at the end of an epoch and of the body too.
            state: returns the full state, as a save at this very moment would take it.
            save: saves the step now, unless it is saved.
        """
        ...

    def reported(self, step: int, metrics: Mapping[str, Any], state: Callable[[], Mapping[Any, Any]]) -> None:
        """Take note of metrics that were reported just now, and stop there if asked to."""
        ...

    def mismatched(self, text: str) -> None:
        """Take note of what the ledger of batches says of the batch that comes now; the step is made all the same."""
        ...

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the same batches, each noted as it is drawn."""
        ...


def watcher(path: Any) -> Watcher | None:
    """Return what the `Checkpointer` on ``path`` reports to; None unless its resume is being verified."""
    plan = os.environ.get(VERIFY_VARIABLE)
    if not plan:
        return None
    return cast("Watcher | None", importlib.import_module(_HOME).witness(plan, path))
