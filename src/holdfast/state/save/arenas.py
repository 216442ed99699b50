"""Which memory the next copy of a state goes to: none that holds a save under way, or the newest snapshot."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient

from .plan import Layout

__all__ = ["SMALL_COPY", "Arenas"]

SMALL_COPY = 16 << 20  # a copy of this size is made without looking
_TURNS = 2  # arenas that take turns; of a small state there is a third


class Arenas:
    """The arenas of one layout: one that each save is copied into, or two that take turns where snapshots are kept.

    Args:
        has_peers: other ranks save with this one, and may be a step behind.
    """

    def __init__(self, *, has_peers: bool) -> None:
        self._has_peers = has_peers
        self._pool: list[Arena] = []  # begins with what was copied last
        self._kept: Arena | None = None  # holds the newest snapshot that is not a save; perhaps of the layout before
        self._kept_step: Any = None
        self._writing: tuple[Arena, Future[Any]] | None = None  # the last save
        self._sealing: Future[None] | None = None  # of the last save, while tensors on a device are still copied
        self._given_up: Future[Any] | None = None  # a save that was waited for too long

    @property
    def newest(self) -> Arena | None:
        """That of the last copy, or of the first one to come."""
        return self._pool[0] if self._pool else None

    @property
    def are_taken(self) -> bool:
        """Whether a save is being written, and the other memory holds the newest snapshot."""
        return self._kept is not None and self._writing is not None and not self._writing[1].done()

    @property
    def has_given_up(self) -> bool:
        """Whether a save was waited for too long, and still is not written."""
        return self._given_up is not None and not self._given_up.done()

    def shared(self) -> list[tuple[int, int]]:
        """Descriptor and bytes of each arena that a writer can map."""
        return sorted((one.fd, one.size) for one in self._pool if one.fd is not None)

    def make_ready(self, layout: Layout, client: WriterClient, *, take_turns: bool = False) -> None:
        """Map the first arenas here and in the writer, and fault their pages in the background."""
        while len(self._pool) < (_TURNS if take_turns else 1):
            self._pool.append(_made_for(layout))
        for one in self._pool:
            one.prefault()
            client.attach(one)

    def window(self, nbytes: int) -> Arena:
        """Return the one of so many bytes, smaller than the state, which streams through it."""
        return self.newest or self._add(Arena.create(nbytes))

    def turn(
        self,
        layout: Layout,
        client: WriterClient,
        step: Any,
        *,
        release_s: float | None,
        timeout_s: float | None,
        take_turns: bool = True,
    ) -> Arena | None:
        """Return the arena for the next copy: not the one that is being written, nor that of the newest snapshot.

        There is no third copy of a big state: the next one waits until the save is written, for the newest snapshot is
        all that is left of its step until another one is sealed. Where it is of the step that is to be copied, and
        there are other ranks, the snapshot before it stays instead: a rank that has not done this step holds that one.

        Args:
            layout: of the state.
            client: the writer.
            step: of the copy.
            release_s: how long it may take to tell the writer that the snapshot there counts no more.
            timeout_s: how long a save may take that is being written; None: as long as it takes.
            take_turns: snapshots are kept between saves; else there is one arena.

        Returns:
            None if either takes longer.
        """
        if not take_turns:
            return self.newest or self._add(_made_for(layout))
        if (sealing := self._sealing) is not None:
            wait([sealing], timeout_s)
            if sealing.done() and sealing.exception() is None:  # else the save is dropped, and the snapshot counts
                self.forget_kept()
        while True:
            written = None if self._writing is None or self._writing[1].done() else self._writing[0]
            taken = [one for one in (written, self._kept) if one is not None]
            # The pool begins with the snapshot of this step, then comes the one before it.
            repeats = self._has_peers and self._kept in self._pool and self._kept_step == step
            before = self._pool[1:2] if repeats else []
            free = [one for one in self._pool if one not in (*taken, *before)]
            if not free and len({*self._pool, *taken}) < _TURNS + (layout.arena_bytes < SMALL_COPY):
                free = [self._add(_made_for(layout))]
            elif not free and before:
                free, self._kept, self._kept_step = self._pool[:1], before[0], None
            if free:
                break
            assert self._writing is not None
            if self._writing[1] is self._given_up:
                return None
            wait([self._writing[1]], timeout_s)
            if not self._writing[1].done():
                self._given_up = self._writing[1]
        self._pool.remove(free[0])
        self._pool.insert(0, free[0])
        return free[0] if client.release(free[0], release_s) else None

    def keep(self, step: Any) -> None:
        """Take in that the last copy is a snapshot of this step, and sealed: it is the newest one."""
        self.forget_kept()
        self._kept, self._kept_step = self._pool[0], step

    def write(self, future: Future[Any], sealing: Future[None] | None) -> None:
        """Take in that the last copy is a save: done with ``future``; newer than a snapshot once it is sealed."""
        self._writing, self._sealing = (self._pool[0], future), sealing
        if sealing is None:
            self.forget_kept()

    def forget_kept(self) -> None:
        """Take in that something newer than the snapshot kept is sealed: its memory may be used again."""
        before, self._kept, self._sealing = self._kept, None, None
        if before is not None and before not in self._pool:
            before.close()  # of a layout that is gone

    def drop(self) -> None:
        """Give back what belongs to a layout that is gone, but the newest snapshot: it counts until a newer copy."""
        for arena in self._pool:
            if arena is not self._kept:
                arena.close()
        self._pool = []

    def _add(self, arena: Arena) -> Arena:
        self._pool.append(arena)
        return arena


def _made_for(layout: Layout) -> Arena:
    arena = Arena.create(layout.arena_bytes)
    layout.write_static(arena.view)
    return arena
