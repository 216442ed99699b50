"""Memory of a life that its death does not free: the arenas of its newest saves, for the next life to load from.

A process names its arenas in the folder of its life (`holdfast.run.life`); we open them through ``/proc`` while it
lives, and name them to the next life in the same way. That life cuts them to nothing once it has loaded its state.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from holdfast.run.life import ARENAS, KEPT

__all__ = ["KeptArenas"]

_MEMFD = "/memfd:holdfast-arena "  # see `holdfast.writer.arena`


class KeptArenas:
    """The arenas of the present life, and of the last life before it that had any."""

    def __init__(self) -> None:
        self._held: dict[Path, list[tuple[int, dict[str, Any]]]] = {}  # of the present life, by what names them
        self._before: list[tuple[int, dict[str, Any]]] = []

    def begin(self, folder: Path) -> None:
        """Name to a life that is about to begin in ``folder`` what lives before have left."""
        if self._held:
            _close(self._before)
            self._before = [one for held in self._held.values() for one in held]
            self._held = {}
        named = [{**about, "path": f"/proc/{os.getpid()}/fd/{fd}"} for fd, about in self._before]
        (folder / KEPT).write_text(json.dumps(named), encoding="utf-8")

    def look(self, folder: Path) -> None:
        """Open what the processes of the present life have named since the last look."""
        for path in folder.glob(f"{ARENAS}*"):
            if path in self._held:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                named = json.loads(path.read_bytes())
                self._held[path] = [*filter(None, (_open(named["pid"], arena) for arena in named["arenas"]))]

    def close(self) -> None:
        """Give everything back; idempotent."""
        for held in (self._before, *self._held.values()):
            _close(held)
        self._before, self._held = [], {}


def _open(pid: int, arena: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    place = f"/proc/{int(pid)}/fd/{int(arena['fd'])}"
    try:
        if not os.readlink(place).startswith(_MEMFD):  # closed meanwhile, and something else opened
            return None
        return os.open(place, os.O_RDWR | os.O_CLOEXEC), arena
    except OSError:
        return None


def _close(held: list[tuple[int, dict[str, Any]]]) -> None:
    for fd, _ in held:
        os.close(fd)
