"""A `Trainer` with `HoldfastCallback` that is killed goes on bit by bit, or says what it cannot restore."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import TREES, make_model, make_trainer

from holdfast.lightning import HoldfastCallback

HERE = Path(__file__).parent


def life(tree: str, folder: Path, *, dies: bool = False, **options: Any) -> tuple[str, dict[str, Any]]:
    """Run one life; returns what it said and, if it was not killed, the digests of the end."""
    source = f"{HERE.parents[2] / 'src'}:{HERE}"
    ended = subprocess.run(
        [sys.executable, HERE / "train_exact.py", tree, folder, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": source}, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == (-signal.SIGKILL if dies else 0), ended.stderr[-4000:]
    return ended.stderr, {} if dies else json.loads(ended.stdout.splitlines()[-1])


MID_EPOCH = {"keep": {"every_n_train_steps": 5, "save_top_k": 2}}
CASES = {
    "mid-epoch": {**MID_EPOCH, "workers": 0},
    "mid-epoch with workers": {**MID_EPOCH, "workers": 2},
    "one batch before the end of an epoch": {"keep": {"every_n_train_steps": 11}},
    "at a step that is evaluated": {"keep": {"every_n_train_steps": 6}, "trainer": {"val_check_interval": 6}},
    "after the evaluation of an epoch": {"keep": {"monitor": "val_loss", "mode": "min", "save_last": True}},
    "at the end of an epoch": {"keep": {"save_on_train_epoch_end": True}},
    "loaders made anew": {**MID_EPOCH, "trainer": {"reload_dataloaders_every_n_epochs": 1}},
    "fewer batches than there are": {**MID_EPOCH, "trainer": {"limit_train_batches": 9}},
}


@pytest.mark.parametrize("case", CASES)
def test_killed_and_exact(tmp_path: Path, case: str) -> None:
    """Dropout, shuffling, augmentation, a validation that draws: kills change no bit of weights and generators."""
    tree, options = TREES[0], CASES[case]
    _, whole = life(tree, tmp_path / "whole", **options)
    said, _ = life(tree, tmp_path / "killed", dies=True, kill=14, **options)
    assert "holdfast: fresh start" in said
    if case == "mid-epoch":
        life(tree, tmp_path / "killed", dies=True, kill=22, **options)
    said, resumed = life(tree, tmp_path / "killed", seed=2, **options)
    assert "random generators, order of the data and position in the epoch" in said
    assert resumed == whole


def test_one_trained_batch_is_no_look(tmp_path: Path) -> None:
    """A life that trains one batch after its resume: what is saved after it is left goes on after this batch."""
    pl = importlib.import_module(TREES[0])
    position = []

    class Last(pl.Callback):  # type: ignore[misc, name-defined]
        def teardown(self, trainer, pl_module, stage):
            (state,) = [loader.state_dict() for loader in trainer.fit_loop._combined_loader.flattened]
            position.append((state["epoch"], state["position"]["epoch"], state["position"]["batches"]))

    def fit(steps: int, start: Path | None) -> Any:
        nonlocal exact
        exact = HoldfastCallback()
        trainer = make_trainer(
            TREES[0], tmp_path, callbacks=[exact, Last()], max_steps=steps, enable_checkpointing=False,
            limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(make_model(TREES[0]), ckpt_path=start)
        return trainer

    exact: Any = None
    fit(8, None).save_checkpoint(tmp_path / "8.ckpt")  # an epoch
    fit(9, tmp_path / "8.ckpt")
    assert position == [(1, 0, 8), (1, 1, 1)]


def test_without_the_callback_it_is_said(tmp_path: Path) -> None:
    """The plugin alone restores no generators and no order: the block of the next life says so."""
    tree = TREES[1]
    life(tree, tmp_path, dies=True, kill=14, exact=False, **MID_EPOCH)
    said, _ = life(tree, tmp_path, **MID_EPOCH)
    assert "NOT restored  random generators: the checkpoint was saved without HoldfastCallback" in said
    assert "NOT restored  averages over the epoch" in said


def test_one_folder_for_all_lives(tmp_path: Path) -> None:
    """Each life would begin a folder `version_N`: checkpoints go on in the first, and only `save_top_k` stay."""
    tree, options = TREES[0], {"root": False, "keep": {"monitor": "val_loss", "mode": "min", "save_last": True}}
    for number in range(2):
        life(tree, tmp_path, dies=True, kill=14 + 12 * number, **options)
    said, _ = life(tree, tmp_path, **options)
    logs = tmp_path / "lightning_logs"
    assert "checkpoints go on in" in said
    assert [path.name for path in sorted(logs.iterdir()) if (path / "checkpoints").exists()] == ["version_0"]
    kept = os.listdir(logs / "version_0" / "checkpoints")
    assert len(kept) == 3, f"two of the best, and the last: {kept}"


@pytest.mark.parametrize(("ranks", "kill"), [(2, 12), (3, 7)])
def test_several_ranks(tmp_path: Path, ranks: int, kill: int) -> None:
    """DDP: every rank has its own generators and data back, and three add gradients in one order in every life."""
    options = {**MID_EPOCH, "devices": ranks, "width": 64}
    tree = TREES[0]
    _, whole = life(tree, tmp_path / "whole", **options)
    source = f"{HERE.parents[2] / 'src'}:{HERE}"
    killed = subprocess.run(
        [sys.executable, HERE / "train_exact.py", tree, tmp_path / "killed", json.dumps({**options, "kill": kill})],
        env={**os.environ, "PYTHONPATH": source}, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert killed.returncode != 0
    _, resumed = life(tree, tmp_path / "killed", **options)
    assert resumed == whole
