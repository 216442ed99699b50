"""One life of all ranks in a store that may outlive them: what an earlier life left there must not be read.

torchrun may keep one store for all its restarts, and nothing that it tells the ranks names their life: each agent
counts restarts for itself, so those of a node that was replaced differ. So every rank says hello with a number of its
own, and rank 0 shows its own beside those it has seen. A rank believes rank 0 when it finds its own number there. Rank
0 looks again while it waits for a rank: what it saw first may be from an earlier life.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from holdfast._ranks import RankInfo
from holdfast.errors import HoldfastError

__all__ = ["StoreLife"]

_PAUSE_S = (0.002, 0.2)
_numbers: dict[tuple[int, int], str] = {}  # of this process, by (rank, world size)


class StoreLife:
    """Finds a part of a store that no other life of the ranks uses.

    Args:
        store: shared by all ranks.
        info: who we are.
    """

    def __init__(self, store: Any, info: RankInfo) -> None:
        self._plain, self._info = store, info
        self._outlives = "TORCHELASTIC_RUN_ID" in os.environ
        self._own = _numbers.setdefault((info.rank, info.world_size), secrets.token_hex(8))
        self._seen: dict[str, str] = {}

    def join(self, timeout_s: float) -> Any:
        """Return the part of the store; rank 0 need not wait for anybody, the others wait for rank 0.

        Raises:
            HoldfastError: rank 0 did not come.
        """
        if not self._outlives:
            return _part(self._plain, "0")
        if self._info.rank == 0:
            self._show()
            return _part(self._plain, self._own)
        self._plain.set(f"holdfast/hello/{self._info.rank}", self._own)
        return _part(self._plain, self._find(timeout_s))

    def look(self, ranks: Iterable[int]) -> None:
        """Show ranks that have said hello that this is rank 0 of their life; for rank 0, while it waits for them."""
        if not self._outlives or self._info.rank:
            return
        before = dict(self._seen)
        for rank in ranks:
            key = f"holdfast/hello/{rank}"
            if self._plain.check([key]):
                self._seen[str(rank)] = self._plain.get(key).decode()
        if self._seen != before:
            self._show()

    def _show(self) -> None:
        self._plain.set("holdfast/life", json.dumps([self._own, self._seen]))

    def _find(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        pause_s = _PAUSE_S[0]
        while True:
            try:
                if self._plain.check(["holdfast/life"]):
                    life, seen = json.loads(self._plain.get("holdfast/life"))
                    if seen.get(str(self._info.rank)) == self._own:
                        return str(life)
            except RuntimeError as error:
                raise HoldfastError(
                    "the ranks cannot meet: the store of the process group is gone, and with it the process that held "
                    f"it, usually rank 0: {error}"
                ) from error
            if time.monotonic() > deadline:
                raise HoldfastError(
                    f"rank 0 did not come within {timeout_s:g} s: all ranks have to make the same calls in the same "
                    "order; what only some of them do (`if rank == 0:`) has to be holdfast.save(..., ranks='this')"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S[1])


def _part(store: Any, life: str) -> Any:
    return dist.PrefixStore(f"holdfast/life_{life}", store)  # type: ignore[attr-defined]


def _after_fork_in_child() -> None:
    _numbers.clear()  # another process is another life, whoever its parent was


os.register_at_fork(after_in_child=_after_fork_in_child)
