"""A store whose listings are some seconds old hides no checkpoint from the next start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_kit import plain

from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage import MemoryStorage, resolve
from holdfast.trainers.loop.saving.folder import linked_by


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Words: no listing shows what has one of them in its path; asked for by name, it is there."""
    words: set[str] = set()
    list_all = MemoryStorage.list

    def listed(self: MemoryStorage, prefix: str = "", *, recursive: bool = True) -> Iterator[Any]:
        for info in list_all(self, prefix, recursive=recursive):
            if not any(word in info.path for word in words):
                yield info

    monkeypatch.setattr(MemoryStorage, "list", listed)
    return words


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_the_newest_in_the_save_folder(suffix: str, tmp_path: Path, hidden: set[str]) -> None:
    """run.json or the pointer to the newest names it: the start goes on from there, not from an older one."""
    told: dict[str, Any] = {
        "save_folder": f"memory://stale-{os.getpid()}-{tmp_path.name}/runs",
        "save_filename": "ba{batch}" + suffix,
        "save_interval": "1ba",
        "autoresume": True,
        "run_name": "r",
    }
    plain(None, max_duration="3ba", **told).fit()
    hidden |= {"ba3", "ba2"} if not suffix else {"ba3"}
    again = plain(None, max_duration="4ba", **told)
    assert again.state.timestamp.batch == 3
    again.fit()
    hidden.clear()
    storage = resolve(told["save_folder"])
    assert linked_by(storage, "latest-rank0") == f"ba4{suffix}"
    last = plain(None, max_duration="5ba", **told)
    assert last.state.timestamp.batch == 4


def test_the_newest_upload(tmp_path: Path, hidden: set[str]) -> None:
    """On a new machine, with a folder of its own, only the pointer among the uploads names it."""
    bucket = f"memory://uploads-{os.getpid()}-{tmp_path.name}"
    told: dict[str, Any] = {"save_filename": "ba{batch}", "save_interval": "1ba", "autoresume": True, "run_name": "r"}
    plain(tmp_path / "a", max_duration="3ba", loggers=RemoteUploaderDownloader(bucket), **told).fit()
    hidden.add("ba3")
    again = plain(tmp_path / "b", max_duration="3ba", loggers=RemoteUploaderDownloader(bucket), **told)
    assert again.state.timestamp.batch == 3


def test_a_link_that_means_nothing_here(tmp_path: Path) -> None:
    """A link out of the folder, to itself, to another link; a pointer of another tool: nothing is asked for."""
    near = resolve(str(tmp_path))
    targets = {"out": "../elsewhere", "far": "/etc", "self": ".", "chain": "out", "deep/latest": "../ba3"}
    (tmp_path / "deep").mkdir()
    for name, target in targets.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "file").write_text("ba3")
    assert [linked_by(near, name) for name in (*targets, "file", "none")] == [None] * 4 + ["ba3"] + [None] * 2
    far = resolve(f"memory://links-{os.getpid()}-{tmp_path.name}/runs")
    contents = {"other": b"elsewhere/ba3", "up": b"runs/../ba3", "raw": b"\xff\xfe", "empty": b"", "good": b"runs/ba3"}
    for name, content in contents.items():
        far.put(f"{name}.symlink", content)
    assert [linked_by(far, name) for name in (*contents, "none")] == [None] * 4 + ["ba3"] + [None]


@pytest.mark.parametrize("target", ["ep0-ba9", "notes.txt", "nothing.pt"])
def test_a_link_to_no_checkpoint(target: str, tmp_path: Path) -> None:
    """A link that dangles or means a file of the user does not stop a start."""
    plain(tmp_path, max_duration="2ba", save_interval="1ba").fit()
    (tmp_path / "notes.txt").write_text("mine")
    link = tmp_path / "latest-rank0"
    link.unlink()
    link.symlink_to(target)
    assert plain(tmp_path, max_duration="2ba", autoresume=True).state.timestamp.batch == 2
