"""Ranks that meet through a store: all get the same decision, or the same error, in bounded time.

Then rank 0 listens for the writers of the others: where they can reach it, and nowhere else.
"""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist

import holdfast as hf
from holdfast._ranks import RankInfo
from holdfast._version import code_id
from holdfast.checkpointer import rank_group, rendezvous
from holdfast.checkpointer.meeting import Alone, meet, same_for_all
from holdfast.checkpointer.rendezvous import Rendezvous
from holdfast.errors import ConfigError


def meetings(count: int, store: Any, *, timeout_s: float = 20.0) -> list[Rendezvous]:
    found = []
    for rank in range(count):
        rendezvous._met.clear()  # they are processes of their own
        info = RankInfo(rank=rank, world_size=count)
        found.append(Rendezvous(store, info, name="test", timeout_s=timeout_s))
    return found


def each(meetings: list[Rendezvous], call: Any) -> list[Any]:
    """What ``call(meeting)`` gave, or raised, on every rank."""
    found: dict[int, Any] = {}

    def work(meeting: Rendezvous) -> None:
        try:
            found[meeting.rank] = call(meeting)
        except Exception as error:
            found[meeting.rank] = error

    threads = [threading.Thread(target=work, args=(meeting,)) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[meeting.rank] for meeting in meetings]


def test_all_get_what_rank_0_decides_of_what_all_give() -> None:
    """The values are in order of ranks; several topics follow each other; a later meeting is another one."""
    store = dist.HashStore()
    ranks = meetings(3, store)
    assert each(ranks, lambda one: one.agree("sum", lambda: one.rank + 1, sum)) == [6, 6, 6]
    assert each(ranks, lambda one: one.agree("first", lambda: f"of {one.rank}")) == ["of 0"] * 3
    again = []
    for one in ranks:
        rendezvous._met.clear()
        rendezvous._met["test"] = 1
        info = RankInfo(rank=one.rank, world_size=3)
        again.append(Rendezvous(store, info, name="test", timeout_s=20.0))
    assert each(again, lambda one: one.agree("sum", lambda: one.rank + 2, sum)) == [9, 9, 9]


def test_groups_get_the_values_of_their_own_ranks() -> None:
    """Ranks that name one group get what all of it gave, in order; again and again, and alone as well."""
    ranks = meetings(4, dist.HashStore())
    for turn in (1, 2):
        found = each(ranks, lambda one, turn=turn: one.swap(f"node {one.rank % 2}", [turn, one.rank]))
        assert found == [[[turn, 0], [turn, 2]], [[turn, 1], [turn, 3]]] * 2
    assert each(ranks, lambda one: one.swap(f"of {one.rank}", None)) == [[None]] * 4
    assert Alone().swap("any", 5) == [5]


def test_ranks_of_different_commits_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs in code is refused at the first word, naming both; the same code of two commits is fine."""
    codes = {"0": "0.1.0 (commit aaaaaaaaaa, code 11111111)", "1": "0.1.0 (commit bbbbbbbbbb, code 22222222)"}
    monkeypatch.setattr(rendezvous, "code_id", lambda: codes[threading.current_thread().name])

    def named(one: Rendezvous) -> Any:
        threading.current_thread().name = str(one.rank)
        return one.agree("first", lambda: (1, 2), lambda values: [a + b + c for a, b, c in values])  # "too many values"

    for error in each(meetings(2, dist.HashStore()), named):
        assert isinstance(error, ConfigError)
        assert codes["0"] in str(error)
        assert codes["1"] in str(error)
    codes["1"] = "0.1.0 (code 11111111)"

    def same(one: Rendezvous) -> Any:
        threading.current_thread().name = str(one.rank)
        return one.agree("first", lambda: one.rank, sum)

    assert each(meetings(2, dist.HashStore()), same) == [1, 1]


def test_a_rank_from_before_versions_were_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older commit says nothing of its code: rank 0 says so instead of misreading its values."""
    store = dist.HashStore()
    ranks = meetings(2, store)
    store.set("test/1/first/1", '{"value": 7}')  # as it was
    with pytest.raises(ConfigError, match="rank 1 an older version"):
        ranks[0].agree("first", lambda: 7)


def test_the_code_is_known_by_its_bytes() -> None:
    """The id has version and digest, and is the same in another process."""
    said = subprocess.run(
        [sys.executable, "-c", "from holdfast._version import code_id; print(code_id())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert said == code_id()
    assert re.fullmatch(r"[0-9.]+\S* \((commit [0-9a-f]{10}, )?code [0-9a-f]{8}\)", said)


def test_one_error_for_all() -> None:
    """It keeps its kind and names the ranks that met it; one that all have met needs no names."""
    ranks = meetings(3, dist.HashStore())

    def some(one: Rendezvous) -> Any:
        def give() -> None:
            if one.rank:
                raise hf.StateMismatchError("other shape", problems=("a",))

        return one.agree("some", give)

    found = each(ranks, some)
    assert {type(one) for one in found} == {hf.StateMismatchError}
    assert {str(one) for one in found} == {"ranks 1, 2: other shape"}
    assert found[0].problems == ("a",)
    found = each(ranks, lambda one: one.agree("every", lambda: 1 // 0))
    assert len({str(one) for one in found}) == 1
    assert str(found[0]) == "ZeroDivisionError: integer division or modulo by zero"
    found = each(ranks, lambda one: one.agree("alike", lambda: one.rank // 2, lambda given: same_for_all(given, "it")))
    assert {str(one) for one in found} == {"it must be the same on all ranks: rank 0 has 0, rank 2 has 1"}


def test_a_rank_that_does_not_come_is_named() -> None:
    """After the bound, on all ranks that came."""
    ranks = meetings(4, dist.HashStore(), timeout_s=1.0)
    found = each([ranks[0], ranks[2]], lambda one: one.agree("start", lambda: 1))
    assert "ranks 1, 3 did not come within 1 s (start)" in str(found[0])
    assert str(found[1]) == str(found[0]), "and all hear the same"


def test_a_rank_that_fails_does_not_wait_for_ranks_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a collective until its process ends: it raises its own error soon, and they name it as the cause."""
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.2)
    for failing in (0, 1):
        ranks, ended = meetings(3, dist.HashStore(), timeout_s=600.0), threading.Event()

        def give(one: Rendezvous, failing: int = failing, ended: threading.Event = ended) -> None:
            if one.rank == failing:
                raise ValueError("mine alone")
            assert ended.wait(60.0)
            raise RuntimeError("connection closed by peer")

        def work(one: Rendezvous, give: Any = give, failing: int = failing, ended: threading.Event = ended) -> None:
            try:
                one.agree("load", lambda: give(one))
            finally:
                if one.rank == failing:
                    ended.set()

        found = each(ranks, work)
        assert isinstance(found[failing].__cause__, ValueError)
        others = {str(error) for one, error in zip(ranks, found, strict=True) if one.rank != failing}
        assert others == {f"rank {failing}: ValueError: mine alone"}


def test_rank_0_does_not_end_before_the_others_have_heard_its_error() -> None:
    """The store ends with its process, so what they have not read by then they never would."""
    store, over = dist.HashStore(), threading.Event()

    class Held:
        """The store in rank 0's process."""

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                if over.is_set():
                    raise RuntimeError("Connection reset by peer")
                return getattr(store, name)(*args)

            return call

    ranks = meetings(3, Held())

    def work(one: Rendezvous) -> Any:
        try:
            return one.agree("load", lambda: one.rank, lambda given: given[7])
        finally:
            if one.rank == 0:
                over.set()

    rendezvous._PAUSE_S, before = (0.2, 0.2), rendezvous._PAUSE_S
    try:
        assert {str(error) for error in each(ranks, work)} == {"IndexError: list index out of range"}
    finally:
        rendezvous._PAUSE_S = before
    with pytest.raises(hf.HoldfastError, match="ZeroDivisionError"):  # of its own, and nothing about the store
        ranks[1].agree("late", lambda: 1 // 0)


def test_rank_0_may_be_longer_at_work_than_the_others_wait_for_it_to_come() -> None:
    """The lease of a dead trainer is waited for by rank 0 alone: the others know that it is there, and wait for it."""
    ranks = meetings(3, dist.HashStore(), timeout_s=1.0)

    def work(one: Rendezvous) -> int:
        if one.rank == 0:
            threading.Event().wait(1.5)
        return one.rank

    rendezvous._ANSWER_S, before = 0.0, rendezvous._ANSWER_S
    try:
        assert each(ranks, lambda one: one.agree("open", lambda: work(one), sum, work_s=20.0)) == [3, 3, 3]
    finally:
        rendezvous._ANSWER_S = before


@pytest.mark.parametrize("where", ["give", "decide"])
def test_rank_0_is_interrupted(where: str) -> None:
    """A Ctrl-C while rank 0 is at work ends the meeting for all at once: nobody waits for the bound."""
    first, *others = meetings(3, dist.HashStore())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(each(others, lambda one: one.agree("open", lambda: 1))))
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        first.agree("open", *([interrupt] if where == "give" else [lambda: 1, interrupt]))
    waiting.join()
    assert ["KeyboardInterrupt" in str(one) for one in found] == [True, True]


def test_one_process_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides alone; several processes without a store are refused, with the ways out."""
    assert isinstance(meet(RankInfo(), name="x", timeout_s=1.0, otherwise="save alone"), Alone)
    assert Alone().agree("sum", lambda: 4, sum) == 4
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        hf.ConfigError, match=r"rank 1 of 2.*init_process_group first, start with torchrun, or save alone"
    ):
        meet(RankInfo(rank=1, world_size=2), name="x", timeout_s=1.0, otherwise="save alone")


def test_a_topic_is_taken_back_from_the_store() -> None:
    """What was agreed on, and nobody reads any more, leaves nothing behind."""
    store = dist.HashStore()
    ranks = meetings(2, store)
    before = store.num_keys()
    assert each(ranks, lambda one: one.agree("topic", lambda: one.rank, sum)) == [1, 1]
    assert store.num_keys() > before
    ranks[0].forget("topic")
    assert store.num_keys() == before


def test_a_wait_that_is_in_vain_ends() -> None:
    """Who knows that a rank is gone does not wait for it; a word that was given before counts."""
    waiting, _ = meetings(2, dist.HashStore(), timeout_s=600.0)
    waiting.watch = lambda: hf.HoldfastError("rank 1: it has died")
    with pytest.raises(hf.HoldfastError, match="rank 1: it has died"):
        waiting.agree("topic", lambda: 0)
    given = meetings(2, dist.HashStore())
    given[1]._set("topic/1", {"code": code_id(), "value": 1})
    given[0].watch = waiting.watch
    assert given[0].agree("topic", lambda: 0, sum) == 1


def test_what_an_earlier_life_left_in_the_store_is_not_read(monkeypatch) -> None:
    """Torchrun keeps its store over restarts, and counts those of a replaced node anew: both meet in one life."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    store = dist.HashStore()

    def lived(order: list[int]) -> list[Any]:
        """Start ranks one after the other, each with an environment of its own, and let them meet."""
        found: dict[int, Any] = {}
        threads = []
        for rank in order:
            rendezvous._numbers.clear()  # they are new processes
            rendezvous._met.clear()
            info, here = RankInfo(rank=rank, world_size=3), threading.Event()
            there = rendezvous.StoreLife(store, info)

            def work(rank: int = rank, info: RankInfo = info, there: Any = there, here: Any = here) -> None:
                if rank == 0:
                    part = there.join(20.0)
                    here.set()
                else:
                    here.set()
                    part = there.join(20.0)
                with lock:
                    rendezvous._met.clear()
                    meeting = Rendezvous(part, info, name="run", timeout_s=20.0, look=there.look)
                found[rank] = meeting.agree("all", lambda: there._own, lambda given: given)

            threads.append(threading.Thread(target=work))
            threads[-1].start()
            here.wait(20.0)
        for thread in threads:
            thread.join()
        assert found[0] == found[1] == found[2]
        return found[0]

    lock = threading.Lock()
    orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]]
    numbers = [number for order in orders for number in lived(order)]
    assert len(set(numbers)) == 3 * len(orders), "nobody's word of an earlier life"
    with pytest.raises(hf.HoldfastError, match=r"rank 0 did not come within 0.2 s"):
        rendezvous._numbers.clear()
        rendezvous.StoreLife(store, RankInfo(rank=1, world_size=3)).join(0.2)


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing; an address for documentation
        except OSError:
            pytest.skip("this machine has no network but loopback")
        return str(probe.getsockname()[0])


def test_on_one_machine_only_that_machine_can_connect() -> None:
    """All ranks here: loopback, whatever else there is."""
    listener, addresses = rank_group._listen([], alone=True, backlog=1)
    with listener:
        assert addresses == [("127.0.0.1", listener.getsockname()[1])]


def test_on_several_machines_it_is_the_address_the_others_have_just_used() -> None:
    """One socket on the address by which the other machines know the master; not on all interfaces."""
    own = _own_address()
    listener, addresses = rank_group._listen([["203.0.113.7", own], [own]], alone=False, backlog=2)
    with listener:
        assert listener.getsockname() == addresses[0] == (own, addresses[0][1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", addresses[0][1]), timeout=5)
        socket.create_connection(addresses[0], timeout=5).close()


@pytest.mark.parametrize("elsewhere", [[], [[]], [["203.0.113.7"]], [["127.0.0.1"]]])
def test_if_nobody_knows_it_is_all_interfaces(elsewhere: list[list[str]]) -> None:
    """The others gave no address of ours (another master, a name that means loopback here): still reachable."""
    listener, addresses = rank_group._listen(elsewhere, alone=False, backlog=2)
    with listener:
        assert addresses
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5).close()


def test_more_ranks_than_files_may_be_open_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides for all; the message has both numbers. The soft limit is nobody's concern."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    facts = [{"machine": "a", "holdfast": "1", "world_size": 4033, "master": []}]
    ours = rank_group.RankGroup.__new__(rank_group.RankGroup)
    ours.world_size = 4033
    with pytest.raises(ConfigError, match=r"4033 ranks need 4097 open files .* may have 4096 \(hard limit\)"):
        ours._open(facts)
    ours.world_size = 4032
    ours._open(facts)
    assert ours._listener is not None
    ours._listener.close()
