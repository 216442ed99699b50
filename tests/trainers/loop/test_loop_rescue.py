"""`Trainer(rescue=)`: a snapshot in memory becomes the checkpoint that the folder would have got."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.testing import assert_state_equal

sys.path.insert(0, str(Path(__file__).parents[2] / "kits"))

from catalog_kit import index_of
from loop_kit import Crash, everything, names, plain, rich
from process_kit import wait_until
from ranks_kit import RankServer

import holdfast as hf
from holdfast.callbacks import Callback


class KillAt(Callback):
    """Kills this process after so many batches in all."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: str, batch: int) -> int:
    """Train in a child that is killed before batch ``batch``; its exit status."""
    pid = os.fork()
    if pid == 0:
        rich(folder, rescue="1ba", save_interval="1ep", callbacks=[KillAt(batch)]).fit()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_killed_training_loses_no_batch(ranks: RankServer, tmp_path: Path) -> None:
    """Killed in the middle of an epoch: the batch before is a checkpoint, and the end is bitwise that of a twin."""
    twin = rich(tmp_path / "twin", save_interval="1ep")
    twin.fit()
    run = tmp_path / "run"
    assert ranks.run(f"{__file__}:killed", str(run), 9).checked() == -signal.SIGKILL
    assert wait_until(lambda: index_of(run).attempts[-1].ended is not None)
    assert "ep1-ba9" in names(run)
    found = hf.Checkpoint(run / "ep1-ba9")
    assert found.manifest is not None
    assert "the trainer died" in found.manifest.extra["rescued"]
    events = index_of(run).read_history().events
    began, snapshots = ([event for event in events if event.what == what] for what in ("began", "snapshots"))
    assert [event.step for event in began] == [1]
    assert (snapshots[-1].held_s or 0.0) > 0
    again = rich(run, save_interval="1ep", autoresume=True)
    assert again.state.timestamp.count("batch") == 9
    again.fit()
    assert_state_equal(everything(twin), everything(again))


def test_training_that_raises_keeps_its_last_batch(tmp_path: Path) -> None:
    """The snapshot of the batch before is saved when a callback raises."""
    trainer = rich(tmp_path, rescue="1ba", save_interval="1ep", crash_at=4)
    with pytest.raises(Crash):
        trainer.fit()
    trainer.close()
    assert names(tmp_path) == ["ep0-ba3"]


@pytest.mark.parametrize("options", [{"save_filename": "b{batch}.pt"}, {"save_weights_only": True}, {"rescue": "soon"}])
def test_what_cannot_be_rescued_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """Before training: single files, weights alone, no interval."""
    with pytest.raises(ConfigError, match="rescue"):
        plain(tmp_path, **{"rescue": "1ba", **options})
