"""A manifest is small, closed by its own digest, and believed in nothing else."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from holdfast.errors import ConfigError, CorruptCheckpointError, FormatVersionError
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry, Manifest

D = "xxh3:" + "0" * 32


def sample(**changes):
    files = (
        FileEntry(path="m-00000-deadbeef-1.safetensors", size=70_000, digest=D, role="tensors", chunks=("d.bin", 0)),
        FileEntry(path="d.bin", size=16, digest=D, role="digests", reused_from="step_1"),
        FileEntry(path="sub dir/é\n.txt", size=0, digest=D, writer=2),
    )
    values = {
        "run_id": "r",
        "checkpoint_id": "c",
        "parent": "p",
        "attempt": 2,
        "step": 700,
        "epoch": 1.5,
        "created": "2026-01-01T00:00:00.000+00:00",
        "metrics": {"loss": 0.1, "nan": math.nan, "inf": -math.inf, "v": [1, 2]},
        "world_size": 4,
        "writers": (0, 2),
        "versions": {"holdfast": "0.1.0"},
        "total_bytes": 70_016,
        "reused_bytes": 16,
        "files": files,
        "extra": {"note": (1, 2)},
    }
    return Manifest(**{**values, **changes})


def closed(tree):
    """Write any tree with a right closing line: damage that is not seen by the digest."""
    body = json.dumps(tree).encode()[:-1]
    return body + f',\n"body_digest": "{bytes_digest(body)}"\n}}\n'.encode()


def tree_of(**changes):
    tree = json.loads(sample().to_bytes())
    del tree["body_digest"]
    return {**tree, **changes}


def test_round_trip_keeps_everything_and_is_plain_json():
    """Any JSON reader reads it; NaN and infinities survive in metrics."""
    data = sample().to_bytes()
    json.loads(data, parse_constant=pytest.fail)
    back = Manifest.from_bytes(data)
    assert math.isnan(back.metrics["nan"])
    assert back.metrics["inf"] == -math.inf
    assert repr(back) == repr(sample())
    assert Manifest.from_bytes(Manifest(run_id=None, step=None).to_bytes()) == Manifest(run_id=None, step=None)


def test_a_normal_manifest_is_below_4_kb():
    """Its size does not depend on the number of tensors."""
    files = tuple(
        FileEntry(
            path=f"{name}-00000-deadbeef-1f.safetensors", size=10**9, digest=D, chunks=("d.bin", 0), role="tensors"
        )
        for name in ("model", "optimizer", "ema", "model.frozen")
    )
    rest = tuple(FileEntry(path=path, size=10**7, digest=D, role="digests") for path in ("d.bin", "i.json", "s.json"))
    assert len(sample(files=files + rest).to_bytes()) < 4096


def test_any_damaged_byte_is_found():
    """Flips, truncations and appended bytes: always CorruptCheckpointError, never another version or value."""
    data = sample().to_bytes()
    rng = random.Random(3)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(bytes(broken))
    for cut in (*range(0, len(data), 7), len(data) - 1):
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(data[:cut])
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(data + b" ")


def test_unknown_fields_are_ignored_and_a_newer_minor_version_is_read():
    """Later versions may add."""
    tree = tree_of(future={"a": 1}, format_version="1.7")
    tree["files"][0]["future"] = 1
    assert repr(Manifest.from_bytes(closed(tree))) == repr(sample())


@pytest.mark.parametrize("version", ["2.0", "0.9", "11.3"])
def test_an_unknown_major_version_says_what_to_install(version):
    """Not corruption: the message has the version and the command."""
    with pytest.raises(
        FormatVersionError, match=rf"{re.escape(version)}.*holdfast>=0\.1\.0 is needed: update the checkout"
    ):
        Manifest.from_bytes(closed(tree_of(format_version=version, versions={"holdfast": "0.1.0"}, files=3)))


PATHS = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a//b",
    "./a",
    "a/.",
    "..",
    ".",
    "",
    "a\\..\\b",
    "C:/x",
    "a\0b",
    "a/",
    3,
    None,
    "manifest.json",
    ".metrics.json",
    ".metadata.json",
    "x" * 5000,
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path)[:20])
def test_paths_that_leave_the_checkpoint_are_refused(path):
    """Neither read nor written, in a file's path as in its digest table's."""
    row = {"path": path, "size": 0, "digest": D, "role": "digests"}
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(closed(tree_of(files=[row])))
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(closed(tree_of(files=[{**row, "path": "a", "chunks": [path, 0]}])))
    if isinstance(path, str):
        with pytest.raises(ConfigError):
            sample(files=(FileEntry(path=path, size=0, digest=D),)).to_bytes()


@pytest.mark.parametrize("fields", [{"step": -1}, {"step": 2.0}, {"epoch": "1"}, {"metrics": {1: 2}}, {"run_id": 5}])
def test_a_field_that_no_reader_accepts_is_not_written(fields):
    """What `from_bytes` would call damaged is never committed."""
    with pytest.raises(ConfigError, match=next(iter(fields))):
        sample(**fields).to_bytes()


ROW = {"path": "a", "size": 65_537, "digest": D, "role": "tensors"}
HOSTILE = {
    "another format": tree_of(format="zip"),
    "no version": tree_of(format_version=None),
    "odd version": tree_of(format_version="1"),
    "files are a dict": tree_of(files={}),
    "file is a list": tree_of(files=[[]]),
    "twice": tree_of(files=[ROW, ROW]),
    "negative size": tree_of(files=[{**ROW, "size": -1}]),
    "float size": tree_of(files=[{**ROW, "size": 1.0}]),
    "bool size": tree_of(files=[{**ROW, "size": True}]),
    "huge size": tree_of(files=[{**ROW, "size": 2**80}]),
    "digest": tree_of(files=[{**ROW, "digest": "md5:0"}]),
    "digests not listed": tree_of(files=[{**ROW, "chunks": ["nowhere.bin", 0]}]),
    "digests too short": tree_of(
        files=[{**ROW, "chunks": ["d", 0]}, {**ROW, "path": "d", "size": 15, "role": "digests"}]
    ),
    "digests of another role": tree_of(files=[{**ROW, "chunks": ["d", 0]}, {**ROW, "path": "d", "size": 16}]),
    "step": tree_of(step="7"),
    "negative attempt": tree_of(attempt=-1),
    "epoch": tree_of(epoch=[1]),
    "metrics": tree_of(metrics=[1]),
    "metrics node": tree_of(metrics={"a": {"$": "float", "v": "x"}}),
    "writers": tree_of(writers=["0"]),
    "versions": tree_of(versions={"a": 1}),
}


@pytest.mark.parametrize("tree", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_manifests_are_refused(tree):
    """A right digest does not make a manifest believed."""
    with pytest.raises(CorruptCheckpointError, match=r"x/manifest\.json") as caught:
        Manifest.from_bytes(closed(tree), "x/manifest.json")
    assert caught.value.file is not None
