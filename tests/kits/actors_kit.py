"""Two actors in one process: one is stopped at every line of chosen modules, one after another, while the other acts.

What can go wrong between two instructions goes wrong here, without clocks and without luck: a test says what the two
do and what must hold afterwards, and the kit tries every place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, TypeVar

__all__ = ["at_every_line"]

WorldT = TypeVar("WorldT")
_MOST = 5000


def at_every_line(
    modules: tuple[ModuleType, ...],
    world: Callable[[], WorldT],
    act: Callable[[WorldT], Any],
    between: Callable[[WorldT], Any],
) -> Iterator[tuple[WorldT, Any]]:
    """Stop ``act`` before the n-th line that it runs in ``modules``, let ``between`` happen, go on; for every n.

    Args:
        modules: where it is stopped.
        world: makes what the two act on, anew for each place.
        act: the actor that is stopped.
        between: what the other does meanwhile, from its start to its end.

    Yields:
        The world afterwards, and what ``act`` returned. The last two are of ``act`` alone, before and after the other.
    """
    files = {module.__file__ for module in modules}
    for place in range(_MOST):
        made, stopper = world(), _Stopper(files, place)
        stopper.between = lambda made=made: between(made)
        sys.settrace(stopper.call)
        try:
            result = act(made)
        finally:
            sys.settrace(None)
        is_over = not stopper.done
        if is_over:
            between(made)
        yield made, result
        if is_over:
            return
    raise AssertionError(f"more than {_MOST} lines: choose fewer modules")


class _Stopper:
    """A trace function that acts once, before one line."""

    between: Callable[[], Any]

    def __init__(self, files: set[str | None], place: int) -> None:
        self._files, self._left, self.done = files, place, False

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if not self.done and frame.f_code.co_filename in self._files else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.done:
            return None
        if event == "line":
            if self._left == 0:
                self.done = True
                sys.settrace(None)
                self.between()
                return None
            self._left -= 1
        return self.line
