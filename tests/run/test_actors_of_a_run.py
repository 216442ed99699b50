"""Retention, a takeover and a reader, each with another process between any two lines of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from actors_kit import at_every_line
from catalog_kit import Far, begin, names, save
from checkpoint_kit import small

from holdfast import Checkpoint
from holdfast.config import Keep
from holdfast.errors import CheckpointNotFoundError
from holdfast.run import catalog as catalog_module
from holdfast.run import external
from holdfast.run import fence as fence_module
from holdfast.run import view as view_module
from holdfast.run.catalog import Catalog
from holdfast.run.lease import Lease, make_owner
from holdfast.storage import MemoryStorage

LAST = Keep(last=1)
PLACES = (catalog_module, view_module)
KINDS = {"memory": MemoryStorage, "far": Far}
_numbers = count()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_DECIDED_S", 0.0)


def run_of(kind: str, num: int) -> Catalog:
    """Make a run with so many checkpoints, whose owner announces in its lease what it deletes."""
    catalog = begin(KINDS[kind](f"actors-{next(_numbers)}"))
    for step in range(1, num + 1):
        save(catalog, step)
    lease = Lease.acquire(catalog.storage, make_owner("00000001"), wait_s=0)
    catalog.announce = lease.announce
    return catalog


def asked(act: Callable[[Checkpoint], Any]) -> Callable[[Catalog], None]:
    """Make another process that wants something of step_0001; `answers` has what it was told."""

    def between(catalog: Catalog) -> None:
        try:
            act(Checkpoint.at(catalog.storage, "step_0001"))
        except CheckpointNotFoundError:
            answers[catalog] = False
        else:
            answers[catalog] = True

    return between


answers: dict[Catalog, bool] = {}


def hold(checkpoint: Checkpoint) -> None:
    """Take a hold and keep it."""
    holds.append(checkpoint.hold())
    holds[-1].__enter__()


holds: list[Any] = []
ACTS: dict[str, Callable[[Checkpoint], Any]] = {
    "pin": Checkpoint.pin,
    "report": lambda one: one.report(val=9.0),
    "hold": hold,
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        ("pin", "far"),
        ("hold", "far"),
        pytest.param("report", "far", marks=SLOW),
        pytest.param("pin", "memory", marks=SLOW),
        pytest.param("hold", "memory", marks=SLOW),
        pytest.param("report", "memory", marks=SLOW),
    ],
)
def test_who_asks_while_retention_works(act: str, kind: str) -> None:
    """Whoever was not refused finds the checkpoint whole, now and after the next save; of a deleted one nothing is."""
    keep, told = Keep(last=1, best=1, metric="val", mode="max"), set()
    for catalog, deleted in at_every_line(
        PLACES, lambda: run_of(kind, 2), lambda catalog: catalog.prune(keep), asked(ACTS[act])
    ):
        stays = answers.pop(catalog)
        told.add(stays)
        save(catalog, 3, keep=keep)
        assert stays == ("step_0001" in names(catalog)), deleted
        if stays:
            assert Checkpoint.at(catalog.storage, "step_0001").verify().ok
        else:
            assert not list(catalog.storage.list("step_0001"))
        while holds:
            holds.pop().__exit__(None, None, None)
    assert told == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_while_a_fence_is_drawn(kind: str) -> None:
    """An owner that stood still commits: it counts for its successor and for all who look later, or for none."""

    def world() -> Catalog:
        first = begin(KINDS[kind](f"actors-{next(_numbers)}"), "aaaaaaaa")
        save(first, 1)
        return first

    def take_over(first: Catalog) -> Catalog:
        second = Catalog(first.storage)
        attempt = second.index.register_attempt("bbbbbbbb", host="b", pid=2)
        second.draw_fence(attempt.attempt, attempt.start_id)
        return second

    seen = set()
    for first, second in at_every_line(
        (*PLACES, fence_module),
        world,
        take_over,
        lambda first: small(first.storage, "step_0002", run_id=first.index.run_id, attempt=1, step=2),
    ):
        later, held = Catalog(first.storage), names(second)
        assert names(later) == held
        assert later.void == ([] if "step_0002" in held else ["step_0002"])
        assert [one.record.name for one in later.candidates()] == held
        seen.add(len(held))
        first.storage.delete("run.json")
        assert names(Catalog(first.storage)) == held
    assert seen == {1, 2}


@pytest.mark.parametrize("kind", ["far", pytest.param("memory", marks=SLOW)])
def test_a_reader_while_retention_works(kind: str) -> None:
    """It finds the newest checkpoint, and of the others only whole ones, or none."""
    found = set()

    def read(owner: Catalog) -> tuple[Any, list[str]]:
        reader = Catalog(owner.storage)
        return reader.latest(), [one.record.name for one in reader.candidates()]

    for owner, (latest, others) in at_every_line(
        PLACES, lambda: run_of(kind, 3), read, lambda owner: owner.prune(LAST)
    ):
        assert latest is not None
        assert latest.name == others[0] == "step_0003"
        assert names(Catalog(owner.storage)) == ["step_0003"]
        found.add(len(others))
    assert {1, 3} <= found
