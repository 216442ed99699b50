"""Merging of reported directories, decided on names, sizes and digests alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.writer.ingest.merge import MergePlan, contested, merge, suffixed
from holdfast.writer.ingest.sources import Contents, SourceFile


def contents(rank: int, files: dict[str, bytes], *, manifest: Manifest | None = None, **fields: Any) -> Contents:
    listed = {} if manifest is None else {entry.path: entry for entry in manifest.files}
    found = tuple(
        SourceFile(rank=rank, name=name, source=f"/{rank}/{name}", size=len(data), movable=True, entry=listed.get(name))
        for name, data in sorted(files.items())
    )
    file = None
    if manifest is not None:
        file = SourceFile(rank=rank, name="manifest.json", source=f"/{rank}/manifest.json", size=9, movable=True)
    return Contents(rank=rank, files=found, manifest=manifest, manifest_file=file, **fields)


def checkpoint(files: dict[str, bytes], **fields: Any) -> Manifest:
    entries = tuple(
        FileEntry(path=name, size=len(data), digest=bytes_digest(data), role="tensors", reused_from="before")
        for name, data in files.items()
    )
    return Manifest(files=entries, **fields)


def merged(*sources: Contents, data: dict[tuple[int, str], bytes] | None = None) -> tuple[MergePlan, dict[str, int]]:
    """The plan, and the rank whose bytes each path gets. Only digests that were asked for are given."""
    data = data or {}
    asked = contested(sources)
    plan = merge(sources, {(one.rank, one.name): bytes_digest(data[one.rank, one.name]) for one in asked})
    return plan, {item.name: item.rank for item in plan.items}


def of_ranks(files: dict[int, dict[str, bytes]]) -> tuple[MergePlan, dict[str, int]]:
    data = {(rank, name): content for rank, named in files.items() for name, content in named.items()}
    return merged(*(contents(rank, named) for rank, named in files.items()), data=data)


def test_directories_without_files_are_kept() -> None:
    """Those that hold nothing on any rank, without those that others lie in; no warning."""
    one = contents(0, {"a": b"1"}, bare=("runs", "x/y", "b"))
    plan, _ = merged(one, contents(1, {"b/c": b"2"}, bare=("runs", "x")))
    assert plan.folders == ("runs", "x/y")
    assert plan.warnings == ()
    assert MergePlan.from_json(plan.to_json()).folders == plan.folders
    with pytest.raises(ConfigError, match=r"'a' is a file of rank 0 .* and a directory of rank 1"):
        merged(one, contents(1, {}, bare=("a/b",)))


def test_distinct_names_all_stay() -> None:
    """Shards with names of their own are simply put together, and nothing has to be read for it."""
    plan, paths = of_ranks({0: {"a-0.pt": b"1"}, 1: {"a-1.pt": b"1", "deep/b.pt": b"2"}})
    assert paths == {"a-0.pt": 0, "a-1.pt": 1, "deep/b.pt": 1}
    assert plan.writers == (0, 1)
    assert plan.warnings == ()
    assert contested([contents(0, {"a": b"1"}), contents(1, {"b": b"1"})]) == []


def test_equal_files_are_stored_once() -> None:
    """Four ranks with the same directory: the files of the lowest rank, no warning."""
    same = {"model.pt": b"12345", "cfg/x.json": b"{}"}
    plan, paths = of_ranks(dict.fromkeys(range(4), same))
    assert paths == {"model.pt": 0, "cfg/x.json": 0}
    assert plan.warnings == ()


def test_differing_files_are_all_kept() -> None:
    """The lowest rank keeps the name, each rank that differs from it gets one of its own, and one warning says so."""
    files = {3: b"ccc", 1: b"aaa", 2: b"aaa", 5: b"ccc", 4: b"longer"}
    plan, paths = of_ranks({rank: {"a/model.pt": data} for rank, data in files.items()})
    assert paths == {"a/model.pt": 1, "a/model.rank-3.pt": 3, "a/model.rank-4.pt": 4, "a/model.rank-5.pt": 5}
    (warning,) = plan.warnings
    for word in ("a/model.pt is that of rank 1", "a/model.rank-3.pt", "a/model.rank-5.pt"):
        assert word in warning


def test_only_what_may_be_equal_is_read() -> None:
    """A file whose size differs from that of the rank that keeps the name needs no digest."""
    sources = [contents(0, {"m": b"1234"}), contents(1, {"m": b"12"}), contents(2, {"m": b"34"})]
    assert contested(sources) == []
    asked = contested([*sources, contents(3, {"m": b"9999"})])
    assert [(one.rank, one.name) for one in asked] == [(0, "m"), (3, "m")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.pt", "model.rank-3.pt"),
        ("m", "m.rank-3"),
        (".env", ".env.rank-3"),
        ("a.b/c.tar.gz", "a.b/c.tar.rank-3.gz"),
    ],
)
def test_suffixed(name: str, expected: str) -> None:
    """The rank goes before the last suffix of the last part."""
    assert suffixed(name, 3, {name}) == expected


def test_a_rank_name_never_takes_anothers() -> None:
    """Somebody has called a file model.rank-1.pt himself: it stays, ours gets another name."""
    plan, paths = of_ranks(
        {0: {"model.pt": b"0", "model.rank-1.pt": b"x"}, 1: {"model.pt": b"1", "model.rank-1-2.pt/deep": b"y"}}
    )
    assert paths == {"model.pt": 0, "model.rank-1.pt": 0, "model.rank-1-2.pt/deep": 1, "model.rank-1-3.pt": 1}
    assert "model.rank-1-3.pt" in plan.warnings[0]


def test_a_file_cannot_be_a_directory() -> None:
    """Rank 0 has a file where rank 1 has a directory: refused, naming both."""
    with pytest.raises(ConfigError, match=r"'state' is a file of rank 0 \(/0/state\) and a directory of rank 1"):
        of_ranks({0: {"state": b""}, 1: {"state/a": b""}})


def test_metadata_of_the_lowest_rank_is_kept() -> None:
    """Metadata that differ on other ranks are left out, and that is said; equal ones are not mentioned."""
    a, b, c = contents(0, {}), contents(1, {}, metadata=b'{"a":1}'), contents(2, {}, metadata=b'{"a":2}')
    plan, _ = merged(c, a, b)
    assert plan.metadata == b'{"a":1}'
    assert "rank 2" in plan.warnings[0]
    assert merged(b, contents(3, {}, metadata=b'{"a":1}'))[0].warnings == ()
    assert merged(a)[0].metadata is None


def test_a_checkpoint_keeps_roles_and_digests() -> None:
    """One rank reports a Holdfast checkpoint: its entries go over as they are, less what they were shared with."""
    files = {"model-00001-5f3a9c01-1.safetensors": b"1" * 50, "state-5f3a9c01-1.json": b"{}"}
    manifest = checkpoint(files, writers=(0, 1), world_size=2, epoch=1.5, extra={"k": (1, 2)}, versions={"torch": "2"})
    plan, paths = merged(contents(0, {"notes.txt": b"n"}), contents(1, {**files, "more.txt": b"m"}, manifest=manifest))
    assert paths == {**dict.fromkeys(files, 1), "more.txt": 1, "notes.txt": 0}
    entries = {item.name: item.entry for item in plan.items}
    first = entries["model-00001-5f3a9c01-1.safetensors"]
    assert first is not None
    assert (first.role, first.digest, first.reused_from) == ("tensors", manifest.files[0].digest, None)
    assert entries["more.txt"] is entries["notes.txt"] is None
    assert plan.writers == (0, 1)
    assert plan.fields == {"world_size": 2, "epoch": 1.5, "versions": {"torch": "2"}, "extra": {"k": (1, 2)}}
    assert plan.warnings == ()


def test_the_adopted_checkpoint_keeps_its_names() -> None:
    """A lower rank has a file of the same name: it is the one that is renamed, for the index names the other."""
    files = {"shard.bin": b"of the checkpoint"}
    _, paths = merged(
        contents(0, {"shard.bin": b"other"}), contents(2, files, manifest=checkpoint(files, checkpoint_id="c"))
    )
    assert paths == {"shard.bin": 2, "shard.rank-0.bin": 0}


def test_of_several_checkpoints_the_lowest_is_adopted() -> None:
    """The others become files like any, their manifests among them, under a name that says whose it is."""
    one, two = {"state-aaaaaaaa-1.json": b"{1}"}, {"state-bbbbbbbb-1.json": b"{2}"}
    plan, paths = merged(
        contents(1, one, manifest=checkpoint(one, checkpoint_id="1")),
        contents(2, two, manifest=checkpoint(two, checkpoint_id="2")),
    )
    assert paths == {"state-aaaaaaaa-1.json": 1, "state-bbbbbbbb-1.json": 2, "manifest.rank-2.json": 2}
    entries = {item.name: item.entry for item in plan.items}
    assert entries["state-aaaaaaaa-1.json"] is not None
    assert entries["state-bbbbbbbb-1.json"] is None
    assert "load() gives that of rank 1" in plan.warnings[0]


def test_copies_of_one_checkpoint_are_one() -> None:
    """All ranks report the same Holdfast checkpoint: stored once, nothing read, nothing said."""
    files = {"state-aaaaaaaa-1.json": b"{1}"}
    sources = [contents(rank, files, manifest=checkpoint(files, checkpoint_id="1")) for rank in range(3)]
    assert contested(sources) == []
    plan, paths = merged(*sources)
    assert paths == {"state-aaaaaaaa-1.json": 0}
    assert plan.warnings == ()


def test_nothing_at_all() -> None:
    """Ranks with empty directories make a plan without files."""
    plan, paths = merged(contents(2, {}), contents(3, {}))
    assert paths == {}
    assert plan.writers == (2, 3)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 4),
        st.dictionaries(
            st.sampled_from(["m.pt", "m.rank-1.pt", "m.rank-1-2.pt", "n", "d/m.pt"]),
            st.sampled_from([b"", b"1", b"2", b"33"]),
        ),
        min_size=1,
    )
)
def test_every_rank_finds_its_bytes(files: dict[int, dict[str, bytes]]) -> None:
    """Whatever the ranks have: each content is there, no path twice, and the plan survives being written down."""
    plan, paths = of_ranks(files)
    assert len(paths) == len(plan.items)
    stored = {item.name: files[item.rank][item.source.split("/", 2)[2]] for item in plan.items}
    for rank, named in files.items():
        for name, data in named.items():
            own = [path for path, item_rank in paths.items() if item_rank == rank and stored[path] == data]
            assert stored[name] == data or own, (rank, name)
    assert {name for named in files.values() for name in named} <= set(paths)
    assert MergePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
