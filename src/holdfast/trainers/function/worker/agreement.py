"""`should_save`: all ranks answer yes at the same call, without waiting for one another in between.

The controller asks how many calls each rank has made. From then on the next call of that rank waits; when all have
answered, the first call that no rank has made yet is the one, which takes two messages and no collective. After it the
workers are about to be ended: one call more waits for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Agreement"]

_HOLD_S = 60.0


class Agreement:
    """One rank's part.

    Args:
        tell: sends a message to the controller.
        hold_s: how long a call waits for the verdict, or for the end of this worker, before it answers no.

    Attributes:
        reached: the agreed call was made: what is reported now is the agreed save.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], *, hold_s: float = _HOLD_S) -> None:
        self._tell, self._hold_s = tell, hold_s
        self._changed = threading.Condition()
        self._calls = 0
        self._waits = False
        self._at: int | None = None
        self._over = False
        self.reached = False

    def take(self, header: Mapping[str, Any]) -> bool:
        """Take a message of the controller; False if it is not about this. Called on the receiving thread."""
        if header["do"] == "save_soon":
            with self._changed:
                self._waits, self._at = True, None
                self._tell({"on": "at", "calls": self._calls})
        elif header["do"] == "save_at":
            with self._changed:
                self._at = header["call"]
                self._changed.notify_all()
        else:
            return False
        return True

    def ask(self) -> bool:
        """Answer one call of `should_save`."""
        with self._changed:
            self._calls += 1
            if self.reached:  # saved; whatever is trained now would be lost
                self._changed.wait_for(lambda: self._over, self._hold_s)
                self.reached, self._waits, self._at = False, False, None
                return False
            if not self._waits:
                return False
            self._changed.wait_for(lambda: self._at is not None or self._over, self._hold_s)
            self.reached = self._at is not None and self._calls == self._at
            return self.reached

    def end(self) -> None:
        """Release whoever waits: the controller is gone, or this worker ends."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
