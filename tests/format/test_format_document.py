"""docs/format.md is true: its example is a checkpoint, and its program reads it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from catalog_kit import index_of

from holdfast.checkpoint.verify import verify_files
from holdfast.format.codec import _NODES, DECODERS, decode, loads
from holdfast.format.commit import read_manifest
from holdfast.format.parts import plan_name, read_part, read_plan, sweep_passing
from holdfast.run.record import read_sidecar, unpack
from holdfast.storage import LocalStorage

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
BLOCKS = dict(re.findall(r"^```(?:json|python) (\S+)\n(.*?)\n```$", DOC, re.DOTALL | re.MULTILINE))
MODEL = "model-00000-5f3a9c01-1.safetensors"


@pytest.fixture
def example(tmp_path):
    """The checkpoint of the document, built from its text alone."""
    root = tmp_path / "ckpt"
    root.mkdir()
    for name, text in BLOCKS.items():
        if name.endswith(".json"):
            (root / name).write_bytes((text + ("\n" if name == "manifest.json" else "")).encode())
    header = BLOCKS["header"].encode().ljust(4096 - 8)
    (root / MODEL).write_bytes(struct.pack("<Q", 4088) + header + struct.pack("<6f", 1, 2, 3, 4, 0.5, -0.5))
    table = re.search(r"in hex, `([0-9a-f]+)`", DOC)
    (root / "digests-00000-5f3a9c01-1.bin").write_bytes(bytes.fromhex(table[1]))
    return root


def test_the_example_is_a_good_checkpoint(example):
    """Every byte agrees with the digests in the text."""
    storage = LocalStorage(example)
    manifest = read_manifest(storage, "", check_sizes=True)
    assert verify_files(storage, "", manifest) == []
    assert (manifest.step, manifest.metrics) == (3, {"loss": 0.25})
    state = decode(loads(BLOCKS["state-5f3a9c01-1.json"].encode()))
    assert (state["seen"], state["best"]) == ((1, 2), float("inf"))


def test_the_example_is_read_without_holdfast(example):
    """The program in the text, run as it stands, gives the tensors and finds damage."""
    np = pytest.importorskip("numpy")
    space = {}
    exec(BLOCKS["read"], space)
    tensors = space["read"](example)
    assert tensors["model/weight"].tolist() == [[1, 2], [3, 4]]
    assert tensors["model/bias"].dtype == np.float32
    assert tensors["model/bias"].tolist() == [0.5, -0.5]
    data = bytearray((example / MODEL).read_bytes())
    data[-1] ^= 1
    (example / MODEL).write_bytes(data)
    with pytest.raises(AssertionError, match=MODEL):
        space["read"](example)


def test_part_and_plan_files_are_as_shown(example):
    """What the text shows is what a commit reads, and what a sweep goes by."""
    storage = LocalStorage(example.parent)
    part = read_part(storage, "ckpt", "5f3a9c02-4", 1)
    assert [(entry.path, entry.writer) for entry in part.files] == [
        ("model-00001-5f3a9c02-4.safetensors", 1),
        ("digests-00001-5f3a9c02-4.bin", 1),
    ]
    name = plan_name("5f3a9c02-4")
    assert read_plan(storage, "ckpt", name) == (("digests-00000-5f3a9c02-4.bin", "model.pt"), {})
    assert sweep_passing(storage, "ckpt", {"5f3a9c02"}) == [
        "digests-00000-5f3a9c02-4.bin", "model.pt", "part-00001-5f3a9c02-4.json", name,
    ]  # fmt: skip


def test_the_index_of_a_run_is_as_shown(example):
    """The run.json of the text is read, and the segment of the text gives back what it held."""
    index = index_of(example)
    assert index.damage is None
    assert [one.details for one in index.attempts] == [{"rank": 1, "seconds": {"detect": 0.004}}, None]
    assert index.notes == {"trainer": {"workers": 2}}
    record = unpack(index.rows["checkpoint_000003"])
    assert (record.step, record.size, record.metrics, record.checkpoint_id) == (4, 4490, {"loss": 0.25}, "0c7e2d")
    segment = example / "reports/00002-acd3ac29-000000.jsonl"
    segment.parent.mkdir()
    segment.write_text(BLOCKS["reports"])
    assert [row["step"] for row in index.history()] == [5]
    assert [one.what for one in index.read_history().events] == ["saved", "deleted"]
    index.rebuild_attempts()
    assert [(one.attempt, one.details) for one in index.attempts] == [(1, {"rank": 1}), (2, None)]
    assert (index.run_id, index.notes) == ("162ee96923cfeae2", {"trainer": {"workers": 2}})


def test_every_tag_is_documented():
    """A tag that the codec knows and the table lacks would be a secret."""
    rows = re.findall(r"^\| (`[a-z]+`(?:, `[a-z]+`)*) \|", DOC.partition("## state-")[2], re.MULTILINE)
    documented = {tag for row in rows for tag in re.findall(r"`([a-z]+)`", row)}
    assert set(_NODES) | set(DECODERS) <= documented


def test_the_changes_of_a_run_are_as_shown(example):
    """The file of changes in the text is read beside a run.json that has its id."""
    (example / "run-changes.json").write_text(BLOCKS["run-changes.json"] + "\n")
    whole = BLOCKS["run.json"]
    (example / "run.json").write_text(whole.replace(' "columns"', ' "changes": "8c1be90a27d5f346",\n "columns"'))
    index = index_of(example)
    assert (index.damage, sorted(index.rows)) == (None, ["checkpoint_000003", "step_00000700"])
    assert unpack(index.rows["step_00000700"]).metrics == {"loss": 0.2}
    (example / "run.json").write_text(whole)
    assert sorted(index_of(example).rows) == ["checkpoint_000003"]


def test_late_metrics(example):
    """The late metrics of the text are read, and their digest holds them."""
    storage = LocalStorage(example)
    storage.put("a/.metrics.json", BLOCKS[".metrics.json"].encode())
    found = read_sidecar(storage, "a")
    assert (found.metrics, found.pinned, found.damage) == ({"val": 0.25}, True, "")
    storage.put("a/.metrics.json", BLOCKS[".metrics.json"].replace("0.25", "0.35").encode())
    assert read_sidecar(storage, "a").damage
