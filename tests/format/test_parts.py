"""Part and plan files: what they say, and what is removed on their word."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import CorruptCheckpointError, StorageUnavailableError
from holdfast.format.commit import PartSummary, commit
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.format.names import start_id_of
from holdfast.format.parts import (
    is_passing,
    is_plan,
    part_name,
    plan_name,
    put_part,
    put_plan,
    read_part,
    read_plan,
    remove_part,
    sweep_passing,
    sweep_planned,
)
from holdfast.storage import LocalStorage, MemoryStorage

SAVE = "00c0ffee-1f"


def entry(path: str, data: bytes = b"1", **fields: object) -> FileEntry:
    return FileEntry(path=path, size=len(data), digest=bytes_digest(data), **fields)  # type: ignore[arg-type]


def test_names_carry_the_start_id() -> None:
    """Both are files of ours by their names; nothing else passes for one."""
    for name in (part_name(3, SAVE), plan_name(SAVE)):
        assert is_passing(name)
        assert start_id_of(name) == "00c0ffee"
    assert part_name(3, SAVE) == "part-00003-00c0ffee-1f.json"
    assert is_plan(plan_name(SAVE))
    assert not is_plan(part_name(3, SAVE))
    for name in ("part-00003-00c0ffee-1f.safetensors", "part-1.json", "plan.json", f"index-00000-{SAVE}.json"):
        assert not is_passing(name)


def test_a_part_is_read_as_written(tmp_path: Path) -> None:
    """What a writer says about its files is what the committing one reads; no part is no error."""
    storage = MemoryStorage(tmp_path.name)
    part = PartSummary(writer=3, files=(entry("a.bin", chunks=("digests-00003-00c0ffee-1f.bin", 8), writer=3),))
    assert read_part(storage, "c", SAVE, 3) is None
    put_part(storage, "c", SAVE, part)
    assert read_part(storage, "c", SAVE, 3) == part


class Breaking(MemoryStorage):
    """Takes some deletions, and then no more."""

    left = 0

    def delete(self, path: str) -> None:
        if self.left == 0:
            raise StorageUnavailableError("no answer")
        self.left -= 1
        super().delete(path)


@pytest.mark.parametrize("left", range(3))
def test_a_part_that_is_half_removed_has_no_part_file(tmp_path: Path, left: int) -> None:
    """Whoever finds the part file may commit the part: so it goes before the first of the files."""
    storage = Breaking(tmp_path.name)
    files = [f"model-00003-{SAVE}.bin", f"index-00003-{SAVE}.json"]
    for path in files:
        storage.put(f"c/{path}", b"1")
    put_part(storage, "c", SAVE, PartSummary(writer=3, files=tuple(map(entry, files))))
    storage.left = left
    with pytest.raises(StorageUnavailableError):
        remove_part(storage, "c", SAVE, 3)
    is_whole = all(storage.exists(f"c/{path}") for path in files)
    assert is_whole or read_part(storage, "c", SAVE, 3) is None
    storage.left = 9
    remove_part(storage, "c", SAVE, 3)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"writer":3}', b'{"writer":4,"files":[]}',
                                  b'{"writer":3,"files":[{"path":"../x"}]}'])  # fmt: skip
def test_a_damaged_part_is_refused(tmp_path: Path, data: bytes) -> None:
    """A part file that nobody wrote like that stops the commit by name."""
    storage = MemoryStorage(tmp_path.name)
    storage.put(f"c/{part_name(3, SAVE)}", data)
    with pytest.raises(CorruptCheckpointError):
        read_part(storage, "c", SAVE, 3)


def test_planned_files_are_swept_with_their_directories(tmp_path: Path) -> None:
    """What the plan lists goes, however far it came; what it does not list stays."""
    storage = LocalStorage(tmp_path)
    put_plan(storage, "c", SAVE, ["model.pt", "deep/er/a.pt", "deep/b.pt", "never.pt"], {"items": []})
    storage.put("c/model.pt", b"1")
    storage.put("c/deep/b.pt", b"1")
    (tmp_path / "c/deep/er").mkdir()
    (tmp_path / "c/mine.txt").write_text("mine")
    assert read_plan(storage, "c", plan_name(SAVE)) == (
        ("deep/b.pt", "deep/er/a.pt", "model.pt", "never.pt"),
        {"items": []},
    )
    swept = sweep_planned(storage, "c", plan_name(SAVE))
    assert plan_name(SAVE) in swept
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["c", "c/mine.txt"]
    assert sweep_planned(storage, "c", plan_name(SAVE)) == []


@pytest.mark.parametrize(
    "data", [b"x", b'{"plan":1,"files":["../../secret"],"work":{}}', b'{"files":["link/a"],"work":{}}']
)
def test_a_plan_that_leads_outside_removes_nothing(tmp_path: Path, data: bytes) -> None:
    """A damaged plan, a path out of the checkpoint, a link out of it: everything is left alone, and that is said."""
    root, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("mine")
    (tmp_path / "secret").write_text("mine")
    storage = LocalStorage(root)
    storage.put(f"c/{plan_name(SAVE)}", data)
    (root / "c/link").symlink_to(outside)
    assert sweep_planned(storage, "c", plan_name(SAVE)) == []
    assert (outside / "a").read_text() == (tmp_path / "secret").read_text() == "mine"
    assert storage.exists(f"c/{plan_name(SAVE)}")


def test_passing_files_beside_a_manifest(tmp_path: Path) -> None:
    """Those of dead lives go, those of other lives and those that the checkpoint lists stay."""
    storage = MemoryStorage(tmp_path.name)
    listed = part_name(7, SAVE)
    for name in ("a", listed, part_name(0, SAVE), part_name(1, "feedbeef-2")):
        storage.put(f"c/{name}", b"1")
    put_plan(storage, "c", SAVE, ["a"], {})
    commit(storage, "c", {}, [PartSummary(writer=0, files=(entry("a"), entry(listed)))])
    assert sweep_passing(storage, "c", {"0badc0de"}) == []
    assert sweep_passing(storage, "c", {"00c0ffee"}) == [part_name(0, SAVE), plan_name(SAVE)]
    left = {info.path for info in storage.list("c")}
    assert left == {"c/a", f"c/{listed}", "c/manifest.json", f"c/{part_name(1, 'feedbeef-2')}"}
