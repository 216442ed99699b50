"""What the crash sweep of the loop trainer kills, and what it checks afterwards. Runs in children of a fork server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "kits"))

from loop_kit import names, plain

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.storage import LocalStorage
from holdfast.storage.local import local_storage
from holdfast.testing import ArmedOps, FaultyStorage
from holdfast.trainers.loop.saving import folder as folder_module
from holdfast.trainers.loop.saving.files import read_note

KEEP = 1


def trainer(root: str, batches: int) -> hf.Trainer:
    """Two savers: directories with a link, files with a link; both keep one."""
    files = CheckpointSaver(
        f"{root}/files", "b{batch}.pt", save_interval="1ba", latest_filename="latest", num_checkpoints_to_keep=KEEP,
        overwrite=True,
    )  # fmt: skip
    return plain(
        f"{root}/directories", save_filename="b{batch}", save_interval="1ba", save_latest_filename="latest",
        save_num_checkpoints_to_keep=KEEP, save_overwrite=True, callbacks=files, autoresume=True,
        max_duration=f"{batches}ba",
    )  # fmt: skip


class Remote(FaultyStorage):
    """A disk that behaves like a storage elsewhere: no links, pointers as objects, files in one request."""

    @property
    def local_root(self) -> None:
        return None

    def replace(self, path: str, size: int) -> None:  # type: ignore[override]
        return None


def use(ops: ArmedOps, *, remote: bool) -> None:
    """Let the savers of this process work on a disk whose operations ``ops`` counts."""

    def storage(spelling: str) -> Any:
        return (Remote if remote else FaultyStorage)(spelling, ops=ops)

    class CountedOs:
        """The module ``os`` for the link to the newest, whose two operations count as well."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def symlink(self, source: str, target: Any, **where: Any) -> None:
            with ops._operation("symlink", str(target)):
                os.symlink(source, target, **where)

        def replace(self, source: Any, target: Any, **where: Any) -> None:
            with ops._operation("replace", str(target)):
                os.replace(source, target, **where)

    folder_module.resolve, local_storage.os = storage, CountedOs()  # type: ignore[assignment]


def prepare(root: str, *, remote: bool = False) -> None:
    """Two batches, saved; and what four batches come to."""
    use(ArmedOps(), remote=remote)
    one = trainer(root, 2)
    one.fit()
    one.close()
    whole = plain(None, max_duration="4ba")
    whole.fit()
    torch.save(whole.state.model.state_dict(), f"{root}/expected.pt")


def third_batch(root: str, at: int | None, *, remote: bool = False) -> int:
    """Go on for one batch; the process ends before disk operation ``at`` of it. Returns how many there are."""
    ops = ArmedOps()
    use(ops, remote=remote)
    one = trainer(root, 3)
    ops.arm(crash_after=at)
    one.fit()
    one.close()
    return ops.since


def look(root: str, *, remote: bool = False) -> int:
    """Both links lead to complete checkpoints; the next start goes on, ends right, and leaves no litter."""
    use(ArmedOps(), remote=remote)
    folder_module._OLD_S = -60.0  # as if the life that was killed lay back further
    check_newest(root, remote=remote)
    one = trainer(root, 4)
    resumed = int(one.state.timestamp.batch)
    assert resumed in (2, 3)
    one.fit()
    one.close()
    for kind, name in (("directories", "b4"), ("files", "b4.pt")):
        pointers = ["latest.symlink"] if remote else []
        found = [one for one in names(Path(root) / kind) if not (remote and is_empty(Path(root) / kind / one))]
        assert found == [name, *pointers], found
        assert newest(Path(root) / kind, remote=remote).name == name
    litter = [one.name for one in Path(root).rglob(".*") if one.name != ".tmp-lock"]
    assert litter == [], litter
    expected = torch.load(f"{root}/expected.pt", weights_only=True)
    assert torch.equal(expected["weight"], one.state.model.weight)
    return resumed


def is_empty(path: Path) -> bool:
    """Tell a directory without files, which no storage elsewhere has, and nobody there would remove."""
    return path.is_dir() and not any(one.is_file() for one in path.rglob("*"))


def newest(folder: Path, *, remote: bool) -> Path:
    """Return what the link, or the pointer, of a folder leads to."""
    if remote:
        return folder / Path((folder / "latest.symlink").read_text()).name
    assert (folder / "latest").is_symlink()
    return (folder / "latest").resolve()


def check_newest(root: str, *, remote: bool) -> None:
    """What both links lead to is complete."""
    directory, file = (newest(Path(root) / kind, remote=remote) for kind in ("directories", "files"))
    assert hf.Checkpoint(directory).verify().ok
    note = read_note(LocalStorage(file.parent), file.name, verify=True)
    assert note is not None
    assert note["step"] in (2, 3)
