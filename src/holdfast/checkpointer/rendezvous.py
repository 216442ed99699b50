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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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
_GRACE_S = 10.0  # for the others to come, where a rank has failed
_HEARD_S = 1.0  # for the others to hear of an error before rank 0, whose process usually holds the store, ends
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

        A rank that fails waits for a moment only. Others may be in a collective that it does not come to (of a
        ``load_state_dict``, say), and nothing but the end of its process lets them go on: it raises its own error then,
        which all hear as soon as they come.

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
            cause, given = error, self._failure(topic, error)
        except BaseException as error:
            # No rank reads what rank 0 gives: if rank 0 ends, that is the decision for all.
            if self.rank == 0:
                self._tell(topic, {"error": error_to_ranks(error)})
            else:
                with suppress(HoldfastError):  # the store is gone: nobody hears it
                    self._set(f"{topic}/{self.rank}", self._failure(topic, error))
            raise
        if self.rank == 0:
            try:
                decision = self._decide(topic, given, decide)
            except BaseException as error:
                self._tell(topic, {"error": error_to_ranks(error)})
                raise
            self._tell(topic, decision)
        else:
            try:
                decision = self._hear(topic, given, work_s)
            except HoldfastError:
                if cause is None:
                    raise
                decision = given
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

    def _failure(self, topic: str, error: BaseException) -> dict[str, Any]:
        """Describe an error of this rank, and how many ranks had failed before: what follows from it comes later."""
        failure = {"code": code_id(), "error": error_to_ranks(error)}
        with suppress(HoldfastError):
            failure["number"] = self._ask(topic, self._store.add, self._key(f"{topic}/failed"), 1)
        return failure

    def _decide(self, topic: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        keys, late = {rank: f"{topic}/{rank}" for rank in range(1, self.world_size)}, None
        try:
            try:
                self._wait(keys, topic, self._timeout_s, hurry=f"{topic}/failed")
            except HoldfastError as error:  # unless a rank has said why
                keys, late = {rank: key for rank, key in keys.items() if self._has(key)}, error
            given = {0: mine, **{rank: self._get(key) for rank, key in keys.items()}}
            _check_code({rank: answer.get("code", "an older version") for rank, answer in given.items()})
            failed = {rank: answer for rank, answer in given.items() if "error" in answer}
            if failed:
                return {"error": _joined(failed, self.world_size)}
            if late is not None:
                raise late
            return {"value": decide([answer["value"] for answer in given.values()])}
        except Exception as error:  # noqa: BLE001 - all ranks receive it
            return {"error": error_to_ranks(error)}

    def _tell(self, topic: str, decision: Mapping[str, Any]) -> None:
        """Give a decision to all; of an error make sure that those who have come hear it."""
        try:
            self._set(f"{topic}/all", decision)
            if "error" not in decision:
                return
            deadline = time.monotonic() + _HEARD_S
            come = sum(self._has(f"{topic}/{rank}") for rank in range(1, self.world_size))
            while self._ask(topic, self._store.add, self._key(f"{topic}/heard"), 0) < come:
                if time.monotonic() > deadline:
                    return
                time.sleep(_PAUSE_S[0])
        except HoldfastError:
            if "error" not in decision:  # else it is raised here
                raise

    def _hear(self, topic: str, given: Mapping[str, Any], work_s: float) -> Any:
        """Give this rank's answer and return what rank 0 decides."""
        failed = "error" in given
        self._set(f"{topic}/{self.rank}", given)
        self._wait({0: f"{topic}/come"}, topic, _GRACE_S if failed else self._timeout_s)
        # Rank 0 is there; it may have come just now, and waits as long for the others.
        self._wait({0: f"{topic}/all"}, topic, _GRACE_S if failed else self._timeout_s + work_s + _ANSWER_S)
        decision = self._get(f"{topic}/all")
        if "error" in decision:
            with suppress(HoldfastError):  # rank 0 has waited long enough
                self._ask(topic, self._store.add, self._key(f"{topic}/heard"), 1)
        return decision

    def _wait(self, keys: dict[int, str], topic: str, timeout_s: float, *, hurry: str | None = None) -> None:
        """Wait for keys of ranks; for a moment only from when the key ``hurry`` is there."""
        deadline = time.monotonic() + timeout_s
        pause_s = _PAUSE_S[0]
        missing = dict(keys)
        while missing:
            # Before the look at the store: who leaves in order has given its word there first.
            vain = None if self.watch is None else self.watch()
            missing = {rank: key for rank, key in missing.items() if not self._has(key)}
            if missing and self._look is not None:
                self._ask(topic, self._look, missing)
            if missing and hurry is not None and self._has(hurry):
                deadline, hurry = min(deadline, time.monotonic() + _GRACE_S), None
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
        self._ask(key, self._store.set, self._key(key), json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._ask(key, self._store.get, self._key(key)))

    def _has(self, key: str) -> bool:
        return bool(self._ask(key, self._store.check, [self._key(key)]))

    def _ask(self, topic: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call the store; its errors are translated here."""
        try:
            return call(*args)
        except RuntimeError as error:
            raise HoldfastError(
                f"the ranks cannot meet ({topic}): the store of the process group is gone, and with it the process "
                f"that held it, usually rank 0: {error}"
            ) from error


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


def _check_code(codes: Mapping[int, str]) -> None:
    """Refuse ranks that run other code: what one says would mean something else to another.

    Raises:
        ConfigError: naming both.
    """
    # The digest decides: the same code may have come by another commit.
    digest = codes[0].rpartition(" ")[2]
    others = {rank: code for rank, code in codes.items() if code.rpartition(" ")[2] != digest}
    if others:
        first = min(others)
        raise ConfigError(
            f"all ranks have to run the same holdfast: rank 0 runs {codes[0]}, rank {first} {others[first]}"
            f"{'' if len(others) == 1 else f' (others: {rank_list(others)})'}: install the same on all nodes, and "
            "start again"
        )


def _joined(failed: Mapping[int, Mapping[str, Any]], world_size: int) -> dict[str, Any]:
    """Join the errors of some ranks: the one that came first, with the ranks that have the same."""
    first = failed[min(failed, key=lambda rank: (failed[rank].get("number", world_size), rank))]["error"]
    same = [rank for rank, answer in failed.items() if answer["error"]["message"] == first["message"]]
    if len(same) == world_size:
        return {**first}
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
