"""What the crash sweep of the loop trainer kills, and what it checks afterwards. Runs in children of a fork server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from loop_kit import names, plain

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.testing.crash import ArmedOps
from holdfast.testing.faults import FaultyStorage
from holdfast.trainers.loop import folder as folder_module

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


def prepare(root: str) -> None:
    """Two batches, saved."""
    one = trainer(root, 2)
    one.fit()
    one.close()


def third_batch(root: str, at: int | None) -> int:
    """Go on for one batch; the process ends before disk operation ``at`` of it. Returns how many there are."""
    ops = ArmedOps()

    def storage(spelling: str) -> Any:
        return FaultyStorage(spelling, ops=ops)

    def symlink(source: str, target: Any) -> None:
        ops._event("symlink", str(target))
        _symlink(source, target)

    _symlink, folder_module.resolve = os.symlink, storage  # type: ignore[assignment]
    os.symlink = symlink  # type: ignore[assignment]
    os.replace = lambda source, target: ops.rename(str(source), str(target))  # type: ignore[assignment]
    one = trainer(root, 3)
    ops.arm(crash_after=at)
    one.fit()
    one.close()
    return ops.since


def look(root: str) -> int:
    """Both links lead to complete checkpoints; the next start goes on, ends right, and leaves no litter."""
    for kind in ("directories", "files"):
        link = Path(root) / kind / "latest"
        assert link.is_symlink()
        assert link.exists(), f"{kind}: the link leads nowhere"
        found = plain(None, load_path=link)
        assert int(found.state.timestamp.batch) in (2, 3)
    one = trainer(root, 4)
    resumed = int(one.state.timestamp.batch)
    assert resumed in (2, 3)
    one.fit()
    one.close()
    assert names(Path(root) / "directories") == ["b4"], names(Path(root) / "directories")
    assert names(Path(root) / "files") == ["b4.pt"], names(Path(root) / "files")
    assert os.readlink(Path(root) / "files" / "latest") == "b4.pt"
    whole = plain(None, max_duration="4ba")
    whole.fit()
    assert torch.equal(whole.state.model.weight, one.state.model.weight)
    return resumed
