"""A plain `Trainer` with `HoldfastCheckpointIO`: same training, checkpoints in the background."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import EPOCHS, TREES, keeper, make_model, make_trainer, same, weights

import holdfast as hf
from holdfast.frameworks import lightning_plugins
from holdfast.lightning import HoldfastCheckpointIO, ReportCallback
from holdfast.testing import FaultyStorage, assert_state_equal

HERE = Path(__file__).parent


def uninterrupted(tree: str, folder: Path) -> dict[str, torch.Tensor]:
    model = make_model(tree)
    make_trainer(tree, folder, enable_checkpointing=False).fit(model)
    return weights(model)


@pytest.mark.parametrize("tree", TREES)
def test_equal_to_what_torch_would_have_saved(tree: str, tmp_path: Path) -> None:
    """`load` gives back the whole dictionary that Lightning handed over; a second life goes on from top-k and `last`.

    Nothing else is left there, and the weights are in the end those of an uninterrupted run.
    """
    importlib.import_module(tree)  # an object belongs to what is imported when it is made
    seen: dict[str, Any] = {}
    io = HoldfastCheckpointIO()
    handed_over = io.save_checkpoint

    def save(checkpoint: dict[str, Any], path: str, storage_options: Any = None) -> None:
        torch.save(checkpoint, tmp_path / "twin.ckpt")
        seen[os.path.basename(path)] = torch.load(tmp_path / "twin.ckpt", weights_only=False)
        handed_over(checkpoint, path, storage_options)

    io.save_checkpoint = save
    folder = tmp_path / "checkpoints"
    trainer = make_trainer(tree, tmp_path, plugins=io, callbacks=[keeper(tree, folder)], max_epochs=3)
    trainer.fit(make_model(tree, layers=(1, 2), tags={"a"}))
    assert sorted(os.listdir(folder)) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    for name in os.listdir(folder):
        loaded = HoldfastCheckpointIO().load_checkpoint(folder / name)
        assert list(loaded) == list(seen[name])
        assert_state_equal(loaded, seen[name])
        assert loaded["hyper_parameters"]["layers"] == (1, 2)
    best = hf.Checkpoint(trainer.checkpoint_callback.best_model_path)
    assert best.verify()
    assert best.step == 24
    assert best.metrics["val_loss"] == pytest.approx(float(trainer.checkpoint_callback.best_model_score))

    again = make_model(tree)
    callbacks = [keeper(tree, folder)]
    make_trainer(tree, tmp_path, plugins=HoldfastCheckpointIO(), callbacks=callbacks).fit(again, ckpt_path="last")
    assert same(weights(again), uninterrupted(tree, tmp_path))
    assert sorted(os.listdir(folder)) == ["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt"]


@pytest.mark.parametrize("tree", TREES)
def test_killed_and_resumed(tree: str, tmp_path: Path) -> None:
    """Killed with SIGKILL at the start of an epoch and started again: the same weights as without the kill."""
    root = tmp_path / "run"
    source = f"{HERE.parents[2] / 'src'}:{HERE}"
    killed = subprocess.run(
        [sys.executable, HERE / "train_with_io.py", tree, root, "3"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    importlib.import_module(tree)
    io = HoldfastCheckpointIO(root)
    found = io.latest()
    assert found is not None
    model = make_model(tree)
    trainer = make_trainer(tree, tmp_path, plugins=io, callbacks=[keeper(tree, tmp_path / "unused")])
    trainer.fit(model, ckpt_path=found)
    assert trainer.current_epoch == EPOCHS
    assert same(weights(model), uninterrupted(tree, tmp_path))


def test_remote(tmp_path: Path, bucket: str) -> None:
    """To S3: top-k and `last` under one root; the newest sound one comes back, a damaged one is passed over."""
    tree = TREES[0]
    io = HoldfastCheckpointIO(f"{bucket}/run")
    trainer = make_trainer(tree, tmp_path, plugins=io, callbacks=[keeper(tree, tmp_path / "unused")], max_epochs=3)
    trainer.fit(make_model(tree))
    storage = hf.Checkpoint(f"{bucket}/run").storage
    names = {info.path.rstrip("/") for info in storage.list("run", recursive=False)}
    assert {name.rpartition("/")[2] for name in names} == {"epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"}
    found = HoldfastCheckpointIO(f"{bucket}/run").latest()
    assert found is not None
    assert HoldfastCheckpointIO().load_checkpoint(found)["global_step"] == 24
    damaged = next(info.path for info in storage.list("run/last.ckpt") if info.path.endswith(".safetensors"))
    storage.put(damaged, b"x" * storage.stat(damaged).size)
    model = make_model(tree)
    io = HoldfastCheckpointIO(f"{bucket}/run")
    make_trainer(tree, tmp_path, plugins=io, callbacks=[keeper(tree, tmp_path / "unused")]).fit(
        model, ckpt_path=io.latest()
    )
    assert same(weights(model), uninterrupted(tree, tmp_path))


def test_remote_dirpath(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of ModelCheckpoint that are in S3 themselves: two of one name do not collide, `latest` finds the newest.

    Lightning, which asks for names through fsspec, sees each as taken at once, although it is written later.
    """
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    importlib.import_module("obstore.fsspec").register("s3")  # s3fs wants another boto than moto
    folder, io = f"{bucket}/names", HoldfastCheckpointIO()
    ranked = keeper(TREES[0], folder, filename="best", every_n_epochs=2)
    options = {"max_epochs": 4, "val_check_interval": 0.25}
    make_trainer(TREES[0], tmp_path, plugins=io, callbacks=[ranked], **options).fit(make_model(TREES[0]))
    kept = {path: float(score) for path, score in ranked.best_k_models.items()}
    assert {path.rpartition("/")[2] for path in kept} <= {"best.ckpt", "best-v1.ckpt", "best-v2.ckpt"}
    assert {path: hf.Checkpoint(path).metrics["val_loss"] for path in kept} == pytest.approx(kept)
    assert len(kept) == 2
    assert all(hf.Checkpoint(path).verify() for path in kept)
    storage = hf.Checkpoint(folder).storage
    there = {info.path.rstrip("/").rpartition("/")[2] for info in storage.list("names", recursive=False)}
    assert there == {"last.ckpt", *(path.rpartition("/")[2] for path in kept)}
    found = io.latest(folder)
    assert found is not None
    newest = max(hf.Checkpoint(path).step or 0 for path in (f"{folder}/last.ckpt", *kept))
    assert io.load_checkpoint(found)["global_step"] == newest


def test_two_ranks(tmp_path: Path) -> None:
    """DDP with two processes that Lightning starts itself: rank 0 saves, both go on from the same checkpoint."""
    script = tmp_path / "ddp.py"
    script.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from tiny import keeper, make_model, make_trainer, weights\n"
        "from holdfast.lightning import HoldfastCheckpointIO\n"
        f"tree, here = {TREES[0]!r}, Path({str(tmp_path)!r})\n"
        "found = []\n"
        "for epochs in (2, 4):\n"
        "    io = HoldfastCheckpointIO(here / 'run')\n"
        "    found.append(io.latest())\n"
        "    model = make_model(tree)\n"
        "    options = dict(max_epochs=epochs, devices=2, strategy='ddp')\n"
        "    trainer = make_trainer(tree, here, plugins=io, callbacks=[keeper(tree, here / 'unused')], **options)\n"
        "    trainer.fit(model, ckpt_path=found[-1])\n"
        "assert found[0] is None and found[1] is not None, found\n"
        "torch.save(weights(model), here / f'rank-{trainer.global_rank}.pt')\n"
    )
    source = f"{HERE.parents[2] / 'src'}:{HERE}"
    subprocess.run(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, check=True, timeout=240
    )
    one, other = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert same(one, other)
    assert HoldfastCheckpointIO(tmp_path / "run").load_checkpoint("last.ckpt")["epoch"] == 3


def test_a_removal_waits_for_what_replaces_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning removes the old one as soon as it has handed over the new one: if that fails, the old one stays."""
    io = HoldfastCheckpointIO(tmp_path)
    io._saves._root = FaultyStorage(tmp_path, disk_bytes=100_000)
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "first.ckpt")
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "second.ckpt")
    io.remove_checkpoint("first.ckpt")
    io.teardown()
    assert not (tmp_path / "first.ckpt").exists()
    io.save_checkpoint({"state_dict": {"w": torch.ones(1_000_000)}}, "third.ckpt")
    io.remove_checkpoint("second.ckpt")
    with pytest.raises(hf.StorageFullError):
        io.teardown()
    io.teardown()
    assert io.latest() == str(tmp_path / "second.ckpt")
    assert "second.ckpt stays" in caplog.text


@pytest.mark.parametrize("replaced", [False, True])
def test_what_the_writer_of_a_killed_process_is_finishing(
    tmp_path: Path, replaced: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start waits for a save that is still being written, and no longer than its files change."""
    io, root = HoldfastCheckpointIO(tmp_path / "root"), tmp_path / "root"
    for step, name in enumerate(["first.ckpt", "first.ckpt" if replaced else "second.ckpt"], 1):
        before = (root / name / "manifest.json").read_bytes() if (root / name).exists() else None
        io.save_checkpoint({"global_step": step, "state_dict": {"w": torch.ones(2)}, "lr_schedulers": []}, name)
        io.teardown()
    manifest = root / name / "manifest.json"
    found = manifest.read_bytes()
    manifest.unlink() if before is None else manifest.write_bytes(before)
    threading.Timer(0.5, lambda: manifest.write_bytes(found)).start()
    assert HoldfastCheckpointIO(root).latest() == str(root / name)
    assert hf.Checkpoint(root / name).step == 2
    assert f"waiting for what is still being written there: {name}" in caplog.text
    monkeypatch.setattr(lightning_plugins, "_QUIET_S", 0.5)
    os.utime(next((root / name).glob("state-*.safetensors")))
    manifest.unlink()
    assert HoldfastCheckpointIO(root).latest() == (None if replaced else str(root / "first.ckpt"))


def test_what_pickle_would_be_needed_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A module among the hyper-parameters is refused by name, or dropped by name; nothing is pickled."""
    model = make_model(TREES[0], extra=torch.nn.Linear(1, 1))
    callbacks = [keeper(TREES[0], tmp_path)]
    with pytest.raises(hf.UnsupportedStateError, match=r"hyper_parameters.*extra.*Linear.*ignore"):
        make_trainer(TREES[0], tmp_path, plugins=HoldfastCheckpointIO(), callbacks=callbacks, max_epochs=1).fit(model)
    with pytest.raises(hf.UnsupportedStateError, match=r"hyper_parameters.*activation.*ignore"):
        HoldfastCheckpointIO(tmp_path).save_checkpoint({"hyper_parameters": {"activation": torch.nn.ReLU}}, "x.ckpt")
    io = HoldfastCheckpointIO(unsupported="drop")
    make_trainer(TREES[0], tmp_path, plugins=io, callbacks=[keeper(TREES[0], tmp_path)], max_epochs=1).fit(model)
    assert "extra" not in io.load_checkpoint(tmp_path / "last.ckpt")["hyper_parameters"]


def test_weights_alone_are_nothing_to_go_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside checkpoints of the whole training in one root they are passed over, and named."""
    tree, io = TREES[0], HoldfastCheckpointIO(tmp_path / "root")
    whole = keeper(tree, tmp_path, save_top_k=1, save_last=False, filename="whole-{epoch}", every_n_epochs=2)
    alone = keeper(tree, tmp_path, save_top_k=-1, save_last=False, filename="alone-{epoch}", save_weights_only=True)
    make_trainer(tree, tmp_path, plugins=io, callbacks=[whole, alone], max_epochs=3).fit(make_model(tree))
    start = io.latest()
    assert start is not None
    assert os.path.basename(start) == "whole-epoch=1.ckpt"
    assert "alone-epoch=0.ckpt, alone-epoch=1.ckpt, alone-epoch=2.ckpt" in caplog.text
    make_trainer(tree, tmp_path, plugins=io, max_epochs=4).fit(make_model(tree), ckpt_path=start)
    assert HoldfastCheckpointIO().latest(tmp_path / "root") is not None


def test_a_file_of_lightning(tmp_path: Path) -> None:
    """What Lightning's own writer left is read without trusting it, and not deleted when its name is used again."""
    io = HoldfastCheckpointIO()
    torch.save({"state_dict": {"w": torch.ones(1)}}, tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["state_dict"]["w"] == 1
    io.save_checkpoint({"state_dict": {"w": torch.zeros(1)}}, tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["state_dict"]["w"] == 0
    assert (tmp_path / "last.ckpt.before-holdfast").is_file()
    torch.save({"evil": os.system}, tmp_path / "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError, match=r"weights_only|Weights only"):
        io.load_checkpoint(tmp_path / "evil.ckpt")


def test_both_names_of_lightning() -> None:
    """Objects are instances of the classes under both names, and travel to processes that are spawned."""
    import lightning.pytorch
    import pytorch_lightning

    for one in (ReportCallback(every_n_epochs=3), HoldfastCheckpointIO("somewhere")):
        again = pickle.loads(pickle.dumps(one))
        assert type(again) is type(one)
        assert type(one).__name__ in ("ReportCallback", "HoldfastCheckpointIO")
    assert isinstance(ReportCallback(), lightning.pytorch.Callback)
    assert isinstance(ReportCallback(), pytorch_lightning.Callback)
    for wrong in (0, 1.5, "2"):
        with pytest.raises(hf.ConfigError, match=f"every_n_steps={wrong!r}"):
            ReportCallback(every_n_steps=wrong)
    with pytest.raises(hf.ConfigError, match="or every_n_steps"):
        ReportCallback(every_n_steps=1, every_n_epochs=1)
    for other in ({"unsupported": "pickle"}, {"timeout_s": 0}):
        with pytest.raises(hf.ConfigError, match=next(iter(other))):
            HoldfastCheckpointIO(**other)


def two_at_once(folder: Path, root: Path | None) -> tuple[Any, HoldfastCheckpointIO, dict[str, float]]:
    """Train with one name for the two best, and note the score of each name when it is saved."""
    io, scores, handed_over = HoldfastCheckpointIO(root), {}, HoldfastCheckpointIO.save_checkpoint

    def save(checkpoint: dict[str, Any], path: str, storage_options: Any = None) -> None:
        scores[os.path.basename(path)] = float(trainer.callback_metrics["val_loss"])
        handed_over(io, checkpoint, path, storage_options)

    io.save_checkpoint = save
    ranked = keeper(TREES[0], folder, filename="best", every_n_epochs=2)
    trainer = make_trainer(TREES[0], folder, plugins=io, callbacks=[ranked], max_epochs=4, val_check_interval=0.25)
    trainer.fit(make_model(TREES[0]))
    return trainer.checkpoint_callback, io, scores


@pytest.mark.parametrize("elsewhere", [True, False])
def test_names_do_not_collide(elsewhere: bool, tmp_path: Path) -> None:
    """Two checkpoints of one name: Lightning sees that it is taken, wherever they lie; each has its own score."""
    folder, root = tmp_path / "names", tmp_path / "root"
    ranked, io, scores = two_at_once(folder, root if elsewhere else None)
    kept = {os.path.basename(path): float(score) for path, score in ranked.best_k_models.items()}
    assert len(kept) == 2
    place = root if elsewhere else folder
    assert sorted(os.listdir(place)) == sorted([*kept, "last.ckpt"]) == sorted(os.listdir(folder))
    assert {name: hf.Checkpoint(place / name).metrics["val_loss"] for name in kept} == pytest.approx(kept)
    assert {name: scores[name] for name in kept} == pytest.approx(kept)
    assert hf.Checkpoint(place / "last.ckpt").metrics == {}
    loaded = io.load_checkpoint(ranked.best_model_path)
    assert loaded["callbacks"]
    assert all(path.is_file() == elsewhere for path in folder.iterdir())
    assert io.latest(None if elsewhere else folder) is not None


@pytest.mark.parametrize("elsewhere", [True, False])
def test_links(elsewhere: bool, tmp_path: Path) -> None:
    """With `save_last="link"` `ckpt_path="last"` and "best" find theirs, in every function of the trainer.

    When links are removed or replaced, what they point to, which `ModelCheckpoint` still ranks, stays as it is.
    """

    def fit(folder: Path, epochs: int, start: str | None = None, last: Any = "link", name: str = "last") -> Any:
        io = HoldfastCheckpointIO(folder.with_suffix(".root") if elsewhere else None)
        ranked = keeper(TREES[0], folder, save_last=last)
        ranked.CHECKPOINT_NAME_LAST = name
        trainer = make_trainer(TREES[0], tmp_path, plugins=io, callbacks=[ranked], max_epochs=epochs)
        trainer.fit(make_model(TREES[0]), ckpt_path=start)
        return trainer

    def kept(folder: Path) -> dict[str, int | None]:
        place = folder.with_suffix(".root") if elsewhere else folder
        return {one.name: hf.Checkpoint(one).step for one in place.iterdir() if not one.is_symlink()}

    one, other = tmp_path / "one", tmp_path / "other"
    trainer = fit(one, 3)
    found = [trainer.validate(ckpt_path=which, verbose=False) for which in ("best", "last")]
    assert found[0] == found[1]
    assert (one / "last.ckpt").is_symlink()
    assert fit(one, 4, "last", last=True).current_epoch == 4  # what was a link is a checkpoint now
    assert kept(one) == {"epoch=2.ckpt": 24, "epoch=3.ckpt": 32, "last.ckpt": 32}
    fit(other, 3, name="last-{step}")  # the links of epochs before the last are removed
    assert (other / "last-step=24.ckpt").is_symlink()
    assert kept(other) == {"epoch=1.ckpt": 16, "epoch=2.ckpt": 24}


def test_markers_and_files_of_others(tmp_path: Path) -> None:
    """A marker goes with its checkpoint; a file that somebody else left at the path is moved aside, and stays."""
    path, io = tmp_path / "names" / "best.ckpt", HoldfastCheckpointIO(tmp_path / "root")
    path.parent.mkdir()
    torch.save({"state_dict": {"w": torch.ones(1)}}, path)
    assert io.load_checkpoint(path)["state_dict"]["w"] == 1
    io.save_checkpoint({"state_dict": {"w": torch.zeros(1)}}, path)
    assert b"root/best.ckpt" in path.read_bytes()
    assert io.load_checkpoint(path)["state_dict"]["w"] == 0
    io.remove_checkpoint(path)
    assert not path.exists()
    io.teardown()
    assert os.listdir(tmp_path / "root") == []
    assert os.listdir(path.parent) == ["best.ckpt.before-holdfast"]


def test_model_files_make_each_checkpoint_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index names the module's tensors as another library calls them; two checkpoints of one name are refused.

    A package may make the files, of what Lightning saves.
    """
    tree = TREES[0]
    files = hf.ModelFiles(files={"config.json": "{}"}, indexes={"model.safetensors.index.json": "state_dict/net"})
    model = make_model(tree)
    io = HoldfastCheckpointIO(model_files=files)
    folder = tmp_path / "checkpoints"
    trainer = make_trainer(tree, tmp_path, plugins=io, callbacks=[keeper(tree, folder, save_last="link")], max_epochs=3)
    trainer.fit(model)
    newest = folder / "last.ckpt"
    assert newest.is_symlink()
    places = json.loads((newest / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(newest / path)[name] for name, path in places.items()}
    assert_state_equal(found, dict(model.net.state_dict()))
    assert (newest / "config.json").read_text() == "{}"
    assert hf.Checkpoint(newest).verify().ok
    again = make_trainer(tree, tmp_path, plugins=HoldfastCheckpointIO(model_files=files), callbacks=[], max_epochs=4)
    again.fit(make_model(tree), ckpt_path=newest)
    assert again.current_epoch == 4
    about = tmp_path / "packages/somebody-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[holdfast.model_files]\nkeys = somebody_elses:make\n")
    (about.parent / "somebody_elses.py").write_text(
        "def make(state):\n    return {'weights.txt': '\\n'.join(state['state_dict'])}\n"
    )
    monkeypatch.syspath_prepend(str(about.parent))
    by_name = HoldfastCheckpointIO(tmp_path / "by-name", model_files="keys")
    make_trainer(tree, tmp_path, plugins=by_name, callbacks=[keeper(tree, folder)], max_epochs=1).fit(model)
    assert by_name.latest() is not None
    assert (Path(by_name.latest()) / "weights.txt").read_text().split() == list(model.state_dict())
    named = keeper(tree, tmp_path / "named", save_last=True)
    with pytest.raises(hf.CheckpointExistsError, match='save_last="link"'):
        make_trainer(
            tree, tmp_path, plugins=HoldfastCheckpointIO(model_files=files), callbacks=[named], max_epochs=3
        ).fit(make_model(tree))
