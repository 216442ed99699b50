"""Loading: strictness, parts, foreign places, and what autoresume does with what it finds."""

from __future__ import annotations

import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_kit import Crash, CrashAt, flip, names, network, plain, rich

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver, LoadCheckpoint
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage import LocalStorage
from holdfast.testing import assert_state_equal


@pytest.fixture(params=["", ".pt"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of a finished training of one epoch."""
    trainer = plain(tmp_path / "first", max_duration="1ep", save_filename="ba{batch}" + request.param)
    trainer.fit()
    trainer.close()
    return tmp_path / "first" / f"ba6{request.param}"


def test_load_path_resumes(saved: Path, tmp_path: Path) -> None:
    """load_path goes on from everything in a checkpoint, whatever it is stored as; through a link too."""
    whole = plain(tmp_path / "whole", max_duration="2ep")
    whole.fit()
    for path in (saved, saved.parent / "latest-rank0"):
        again = plain(None, load_path=path)
        assert int(again.state.timestamp.epoch) == 1
        again.fit()
        assert_state_equal(again.state.model, whole.state.model)


class Counting(torch.optim.SGD):
    """Counts its steps under a key that is no parameter, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_optimizer_state_of_no_parameter(tmp_path: Path, suffix: str) -> None:
    """It is in a directory as in a file, and a resumed training counts on."""

    def made(duration: str) -> hf.Trainer:
        model = torch.nn.Linear(4, 3)
        return plain(
            tmp_path, model=model, optimizers=Counting(model.parameters(), lr=0.1), max_duration=duration,
            save_filename="ep{epoch}" + suffix, autoresume=True,
        )  # fmt: skip

    for number in (1, 2):
        trainer = made(f"{number}ep")
        trainer.fit()
        trainer.close()
        assert trainer.state.optimizers[0].state["k"] == number * 6


def test_own_objects_are_respected(saved: Path) -> None:
    """An optimizer of another class, or a model of another shape, is an error before anything changes."""
    model = torch.nn.Linear(4, 3)
    before = model.weight.clone()
    with pytest.raises(hf.StateMismatchError, match="SGD"):
        plain(None, model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), load_path=saved)
    assert torch.equal(before, model.weight)
    with pytest.raises(hf.StateMismatchError, match="weight"):
        plain(None, model=torch.nn.Linear(4, 2), load_path=saved)


def test_fine_tuning(saved: Path, tmp_path: Path) -> None:
    """Weights alone, a replaced head: strict lists every offender, not strict takes what fits and says what not."""
    weights = (
        hf.load(saved)["state"]["model"] if saved.is_dir() else torch.load(saved, weights_only=True)["state"]["model"]
    )

    def tuned(**options: Any) -> hf.Trainer:
        torch.manual_seed(9)
        model = torch.nn.Linear(4, 3)
        model.head = torch.nn.Linear(3, 2)
        return plain(
            None, model=model, load_path=saved, load_weights_only=True, loss_fn=lambda o, t: o.sum(), **options
        )

    with pytest.raises(hf.StateMismatchError, match=r"head\.weight"):
        tuned()
    trainer = tuned(load_strict_model_weights=False)
    assert torch.equal(trainer.state.model.weight, weights["weight"])
    assert int(trainer.state.timestamp.batch) == 0
    with pytest.raises(hf.StateMismatchError, match=r"head\.weight"):
        tuned(load_strict=True)


@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
def test_weights_only_files_load_weights_only(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What was saved weights-only begins at batch 0, with those weights, and says so."""
    first = plain(tmp_path, max_duration="1ep", save_filename="w" + suffix, save_weights_only=True)
    first.fit()
    again = plain(None, load_path=tmp_path / f"w{suffix}")
    assert torch.equal(again.state.model.weight, first.state.model.weight)
    assert int(again.state.timestamp.batch) == 0
    assert "weights only" in capsys.readouterr().err


def test_ignore_keys(saved: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """Globs and functions leave parts out, which is not called restored; a glob that matches nothing is said."""
    plain(None, load_path=saved, load_ignore_keys=["state/optimizers/*", "state/apples", "rng"])
    assert "leaves out state/optimizers/*\n" in (told := capsys.readouterr().err)
    assert "AdamW" not in told
    assert caplog.text.count("nothing in") == caplog.text.count("matches state/apples\n") == 1
    without = ["state/optimizers", "state/timestamp", "state/dataset_state"]
    trainer = plain(None, load_path=saved, load_ignore_keys=without)
    assert int(trainer.state.timestamp.batch) == 0
    assert not trainer.state.optimizers[0].state

    def change(found: dict[str, Any]) -> None:
        found["state"]["model"]["weight"] += 1
        del found["state"]["optimizers"]

    shifted = plain(None, load_path=saved, load_ignore_keys=change)
    assert torch.equal(shifted.state.model.weight, trainer.state.model.weight + 1)


def test_missing_pieces_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A callback that the checkpoint does not know, and one that is gone, are listed as not restored."""
    rich(tmp_path, max_duration="1ep").fit()

    class New(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

    capsys.readouterr()
    rich(None, load_path=tmp_path / "ep0-ba6", callbacks=[New()], algorithms=None)
    err = capsys.readouterr().err
    assert "NOT restored  state/callbacks/New" in err
    assert "NOT restored  state/algorithms/EMA" in err


def test_layered_loads(saved: Path) -> None:
    """LoadCheckpoint loads at its event."""
    trainer = plain(None, callbacks=LoadCheckpoint(saved, load_weights_only=True, event="AFTER_LOAD"))
    assert int(trainer.state.timestamp.batch) == 0
    assert torch.equal(trainer.state.model.weight, plain(None, load_path=saved).state.model.weight)
    with pytest.raises(hf.ConfigError, match="no such event"):
        LoadCheckpoint(saved, event="whenever")


def test_what_is_refused_before_torch_reads_it(tmp_path: Path) -> None:
    """A program, and an archive that would unpack to far more than its size."""
    with zipfile.ZipFile(tmp_path / "large.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large/data.pkl", b"\x80\x02}.")
        archive.writestr("large/version", "3")
        archive.writestr("large/data/0", bytes(80 << 20))
    with pytest.raises(hf.CorruptCheckpointError, match="would unpack to"):
        plain(None, load_path=tmp_path / "large.pt")
    torch.jit.script(network()).save(str(tmp_path / "program.pt"))
    with pytest.raises(hf.UnsupportedStateError, match="is a program of TorchScript"):
        plain(None, load_path=tmp_path / "program.pt")


def test_nothing_there(tmp_path: Path) -> None:
    """A wrong path is an error that names it; so is a foreign directory, and a pickle."""
    with pytest.raises(hf.CheckpointNotFoundError, match="nowhere"):
        plain(None, load_path=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(hf.CheckpointNotFoundError):
        plain(None, load_path=tmp_path / "empty")
    hf.save(tmp_path / "mine", {"weights": torch.ones(2)})
    with pytest.raises(hf.ConfigError, match="not saved by a trainer"):
        plain(None, load_path=tmp_path / "mine")
    torch.save({"state": {"model": {}}, "f": network()}, tmp_path / "objects.pt")
    with pytest.raises(hf.ConfigError, match="pickled objects"):
        plain(None, load_path=tmp_path / "objects.pt")
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(hf.CorruptCheckpointError, match=r"notes\.txt cannot be read as a file of torch"):
        plain(None, load_path=tmp_path / "notes.txt")
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(hf.ConfigError, match=r"not saved by a trainer.*save it as torch.save"):
        plain(None, load_path=tmp_path / "weights.pt")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(hf.CorruptCheckpointError, match=r"run\.json cannot be read as a file of torch"):
        plain(None, load_path=tmp_path / "run.json")
    plain(tmp_path / "runs", max_duration="1ep").fit()
    with pytest.raises(hf.CheckpointNotFoundError, match=r"a folder of checkpoints \(ep1-ba6\): give one of them"):
        plain(None, load_path=tmp_path / "runs")


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_damage_falls_back(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged newest checkpoint is set aside and said; training ends as it would have; with none good it stops."""
    options = {"save_filename": "ba{batch}" + suffix, "save_interval": "2ba"}
    whole = plain(tmp_path / "whole", **options)
    whole.fit()
    folder = tmp_path / "runs"
    with pytest.raises(Crash):
        plain(folder, callbacks=CrashAt(7), **options).fit()
    shutil.copytree(folder, tmp_path / "copy", symlinks=True)
    flip(folder / f"ba6{suffix}")
    capsys.readouterr()
    again = plain(folder, autoresume=True, **options)
    assert int(again.state.timestamp.batch) == 4
    assert f"set aside ba6{suffix}" in capsys.readouterr().err
    again.fit()
    assert_state_equal(again.state.model, whole.state.model)
    again.close()
    for name in names(tmp_path / "copy"):
        flip(tmp_path / "copy" / name)
    with pytest.raises(hf.CorruptCheckpointError, match="none of them is good"):
        plain(tmp_path / "copy", autoresume=True, **options)


@pytest.mark.parametrize(("suffix", "left"), [("", 0), (".pt", 7)])
def test_what_cannot_be_read_at_all_is_said(
    tmp_path: Path, suffix: str, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest is cut short so that it does not tell its batch: the one before is taken, and that is said."""
    options: dict[str, Any] = {"max_duration": "2ba", "save_interval": "1ba", "save_filename": "ba{batch}" + suffix}
    plain(tmp_path, **options).fit()
    os.truncate(tmp_path / f"ba2{suffix}" / ("" if suffix else "manifest.json"), left)
    again = plain(tmp_path, autoresume=True, **options)
    assert int(again.state.timestamp.batch) == 1
    assert f"set aside ba2{suffix}" in capsys.readouterr().err
    again.fit()
    assert names(tmp_path) == [f"ba1{suffix}", f"ba2{suffix}"]


def test_an_explicit_damaged_file_is_an_error(saved: Path) -> None:
    """load_path never takes another checkpoint than the one that was asked for."""
    flip(saved)
    with pytest.raises(hf.CorruptCheckpointError):
        plain(None, load_path=saved)


def test_autoresume_beats_load_path(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """load_path is where a run begins; once it has a checkpoint of its own that is used, and it is said."""
    folder = tmp_path / "run"
    first = plain(folder, autoresume=True, load_path=saved, load_weights_only=True, max_duration="1ep")
    assert int(first.state.timestamp.batch) == 0
    first.fit()
    first.close()
    again = plain(folder, autoresume=True, load_path=saved, load_weights_only=True)
    assert int(again.state.timestamp.batch) == 6
    assert "is not used" in capsys.readouterr().err


def test_autoresume_with_savers_in_callbacks(tmp_path: Path) -> None:
    """The first saver that saves everything is what autoresume goes by, wherever it stands."""

    def make(**options: Any) -> hf.Trainer:
        savers = [
            CheckpointSaver(tmp_path / "weights", "w{batch}", save_interval="1ba", weights_only=True, overwrite=True),
            CheckpointSaver(tmp_path / "full", "b{batch}.pt", save_interval="2ba"),
        ]
        return plain(None, callbacks=[*savers, *options.pop("more", [])], autoresume=True, **options)

    with pytest.raises(Crash):
        make(more=[CrashAt(5)]).fit()
    again = make()
    assert int(again.state.timestamp.batch) == 4
    again.fit()
    assert "w5" in names(tmp_path / "weights")


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_no_permission_is_an_error(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be read is never taken for an empty one, be there a load_path or not."""
    options: dict[str, Any] = {"save_filename": "ep{epoch}" + suffix, "max_duration": "1ep"}
    for folder in ("runs", "other"):
        plain(tmp_path / folder, **options).fit()

    def refused(self: Any, *args: Any, **given: Any) -> Any:
        raise hf.StoragePermissionError("nobody may look into it (a test)")

    monkeypatch.setattr(LocalStorage, "list", refused)  # as root, who runs some of these tests, may read everything
    for path in (None, tmp_path / "other" / f"ep1{suffix}"):
        with pytest.raises(hf.StoragePermissionError):
            plain(tmp_path / "runs", autoresume=True, load_path=path, **options)


def test_run_name_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named after the run needs a name that is the same at every start: argument or environment."""
    monkeypatch.delenv("RUN_NAME", raising=False)
    folder = str(tmp_path / "{run_name}" / "checkpoints")
    with pytest.raises(hf.ConfigError, match="RUN_NAME"):
        plain(folder, autoresume=True)
    monkeypatch.setenv("RUN_NAME", "tuesday")
    plain(folder, autoresume=True, max_duration="1ep").fit()
    assert names(tmp_path / "tuesday" / "checkpoints") == ["ep1-ba6"]
    assert int(plain(folder, autoresume=True, run_name="tuesday").state.timestamp.batch) == 6


@pytest.mark.parametrize("where", ["callback", "filename", "uploads"])
def test_run_name_is_needed_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """With a new name at every start nothing would ever be found again: refused, not begun from zero each time."""
    for variable in ("RUN_NAME", "COMPOSER_RUN_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {
        "callback": {"folder": None, "callbacks": CheckpointSaver()},
        "filename": {"folder": "runs", "save_filename": "{run_name}-ep{epoch}"},
        "uploads": {"folder": tmp_path / "runs", "loggers": RemoteUploaderDownloader("copies")},
    }[where]
    with pytest.raises(hf.ConfigError, match="run_name"):
        plain(autoresume=True, **options)


@pytest.mark.parametrize("suffix", ["", ".pt"])
@pytest.mark.parametrize("ignore", ["glob", "function"])
def test_what_was_left_out_at_saving_need_not_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, ignore: str
) -> None:
    """A file saved with save_ignore_keys loads without an option, as in Composer; what is missing is said."""

    def without_bias(state: dict[str, Any]) -> None:
        del state["state"]["model"]["bias"]
        del state["state"]["optimizers"]

    keys: Any = without_bias if ignore == "function" else ["state/model/bias", "state/optimizers"]
    name = "b{batch}" + suffix
    with plain(tmp_path, save_filename=name, save_ignore_keys=keys, max_duration="1ep") as saving:
        saving.fit()
    capsys.readouterr()
    with plain(None, load_path=tmp_path / f"b6{suffix}", max_duration="2ep", model=torch.nn.Linear(4, 3)) as trainer:
        assert torch.equal(trainer.state.model.weight, saving.state.model.weight)
        assert not torch.equal(trainer.state.model.bias, saving.state.model.bias)
        trainer.fit()
    said = capsys.readouterr().err
    assert "NOT restored  state/model/bias: missing" in said
    assert "it was saved without state/model/bias, state/optimizers (save_ignore_keys)" in said


def test_a_directory_of_torch_names_the_way_in(tmp_path: Path) -> None:
    """load_path of a sharded directory of Composer says `holdfast import`; autoresume beside one starts nothing."""
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Linear(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dcp, about the one process
        dcp.save({"state": {"model": model.state_dict()}}, checkpoint_id=tmp_path / "runs" / "ep1-ba6")
    with pytest.raises(hf.ConfigError, match=r"holdfast import .*runs/ep1-ba6 NEW"):
        plain(None, load_path=tmp_path / "runs" / "ep1-ba6")
    with pytest.raises(hf.ConfigError, match=r"sharded checkpoints of Composer \(ep1-ba6\)"):
        plain(tmp_path / "runs", autoresume=True)
    hf.import_checkpoint(tmp_path / "runs" / "ep1-ba6", tmp_path / "new")
    assert torch.equal(plain(None, load_path=tmp_path / "new").state.model.weight, model.weight)


def test_a_model_without_parameters() -> None:
    """fit() says that there is nothing to train; Composer's scripts expect a ValueError."""
    with pytest.raises(ValueError, match="without parameters: there is nothing to train"):
        plain(None, model=torch.nn.Flatten()).fit()
