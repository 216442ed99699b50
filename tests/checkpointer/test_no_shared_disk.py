"""What a start makes of the disks of machines that share none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import holdfast as hf
from holdfast.checkpointer import remote
from holdfast.checkpointer.start import check_room
from holdfast.format.commit import read_manifest
from holdfast.format.parts import part_name, staged_name
from holdfast.storage import LocalStorage

MIB = 1 << 20
SAVE = "aaaaaaa1-1"


class Silent(LocalStorage):
    """A disk that does not answer."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        raise hf.StorageError(f"{path}: no answer")


def staged(disk: Path) -> LocalStorage:
    """A disk with a save of another run staged on it."""
    hf.save(disk / "made", {"w": torch.ones(1)})
    local = LocalStorage(disk)
    local.put(f"step_00000001/{staged_name(SAVE)}", read_manifest(local, "made").to_bytes())
    return local


def test_what_another_run_has_staged_is_not_swept(tmp_path: Path) -> None:
    """The start is refused instead: the other run may want to go on with it."""
    opened = SimpleNamespace(run_id="another", records=())
    with pytest.raises(hf.ConfigError, match="holds another run"):
        remote._left(staged(tmp_path), cast("Any", opened), 0)


def test_a_damaged_part_is_none_and_a_disk_that_fails_an_error(tmp_path: Path) -> None:
    """A save without one of its parts is swept; nothing is swept because a disk did not answer for a moment."""
    one: dict[str, Any] = {"name": "step_00000001", "save": SAVE, "writers": 2}
    LocalStorage(tmp_path).put(f"step_00000001/{part_name(1, SAVE)}", b"{")
    assert remote._parts_here(LocalStorage(tmp_path), one) == []
    with pytest.raises(hf.StorageError):
        remote._parts_here(Silent(tmp_path), one)


def room(tmp_path: Path, needs: list[list[Any]], free: int = 1000 * MIB, **more: Any) -> str:
    return check_room(LocalStorage(tmp_path), free, needs, {}, **more)


def test_each_machine_has_to_hold_the_parts_of_its_own_ranks(tmp_path: Path) -> None:
    """Not the whole checkpoint; and one that has no room is named by its first rank."""
    parts = [["a", 300 * MIB, 700 * MIB], ["a", 300 * MIB, 700 * MIB], ["b", 300 * MIB, 400 * MIB]]
    assert "900.0 MiB; 400.0 MiB are free" in room(tmp_path, parts)
    with pytest.raises(hf.StorageFullError, match=r"on the machine of rank 2 .* the parts of 1 of 3 ranks"):
        room(tmp_path, [*parts[:2], ["b", 300 * MIB, 200 * MIB]])


def test_one_place_for_all_ranks_has_to_hold_all_parts(tmp_path: Path) -> None:
    """What rank 0's writer finds free there is compared with the sum."""
    parts = [["", 300 * MIB, None], ["", 300 * MIB, None]]
    assert "600.0 MiB; 1000.0 MiB are free" in room(tmp_path, parts)
    with pytest.raises(hf.StorageFullError, match="one checkpoint takes about 600"):
        room(tmp_path, parts, free=400 * MIB)


@pytest.mark.parametrize(
    ("keep", "num_there", "missing"),
    [
        (hf.Keep(last=3), 0, "200.0 MiB more"),
        (hf.Keep(last=2), 0, None),
        (hf.Keep(last=2, best=1, metric="val"), 0, "200.0 MiB more"),
        (hf.Keep(last=3), 2, None),  # those are on the disk already
        (hf.Keep(last=3, every="100ba"), 0, None),  # without a bound
        (None, 0, None),
    ],
)
def test_room_for_keep_and_no_more_is_said(
    tmp_path: Path, keep: hf.Keep | None, num_there: int, missing: str | None
) -> None:
    """Retention keeps n and a save needs room for one more: a disk that has it not is said at the start."""
    line = room(tmp_path, [["", 300 * MIB, None]], keep=keep, num_there=num_there)
    assert ("NOT enough for keep" in line) == (missing is not None)
    assert missing is None or missing in line


def test_what_waits_for_its_upload_takes_room_too(tmp_path: Path) -> None:
    """A disk in front of a remote holds what its own rules keep, and what is not uploaded yet."""
    line = room(tmp_path, [["", 300 * MIB, None]], keep=hf.Keep(last=1), waiting=2)
    assert "1 are kept, 2 more may wait for their upload" in line
    assert "200.0 MiB more" in line
    assert "NOT enough" not in room(tmp_path, [["", 300 * MIB, None]], keep=hf.Keep(last=1), waiting=1)
