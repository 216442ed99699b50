"""Trackers and small files of models that installed packages offer under a name (entry points)."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from docs_kit import ROOT
from safetensors.torch import load_file

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.frameworks.lightning_plugins import Saves
from holdfast.trainers.loop.arguments import several

PLUGIN = ROOT / "examples" / "plugin"


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install a package that has nothing but entry points: groups, each with "name = value"."""

    def install(name: str = "somebody", **groups: str) -> Path:
        about = tmp_path / "packages" / f"{name}-1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        texts = [f"[holdfast.{group}]\n{entry}\n" for group, entry in groups.items()]
        (about / "entry_points.txt").write_text("\n".join(texts))
        monkeypatch.syspath_prepend(str(about.parent))
        monkeypatch.syspath_prepend(str(PLUGIN))
        return about.parent

    return install


def test_a_tracker_by_name_hears_of_every_checkpoint(
    tmp_path: Path, offers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a loop of one's own, in the loop trainer, and in the configuration of the function trainer."""
    offers(tracker="journal = holdfast_box_training:Journal")
    monkeypatch.setenv("HOLDFAST_JOURNAL", str(tmp_path / "journal"))
    for given in ("journal", ["journal", lambda checkpoint: None]):
        with hf.Checkpointer(tmp_path / str(len(given)), {"x": 1}, every=2, on_commit=given) as ck:
            while ck.global_step < 4:
                ck.step()
        ck.options.on_commit[0].wait()
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 2, 4]
    made = [*hf.RunConfig(callbacks=["journal"]).callbacks, *several("journal", "callbacks")]
    assert [type(one).__name__ for one in made] == ["Journal", "Journal"]


def test_model_files_by_name(tmp_path: Path, offers: Callable[..., Path]) -> None:
    """The package makes them of the state: once a run, or of each single save."""
    offers(model_files="timm = holdfast_box_training:for_timm")
    model = torch.nn.Linear(2, 2)
    model.pretrained_cfg, model.num_classes = {"architecture": "line"}, 2
    with hf.Checkpointer(tmp_path / "run", {"model": model}, every=1, model_files="timm") as ck:
        ck.step()
    for saved in (ck.latest(), hf.save(tmp_path / "a", {"model": model}, model_files="timm")):
        assert json.loads((Path(saved.path) / "config.json").read_text())["architecture"] == "line"
        assert (Path(saved.path) / "model.safetensors").exists()


def test_model_files_by_name_where_the_state_comes_later(tmp_path: Path, offers: Callable[..., Path]) -> None:
    """The loop trainer has them made of the state of its checkpoints, Lightning's door of each dict it is given."""
    offers(model_files="timm = holdfast_box_training:for_timm\nkeys = somebody_elses:make")
    (tmp_path / "packages/somebody_elses.py").write_text("def make(state):\n    return {'keys': ' '.join(state)}\n")
    model = torch.nn.Linear(2, 2)
    model.pretrained_cfg, model.num_classes = {"architecture": "line"}, 2
    saver = CheckpointSaver(tmp_path / "second", "b{batch}", weights_only=True, save_interval="1ba", model_files="keys")
    with hf.Trainer(
        model=model, train_dataloader=torch.ones(2, 2, 2), max_duration="2ba", save_folder=tmp_path / "loop",
        loss_fn=lambda outputs, batch: outputs.sum(), save_filename="b{batch}", model_files="timm", callbacks=saver,
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert json.loads((tmp_path / "loop/b2/config.json").read_text())["architecture"] == "line"
    weights = load_file(tmp_path / "loop/b2/model.safetensors")
    assert weights.keys() == {"weight", "bias"}
    assert torch.equal(weights["weight"], model.weight)
    assert (tmp_path / "second/b2/keys").read_text() == "model integrations metadata"
    saves = pickle.loads(pickle.dumps(Saves(tmp_path / "io", unsupported="raise", timeout_s=60, model_files="keys")))
    saves.save(tmp_path / "io/a.ckpt", {"state_dict": {"w": torch.ones(1)}, "epoch": 1}, step=1, metrics={})
    saves.wait()
    assert (tmp_path / "io/a.ckpt/keys").read_text() == "state_dict epoch"


def test_what_is_wrong_with_a_package_is_said_to_those_who_use_it(
    tmp_path: Path, offers: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that nobody offers, a package that cannot be imported, fails or makes something else."""
    offers(
        tracker="gone = no_such_module:Tracker\nodd = builtins:dict\nfails = holdfast_box_training:Journal",
        model_files="gone = no_such_module:make\nodd = builtins:len\ntimm = holdfast_box_training:for_timm",
        storage="gone = no_such_module:open",
    )
    with monkeypatch.context() as patched:  # who uses none of it does not even read what there is
        patched.setattr(importlib.metadata, "entry_points", None)
        with hf.Checkpointer(tmp_path / "run", {"x": 1}, on_commit=print, model_files={"a.txt": "a"}) as ck:
            ck.step()
    for given, said in {
        "jornal": "on_commit='jornal': no installed package offers this name",
        "gon": r"\(did you mean 'gone'\?\)",
        "gone": r"no_such_module:Tracker of the package somebody 1 cannot be imported \(ModuleNotFoundError",
        "odd": "made dict, which cannot be called with a checkpoint",
        "fails": r"holdfast_box_training:Journal of the package somebody 1 failed \(KeyError: 'HOLDFAST_JOURNAL'\)",
    }.items():
        with pytest.raises(hf.ConfigError, match=said):
            hf.Checkpointer(tmp_path / "a", {"x": 1}, on_commit=given)
    for given, said in {
        "gone": "no_such_module:make of the package somebody 1 cannot be imported",
        "odd": "model_files=1: give a dict",
        "timm": r"for_timm of the package somebody 1 failed \(KeyError: 'model'\)",
    }.items():
        with pytest.raises(hf.ConfigError, match=said):
            hf.save(tmp_path / "b", {"x": 1}, model_files=given)
    for make in (
        lambda name: CheckpointSaver(tmp_path / "loop", "b{batch}", model_files=name),
        lambda name: Saves(tmp_path / "io", unsupported="raise", timeout_s=60, model_files=name),
    ):
        with pytest.raises(hf.ConfigError, match="no_such_module:make of the package somebody 1 cannot be imported"):
            make("gone")  # before anything is trained
    with pytest.raises(hf.ConfigError, match=r"for_timm of the package somebody 1 failed \(AttributeError"):
        hf.Trainer(
            model=torch.nn.Linear(2, 2), train_dataloader=[], max_duration="1ep", save_folder=tmp_path / "loop",
            loss_fn=lambda outputs, batch: outputs.sum(), save_filename="b{batch}", model_files="timm",
        )  # fmt: skip
    with pytest.raises(hf.ConfigError, match="rescue='1ba' with model_files"):
        hf.Trainer(
            model=torch.nn.Linear(2, 2), max_duration="1ep", save_folder=tmp_path / "loop", save_filename="b{batch}",
            model_files="timm", rescue="1ba",
        )  # fmt: skip
