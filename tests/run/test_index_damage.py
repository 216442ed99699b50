"""run.json is a cache: whatever happens to its bytes, what is resumed from is the newest, as the manifests have it."""

from __future__ import annotations

import json
import random
from itertools import count

import pytest
from catalog_kit import begin, save

from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE, RunIndex
from holdfast.storage import MemoryStorage

_numbers = count()


@pytest.fixture
def made():
    """A run of two attempts and seven checkpoints, one of them quarantined, finished, with notes."""
    storage = MemoryStorage(f"index-damage-{next(_numbers)}")
    catalog = begin(storage)
    for step in (9, 10, 11, 30):
        save(catalog, step, metrics={"loss": 1.0 / step})
    catalog = begin(storage, "00beef00")
    catalog.index.resumed("step_0011", step=11, attempt=1)
    for step in (12, 20, 21):
        save(catalog, step, metrics={"loss": 1.0 / step})
    catalog.index.note("user", {"a": [1, "ü"]})
    catalog.index.quarantine("step_0020", "it does not load")
    catalog.index.finish({"step": 21})
    return storage


def told(catalog: Catalog) -> list[tuple]:
    return [(one.name, one.attempt, one.step, dict(one.metrics)) for one in catalog.records()]


def check(made, data: bytes, truth: list[tuple]) -> None:
    """A damaged index gives what the manifests say: at most, what it alone knew is lost."""
    made.put(RUN_FILE, data)
    catalog = Catalog(made)
    assert [row for row in told(catalog) if row[0] != "step_0020"] == truth
    newest = catalog.latest()
    assert newest is not None
    assert newest.name == "step_0021"
    assert next(catalog.candidates()).manifest.step == 21
    assert RunIndex.load(made).damage is not None, "each byte is under a digest"
    begin(made, "0badf00d")  # the next start works too, and is numbered above all
    after = RunIndex.load(made)
    assert after.current is not None
    assert (after.current.attempt, after.damage) == (3, None)
    for info in list(made.list("reports")):
        if "0badf00d" in info.path:
            made.delete(info.path)


def flips(data: bytes, num: int | None) -> list[tuple[int, int]]:
    every = [(at, bit) for at in range(len(data)) for bit in range(8)]
    return every if num is None else random.Random(5).sample(every, num)


def damaged(made, num):
    data = made.read(RUN_FILE)
    truth = [row for row in told(Catalog(made)) if row[0] != "step_0020"]
    assert [row[0] for row in truth][:2] == ["step_0021", "step_0012"]
    for at, bit in flips(data, num):
        check(made, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], truth)
    for size in random.Random(6).sample(range(len(data)), 20):
        check(made, data[:size], truth)


def test_flipped_bits_and_cut_ends(made):
    """Any of them: no step, attempt or name is believed that was not written."""
    damaged(made, 250)


@pytest.mark.slow
def test_every_flipped_bit(made):
    """The same, all of them."""
    damaged(made, None)


def test_one_part_is_damaged_and_the_other_is_kept(made):
    """A flip in a row costs no note; a flip in the notes costs no more than what the reports do not know."""
    data = made.read(RUN_FILE)
    at = data.rindex(b'"step_0011"')
    made.put(RUN_FILE, data[:at] + b'"step_0091"' + data[at + 11 :])
    index = RunIndex.load(made)
    assert "differs from its digest" in (index.damage or "")
    assert (index.notes, index.finished is not None, len(index.attempts), index.rows) == (
        {"user": {"a": [1, "ü"]}}, True, 2, {},
    )  # fmt: skip
    catalog = Catalog(made)
    assert {one.name for one in catalog.records()} == {
        "step_0009",
        "step_0010",
        "step_0011",
        "step_0030",
        "step_0012",
        "step_0021",
    }


def test_an_index_without_digests_is_read(made):
    """Versions before this one wrote none; what the newest is they tell too, and the manifest has the last word."""
    data = made.read(RUN_FILE)
    body = json.loads(data)
    del body["head_digest"], body["rows_digest"]
    made.put(RUN_FILE, json.dumps(body).encode())
    assert RunIndex.load(made).damage is None
    assert Catalog(made).latest().name == "step_0021"
    row = next(row for row in body["rows"] if row[0] == "step_0009")
    row[2] = 99
    row[1] = 2
    made.put(RUN_FILE, json.dumps(body).encode())
    assert Catalog(made).latest().name == "step_0021"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(attempts=[{"attempt": 1, "start_id": 3}]),
        lambda body: body.update(attempts=[{"attempt": 1, "start_id": "a", "resumed_from": {"step": 1}}]),
        lambda body: body.update(attempts=[{"attempt": 1 << 70, "start_id": "a"}]),
        lambda body: body.update(attempts=7),
        lambda body: body.update(quarantined={"a": 1}),
        lambda body: body.update(finished={"attempt": "x"}),
        lambda body: body.update(finished=[]),
        lambda body: body.update(notes=[1]),
        lambda body: body.update(run_id=[]),
        lambda body: body.update(rows=[["step_0009", 1, 9, 7]]),
        lambda body: body.update(rows=[["step_0009", 1, 9, "[[[["]]),
        lambda body: body.update(rows=[["step_0009", 1, 9, "[1,2,3,4,[],5]"]]),
        lambda body: body.update(rows=[["step_0009", 1, 9, json.dumps([None, 0.0, 1, 0, False, [1], "x"])]]),
        lambda body: body.update(rows=[["step_0009", 1, 9, "[" * 5000 + "]" * 5000]]),
        lambda body: body.update(rows={}),
        lambda body: body.update(keep="newest"),
    ],
)
def test_an_index_that_lies_about_its_kind(made, change):
    """With right digests, or of a version without them: what is not of the kind written is rebuilt."""
    data = made.read(RUN_FILE)
    body = json.loads(data)
    del body["head_digest"], body["rows_digest"]
    change(body)
    made.put(RUN_FILE, json.dumps(body).encode())
    catalog = Catalog(made)
    assert catalog.latest().name == "step_0021"
    assert len({one.name for one in catalog.records()} - {"step_0020"}) == 6
    catalog.index.to_bytes()
