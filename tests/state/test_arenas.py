"""Which memory a copy goes to: neither a save under way nor the newest snapshot is written over."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.state.save.arenas import SMALL_COPY, Arenas


class Client:
    """Takes what it is told, and says whether the writer heard of it in time."""

    hears = True

    def release(self, arena: Any, timeout_s: float | None) -> bool:
        return self.hears

    def attach(self, arena: Any) -> None:
        pass


def layout_of(nbytes: int) -> Any:
    return SimpleNamespace(arena_bytes=nbytes, write_static=lambda view: None)


BIG, SMALL = layout_of(SMALL_COPY), layout_of(1 << 20)


def turn(arenas: Arenas, layout: Any, step: int | None = None, client: Any = None) -> Any:
    return arenas.turn(layout, client or Client(), step, release_s=0.0, timeout_s=0.01)


def kept(arenas: Arenas, layout: Any, step: int) -> Any:
    arena = turn(arenas, layout, step)
    arenas.keep(step)
    return arena


def saved(arenas: Arenas, layout: Any, sealing: Future[None] | None = None) -> tuple[Any, Future[Any]]:
    arena, future = turn(arenas, layout), Future[Any]()
    arenas.write(future, sealing)
    return arena, future


@pytest.mark.parametrize("layout", [BIG, SMALL], ids=["big", "small"])
def test_snapshots_take_turns_in_two_arenas(layout: Any) -> None:
    arenas = Arenas(has_peers=False)
    places = [kept(arenas, layout, step) for step in range(4)]
    assert places[0] is places[2] is not places[1] is places[3]
    assert len(arenas.shared()) == 2


def test_a_small_state_has_a_third_arena_while_a_save_is_written() -> None:
    arenas = Arenas(has_peers=False)
    save, _ = saved(arenas, SMALL)
    places = [kept(arenas, SMALL, step) for step in range(3)]
    assert save not in places
    assert len(set(places)) == 2


def test_a_big_state_waits_for_the_save_and_gives_up_once() -> None:
    arenas = Arenas(has_peers=False)
    save, future = saved(arenas, BIG)
    assert not arenas.are_taken
    assert kept(arenas, BIG, 1) is not save
    assert arenas.are_taken
    assert [turn(arenas, BIG), turn(arenas, BIG)] == [None, None]
    assert arenas.has_given_up
    future.set_result(None)
    assert not arenas.has_given_up
    assert not arenas.are_taken
    assert turn(arenas, BIG) is save


@pytest.mark.parametrize("has_peers", [False, True])
def test_a_second_copy_of_a_step_leaves_peers_the_step_before(has_peers: bool) -> None:
    """A rank that has not done this step holds the snapshot before it, and only what all hold can be committed."""
    arenas = Arenas(has_peers=has_peers)
    before, now = kept(arenas, BIG, 1), kept(arenas, BIG, 2)
    assert turn(arenas, BIG, 2) is (now if has_peers else before)
    assert turn(arenas, BIG, 3) is (now if has_peers else before)


@pytest.mark.parametrize("outcome", ["under way", "sealed", "dropped"])
def test_a_save_from_a_device_counts_once_it_is_sealed(outcome: str) -> None:
    arenas = Arenas(has_peers=False)
    snapshot = kept(arenas, BIG, 1)
    sealing = Future[None]()
    save, future = saved(arenas, BIG, sealing)
    if outcome == "sealed":
        sealing.set_result(None)
    elif outcome == "dropped":
        sealing.set_exception(OSError("no writer"))
        future.set_exception(OSError("no writer"))
    assert save is not snapshot
    assert turn(arenas, BIG) is {"under way": None, "sealed": snapshot, "dropped": save}[outcome]


def test_the_snapshot_of_a_layout_that_is_gone_stays_until_a_newer_copy() -> None:
    arenas = Arenas(has_peers=False)
    snapshot = kept(arenas, BIG, 1)
    arenas.drop()
    assert arenas.newest is None
    newer = turn(arenas, SMALL)
    assert newer is not snapshot
    assert len(snapshot.view) == BIG.arena_bytes
    arenas.keep(2)
    with pytest.raises(ValueError, match="closed"):
        _ = snapshot.view
    assert len(newer.view) == SMALL.arena_bytes


def test_a_writer_that_does_not_hear_in_time_gives_no_arena() -> None:
    arenas, client = Arenas(has_peers=False), Client()
    client.hears = False
    assert turn(arenas, BIG, client=client) is None
    assert not arenas.has_given_up
    assert turn(arenas, BIG) is arenas.newest
