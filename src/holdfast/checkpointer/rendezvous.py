"""Where ranks meet at the start: the store of the process group. Nothing here is used once a run has begun.

That store may outlive the ranks: torchrun keeps it over all its restarts, and nothing it gives the ranks identifies
their life, since each agent counts restarts for itself and a replaced node starts at 0. `StoreLife` finds a part of the
store that no other life uses: every rank publishes a random number of its own, and rank 0 publishes its own number
beside those it has seen. A rank believes rank 0 when it finds its own number there. Rank 0 looks again while it waits
for a rank, because what it saw first may come from an earlier life.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holdfast._fork import after_fork_in_child
from holdfast._ranks import RankInfo, rank_list
from holdfast._version import code_id
from holdfast.errors import ConfigError, HoldfastError
from holdfast.writer.messages import error_from_json, error_to_ranks

_PAUSE_S = (0.002, 0.2)
_ANSWER_S = 5.0  # for rank 0 to report who has not come
_CONNECT = timedelta(seconds=60)
_met: dict[str, int] = {}  # meetings of each name in this process: all ranks count alike


class Rendezvous:
    """Lets all ranks agree on something, several times, by topic. Every wait is bounded.

    Args:
        store: shared by all ranks: ``set``, ``get`` and ``check``, as torch's stores have them.
        info: who we are.
        name: of what the ranks meet for; a name met under again is another meeting.
        timeout_s: bound of every wait.
        look: called with the ranks that are waited for, again and again.

    Attributes:
        watch: asked during every wait whether it is in vain: returns why, or None.
    """

    def __init__(
        self,
        store: Any,
        info: RankInfo,
        *,
        name: str,
        timeout_s: float,
        look: Callable[[Iterable[int]], None] | None = None,
    ) -> None:
        self.watch: Callable[[], HoldfastError | None] | None = None
        self._store, self.rank, self.world_size, self._timeout_s = store, info.rank, info.world_size, timeout_s
        self._look = look
        number = _met[name] = _met.get(name, 0) + 1
        self._prefix = f"{name}/{number}"
        self._swaps = 0

    def agree(
        self,
        topic: str,
        give: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda values: values[0],
        *,
        work_s: float = 0.0,
    ) -> Any:
        """Let every rank give a value and rank 0 decide; all return, or raise, the same.

        Args:
            topic: used once in a meeting; the same text on all ranks.
            give: makes this rank's value, plain data; what it raises ends the meeting on all ranks.
            decide: on rank 0, makes one value from the values of all ranks, in rank order; default: rank 0's own.
            work_s: how long rank 0 may be at it (``give`` and ``decide``) beyond the bound of a wait.

        Raises:
            HoldfastError: a rank failed, or did not come within the bound; the message names it.
        """
        cause: BaseException | None = None
        if self.rank == 0:
            self._set(f"{topic}/come", True)
        try:
            given = {"code": code_id(), "value": give()}
        except Exception as error:  # noqa: BLE001 - all ranks receive it, this rank raises it below
            cause, given = error, {"code": code_id(), "error": error_to_ranks(error)}
        except BaseException as error:
            # No rank reads what rank 0 gives: if rank 0 ends, that is the decision for all.
            self._set(f"{topic}/{self.rank or 'all'}", {"error": error_to_ranks(error)})
            raise
        if self.rank == 0:
            try:
                decision = self._decide(topic, given, decide)
            except BaseException as error:
                self._set(f"{topic}/all", {"error": error_to_ranks(error)})
                raise
            self._set(f"{topic}/all", decision)
        else:
            self._set(f"{topic}/{self.rank}", given)
            self._wait({0: f"{topic}/come"}, topic, self._timeout_s)
            # Rank 0 is there; it may have come just now, and waits as long for the others.
            self._wait({0: f"{topic}/all"}, topic, self._timeout_s + work_s + _ANSWER_S)
            decision = self._get(f"{topic}/all")
        if "error" in decision:
            raise error_from_json(decision["error"]) from cause
        return decision["value"]

    def swap(self, group: str, value: Any) -> list[Any]:
        """Give a value, plain data, and get those of all ranks that name the same group, in their order.

        All ranks call this equally often. What passes through rank 0's store grows with the number of ranks, not with
        its square.

        Raises:
            HoldfastError: as `agree`.
        """
        self._swaps += 1
        topic = f"swap {self._swaps}"

        def sort(given: list[Any]) -> None:
            groups: dict[str, list[Any]] = {}
            for name, answer in given:
                groups.setdefault(name, []).append(answer)
            for name, values in groups.items():
                self._set(f"{topic}/of {name}", {"value": values})

        self.agree(topic, lambda: [group, value], sort)
        found: list[Any] = self._get(f"{topic}/of {group}")["value"]
        return found

    def forget(self, topic: str) -> None:
        """Take back from the store what ranks gave for a topic that all of them are done with; rank 0 does it."""
        if self.rank == 0:
            for giver in ("come", "all", *range(1, self.world_size)):
                self._store.delete_key(self._key(f"{topic}/{giver}"))

    def _decide(self, topic: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        try:
            self._wait({rank: f"{topic}/{rank}" for rank in range(1, self.world_size)}, topic, self._timeout_s)
            given = [mine, *(self._get(f"{topic}/{rank}") for rank in range(1, self.world_size))]
            _check_code([answer.get("code", "an older version") for answer in given])
            failed = {rank: answer["error"] for rank, answer in enumerate(given) if "error" in answer}
            if failed:
                return {"error": _joined(failed, self.world_size)}
            return {"value": decide([answer["value"] for answer in given])}
        except Exception as error:  # noqa: BLE001 - all ranks receive it
            return {"error": error_to_ranks(error)}

    def _wait(self, keys: dict[int, str], topic: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause_s = _PAUSE_S[0]
        missing = dict(keys)
        while missing:
            # Before the look at the store: who leaves in order has given its word there first.
            vain = None if self.watch is None else self.watch()
            try:
                missing = {rank: key for rank, key in missing.items() if not self._store.check([self._key(key)])}
                if missing and self._look is not None:
                    self._look(missing)
            except RuntimeError as error:
                raise HoldfastError(
                    f"the ranks cannot meet ({topic}): the store of the process group is gone, and with it the "
                    f"process that held it, usually rank 0: {error}"
                ) from error
            if missing and vain is not None:
                raise vain
            if missing and time.monotonic() > deadline:
                raise HoldfastError(
                    f"{rank_list(missing)} did not come within {timeout_s:g} s ({topic}): all ranks have to make "
                    "the same calls in the same order; what only some of them do (`if rank == 0:`) has to be "
                    "holdfast.save(..., ranks='this'). If they do, it has died or hangs: its own output says more"
                )
            if missing:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(self._key(key)))


def store_of_this_life(store: Any, info: RankInfo, *, timeout_s: float) -> Any:
    """Return a part of a store in which all ranks are, and no earlier life of theirs ever was.

    Raises:
        HoldfastError: a rank did not come.
    """
    meeting = meet_in(store, info, name="life", timeout_s=timeout_s)
    number = meeting.agree("number", lambda: secrets.token_hex(8))
    return dist.PrefixStore(f"holdfast/of_{number}", store)  # type: ignore[attr-defined]


def meet_in(store: Any, info: RankInfo, *, name: str, timeout_s: float) -> Rendezvous:
    """Meet the other ranks in that part of a store which no earlier life of theirs uses.

    Args:
        store: shared by all ranks.
        info: who we are.
        name: of the meeting.
        timeout_s: bound of every wait.

    Raises:
        HoldfastError: rank 0 did not come.
    """
    life = StoreLife(store, info)
    return Rendezvous(life.join(timeout_s), info, name=name, timeout_s=timeout_s, look=life.look)


def _check_code(codes: Sequence[str]) -> None:
    """Refuse ranks that run other code: what one says would mean something else to another.

    Raises:
        ConfigError: naming both.
    """
    # The digest decides: the same code may have come by another commit.
    digest = codes[0].rpartition(" ")[2]
    others = {rank: code for rank, code in enumerate(codes) if code.rpartition(" ")[2] != digest}
    if others:
        first = min(others)
        raise ConfigError(
            f"all ranks have to run the same holdfast: rank 0 runs {codes[0]}, rank {first} {others[first]}"
            f"{'' if len(others) == 1 else f' (others: {rank_list(others)})'}: install the same on all nodes, and "
            "start again"
        )


def _joined(failed: dict[int, dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Join the errors of some ranks: the first error, with the ranks that have the same."""
    first = failed[min(failed)]
    same = [rank for rank, error in failed.items() if error["message"] == first["message"]]
    if len(same) == world_size:
        return first
    return {**first, "message": f"{rank_list(same)}: {first['message']}"}


def find_store(info: RankInfo, otherwise: str) -> Any:
    """Return the store of the process group, else that of torchrun.

    Raises:
        ConfigError: there is neither.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if dist.is_available() and host and port and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(host, int(port), is_master=False, timeout=_CONNECT)  # type: ignore[attr-defined]
    raise ConfigError(
        f"this is rank {info.rank} of {info.world_size}, and there is no process group through which the ranks could "
        f"meet: call torch.distributed.init_process_group first, start with torchrun, or {otherwise}"
    )


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
        """Return the part of the store; rank 0 does not wait, the others wait for rank 0.

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


@after_fork_in_child
def _after_fork_in_child() -> None:
    _numbers.clear()  # another process is another life, whoever its parent was
