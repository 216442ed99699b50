"""Savers: names, intervals, several of them, retention, links, and what must not be overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog_kit import catalog_of
from loop_kit import Crash, CrashAt, loader, names, plain

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver
from holdfast.core import Event, Time
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage import resolve
from holdfast.trainers.loop.saving.folder import check_link, link_latest


def test_composer_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented script runs.

    Paths come back as the folder was spelt, the file opens with torch.load, the link leads to the newest.
    """
    monkeypatch.chdir(tmp_path)
    trainer = plain(
        "./path/to/checkpoints",
        save_filename="ep{epoch}.pt",
        save_latest_filename="latest",
        save_overwrite=True,
        save_interval="1ep",
    )
    trainer.fit()
    assert trainer.saved_checkpoints == ["./path/to/checkpoints/ep1.pt", "./path/to/checkpoints/ep2.pt"]
    assert os.readlink("path/to/checkpoints/latest") == "ep2.pt"
    found = torch.load("path/to/checkpoints/latest", weights_only=True)
    assert list(found) == ["state", "rng"]
    assert list(found["state"]) == [
        "model",
        "optimizers",
        "schedulers",
        "algorithms",
        "callbacks",
        "scaler",
        "timestamp",
        "rank_zero_seed",
        "train_metrics",
        "eval_metrics",
        "run_name",
        "dataset_state",
        "integrations",
        "metadata",
    ]
    assert found["state"]["schedulers"] == found["state"]["scaler"] == {}
    assert torch.equal(found["state"]["model"]["weight"], trainer.state.model.weight)
    assert sorted(os.listdir("path/to/checkpoints")) == ["ep1.pt", "ep2.pt", "latest"]


def test_directory_is_a_holdfast_checkpoint(tmp_path: Path) -> None:
    """The default container has the same anatomy, is listed, verifies and carries metrics."""
    trainer = plain(tmp_path, eval_dataloader=loader(8), max_duration="1ep")
    trainer.fit()
    record = catalog_of(tmp_path).latest()
    assert record is not None
    assert (record.name, record.step, record.epoch) == ("ep1-ba6", 6, 1)
    checkpoint = hf.Checkpoint(tmp_path / "ep1-ba6")
    assert checkpoint.verify().ok
    assert checkpoint.metrics["eval"]["loss"] == pytest.approx(float(trainer.state.eval_metric_values["eval"]["loss"]))
    assert list(checkpoint.load()) == ["state", "rng"]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, ["ep1-ba6", "ep2-ba12"]),
        ("4ba", ["ep0-ba4", "ep1-ba8", "ep1-ba12"]),
        (Time(5, "ba"), ["ep0-ba5", "ep1-ba10", "ep2-ba12"]),
        ("0.5dur", ["ep0-ba6", "ep1-ba12"]),
        ("20sp", ["ep0-ba4", "ep1-ba7", "ep1-ba11", "ep2-ba12"]),
        (lambda state, event: int(state.timestamp.batch) == 5 and event is Event.BATCH_CHECKPOINT, ["ep0-ba5"]),
    ],
)
def test_intervals(tmp_path: Path, interval: Any, expected: list[str]) -> None:
    """A training saves where the tables say; a function decides alone, at the end too."""
    trainer = plain(tmp_path, save_interval=interval, save_filename="ep{epoch}-ba{batch}.pt")
    trainer.fit()
    assert sorted(names(tmp_path)) == sorted(f"{name}.pt" for name in expected)


def test_savers_side_by_side(tmp_path: Path) -> None:
    """Each saver has its folder, interval, retention and content; one keyword saver and three callbacks."""
    savers = [
        CheckpointSaver(
            tmp_path / "weights", "w{batch}", save_interval="3ba", weights_only=True, num_checkpoints_to_keep=2
        ),
        CheckpointSaver(tmp_path / "all", "again{batch}.pt", save_interval="5ba", latest_filename=None),
        CheckpointSaver(tmp_path / "st", "ba{batch}.safetensors", save_interval="1ep", weights_only=True),
    ]
    trainer = plain(tmp_path / "all", save_num_checkpoints_to_keep=1, callbacks=savers)
    trainer.fit()
    assert names(tmp_path / "all") == ["again10.pt", "again12.pt", "again5.pt", "ep2-ba12"]
    assert names(tmp_path / "weights") == ["w12", "w9"]
    assert list(hf.load(tmp_path / "weights" / "w12")["state"]) == ["model", "integrations", "metadata"]
    assert [path.rsplit("/", 1)[1] for path in trainer.saved_checkpoints] == [
        "ep2-ba12",
        "w9",
        "w12",
        "again5.pt",
        "again10.pt",
        "again12.pt",
        "ba6.safetensors",
        "ba12.safetensors",
    ]
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(tmp_path / "st" / "ba12.safetensors")
    assert torch.equal(weights["weight"], trainer.state.model.weight)


def test_a_saver_in_a_second_trainer_begins_anew(tmp_path: Path) -> None:
    """As in a sweep in one process: the second run is kept, linked and uploaded like the first, from its own folder."""
    saver = CheckpointSaver(
        str(tmp_path / "{run_name}"), "ba{batch}", save_interval="2ba", num_checkpoints_to_keep=2,
        remote_file_name="{run_name}/ba{batch}",
    )  # fmt: skip
    for run in ("a", "b"):
        uploader = RemoteUploaderDownloader(str(tmp_path / "bucket"))
        model = torch.nn.Linear(4, 3)
        trainer = plain(run_name=run, callbacks=saver, loggers=uploader, model=model)
        trainer.fit()
        trainer.close()
        assert names(tmp_path / run) == ["ba10", "ba12"]
        assert (tmp_path / run / "latest-rank0").resolve() == tmp_path / run / "ba12"
        assert trainer.saved_checkpoints == [str(tmp_path / run / name) for name in ("ba10", "ba12")]
        for name in ("ba10", "ba12"):
            found = hf.load(tmp_path / "bucket" / run / name)["state"]["model"]
            here = hf.load(tmp_path / run / name)["state"]["model"]
            assert torch.equal(found["weight"], here["weight"])
        assert torch.equal(here["weight"], model.weight)


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_retention_survives_a_restart(tmp_path: Path, suffix: str) -> None:
    """Checkpoints of earlier lives count; the number kept is exact; the link never dangles."""
    options = {"save_filename": "ba{batch}" + suffix, "save_interval": "1ba", "save_num_checkpoints_to_keep": 2}
    with pytest.raises(Crash):
        plain(tmp_path, callbacks=CrashAt(4), autoresume=True, **options).fit()
    assert names(tmp_path) == [f"ba2{suffix}", f"ba3{suffix}"]
    again = plain(tmp_path, autoresume=True, max_duration="5ba", **options)
    again.fit()
    assert names(tmp_path) == [f"ba4{suffix}", f"ba5{suffix}"]
    assert [os.path.basename(path) for path in again.saved_checkpoints] == [f"ba4{suffix}", f"ba5{suffix}"]
    assert (tmp_path / "latest-rank0").resolve().name == f"ba5{suffix}"


def test_what_another_process_holds_stays(tmp_path: Path) -> None:
    """The retention of a saver asks like that of a run: what is held stays, and goes with the first save after it."""
    options = {
        "save_filename": "ba{batch}", "save_interval": "1ba", "save_num_checkpoints_to_keep": 1, "autoresume": True
    }  # fmt: skip
    with plain(tmp_path, max_duration="2ba", **options) as first:
        first.fit()
    with hf.Checkpoint(tmp_path / "ba2").hold(), plain(tmp_path, max_duration="4ba", **options) as second:
        second.fit()
        assert names(tmp_path) == ["ba2", "ba4"]
        assert [os.path.basename(path) for path in second.saved_checkpoints] == ["ba2", "ba4"]
    with plain(tmp_path, max_duration="5ba", **options) as third:
        third.fit()
    assert names(tmp_path) == ["ba5"]


class Losses(Callback):
    """Notes the loss of each evaluation by the name of its checkpoint."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def eval_end(self, state: Any, logger: Any) -> None:
        self.found[f"ba{int(state.timestamp.batch)}"] = float(state.eval_metric_values["eval"]["loss"])


def test_keep_by_metric(tmp_path: Path) -> None:
    """A Keep ranks by recorded metrics, of evaluation too, and the newest stays whatever its rank."""
    for mode, choose in (("min", min), ("max", max)):
        folder, losses = tmp_path / mode, Losses()
        keep = hf.Keep(best=1, metric="eval/loss", mode=mode)
        saver = CheckpointSaver(folder, "ba{batch}", save_interval="1ba", keep=keep)
        trainer = plain(
            None, callbacks=[saver, losses], eval_dataloader=loader(8), eval_interval="1ba", max_duration="4ba"
        )
        trainer.fit()
        assert len(losses.found) == 4
        best = choose(losses.found, key=lambda name: losses.found[name])
        assert names(folder) == sorted({best, "ba4"})
        assert hf.Checkpoint(folder / best).metrics["eval"]["loss"] == pytest.approx(losses.found[best])


def test_a_metric_that_no_checkpoint_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under the name that it is logged by nothing ranks: it is said once, with the names there are."""
    keep = hf.Keep(best=1, metric="metrics/eval/loss", mode="min")
    saver = CheckpointSaver(tmp_path, "ep{epoch}", keep=keep)
    plain(None, callbacks=saver, eval_dataloader=loader(8), max_duration="3ep").fit()
    assert names(tmp_path) == ["ep3"]
    assert caplog.text.count("no checkpoint of") == 1
    assert "they have: eval/loss, loss" in caplog.text


@pytest.mark.parametrize(
    "filename", ["ep{epoch}-ba{batch}", "ba{batch}.pt", "ep{epoch}/ba{batch}", "deep/ba{batch}.pt", "same", "same.pt"]
)
def test_nothing_is_overwritten(tmp_path: Path, filename: str) -> None:
    """Checkpoints of later moments refuse a fresh start before anything is trained.

    Directories, files, sub-folders and names without counters alike; save_overwrite goes over them.
    """
    plain(tmp_path, save_filename=filename, max_duration="1ep").fit()
    again = plain(tmp_path, save_filename=filename, max_duration="1ep")
    with pytest.raises(hf.CheckpointExistsError, match="nothing was trained"):
        again.fit()
    assert int(again.state.timestamp.batch) == 0
    plain(tmp_path, save_filename=filename, max_duration="2ba", save_interval="1ba", save_overwrite=True).fit()


@pytest.mark.parametrize("filename", ["ep{epoch}", "ep{epoch}.pt"])
def test_after_a_refusal_the_folder_is_free(tmp_path: Path, filename: str) -> None:
    """A trainer that is refused, by its constructor or by `fit`, leaves no lease: one may try again at once."""

    def held() -> list[str]:
        leases = [json.loads(path.read_text()) for path in tmp_path.glob("lease*.json")]
        return [lease["start_id"] for lease in leases if not lease.get("released")]

    plain(tmp_path, save_filename=filename, max_duration="1ep").fit()
    assert held() == []
    again = plain(tmp_path, save_filename=filename, max_duration="1ep")
    with pytest.raises(hf.CheckpointExistsError):
        again.fit()
    assert held() == []
    with pytest.raises(hf.StateMismatchError):
        plain(tmp_path, save_filename=filename, model=torch.nn.Linear(4, 5), autoresume=True, run_name="r")
    assert held() == []


def test_what_others_made_is_not_overwritten(tmp_path: Path) -> None:
    """A file, or a directory, of somebody else that has a name of ours is in the way too."""
    torch.save({"mine": 1}, tmp_path / "ba3.pt")
    (tmp_path / "ba4").mkdir()
    (tmp_path / "ba4" / "notes.txt").write_text("mine")
    for filename in ("ba{batch}.pt", "ba{batch}"):
        with pytest.raises(hf.CheckpointExistsError, match=r"ba[34]"):
            plain(tmp_path, save_filename=filename).fit()
    (tmp_path / "ba3.pt").write_text("no file of torch's at all")
    with pytest.raises(hf.CheckpointExistsError, match="ba3"):
        plain(tmp_path, save_filename="ba{batch}.pt").fit()
    assert (tmp_path / "ba3.pt").read_text().startswith("no file")


def test_other_runs_are_not_cleaned_up(tmp_path: Path) -> None:
    """Going on from a checkpoint elsewhere does not make what lies in the folder ours to delete."""
    folder = tmp_path / "runs"
    plain(folder, save_interval="2ba", max_duration="4ba").fit()
    plain(tmp_path / "other").fit()
    trainer = plain(
        folder, load_path=tmp_path / "other" / "ep2-ba12", max_duration="3ep", save_num_checkpoints_to_keep=1
    )
    trainer.fit()
    assert names(folder) == ["ep0-ba2", "ep0-ba4", "ep3-ba18"]


def test_ignore_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What globs name is not saved, inside of a model too.

    A glob that matches nothing is said; a function may change the dictionary.
    """
    plain(
        tmp_path, max_duration="1ep", save_ignore_keys=["state/optimizers", "state/model/bias", "state/apples/*"]
    ).fit()
    state = hf.load(tmp_path / "ep1-ba6")["state"]
    assert "optimizers" not in state
    assert list(state["model"]) == ["weight"]
    assert "state/apples/*" in caplog.text
    plain(
        tmp_path / "b",
        max_duration="1ep",
        save_filename="x.pt",
        save_ignore_keys=lambda found: found["state"].pop("model"),
    ).fit()
    assert "model" not in torch.load(tmp_path / "b" / "x.pt", weights_only=True)["state"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"save_interval": "soon"}, "save_interval"),
        ({"save_filename": "ep{apples}"}, "apples"),
        ({"save_folder": "{epoch}"}, "save_folder"),
        ({"save_filename": "x.tar.gz"}, "container"),
        ({"save_num_checkpoints_to_keep": 0}, "RemoteUploaderDownloader"),
        ({"max_duration": "0.5dur"}, "share"),
        ({"max_duration": "1 week"}, "1h20m40s"),
        ({"precision": "fp7"}, "precision"),
        ({"grad_accum": 0}, "grad_accum"),
        ({"save_filename": "../x"}, "save_filename"),
        ({"device": "abacus"}, "device"),
        ({"autoresume": True, "save_weights_only": True}, "weights"),
        ({"load_object_store": 3, "load_path": "x"}, "load_object_store"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], word: str) -> None:
    """Every wrong argument is refused by the constructor, by name."""
    with pytest.raises(hf.ConfigError, match=word):
        plain(**{"folder": tmp_path, **options} if "save_folder" not in options else {"folder": None, **options})


def test_arguments_of_composer() -> None:
    """Arguments that Composer has and we have not are answered with what to do instead."""
    with pytest.raises(hf.ConfigError, match="grad_accum"):
        plain(None, device_train_microbatch_size=2)
    with pytest.raises(TypeError, match="apples"):
        plain(None, apples=2)


def test_savers_must_not_meet(tmp_path: Path) -> None:
    """Two savers with one name in one folder, or among the uploads, are refused."""
    with pytest.raises(hf.ConfigError, match="same name"):
        plain(tmp_path, save_filename="a", callbacks=CheckpointSaver(tmp_path, "a"))
    bucket = RemoteUploaderDownloader(f"memory://meet-{os.getpid()}")
    with pytest.raises(hf.ConfigError, match="uploads"):
        plain(tmp_path, save_filename="a", callbacks=CheckpointSaver(tmp_path / "b", "a"), loggers=bucket)
    plain(tmp_path, save_filename="a", callbacks=CheckpointSaver(tmp_path / "b", "c"), loggers=bucket)


def test_shares_need_a_length(tmp_path: Path) -> None:
    """A share of epochs of a loader without length is refused before training; batches are fine."""

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            for number in range(30):
                yield torch.full((4,), float(number)), torch.tensor(number % 3)

    data = torch.utils.data.DataLoader(Endless(), batch_size=5)
    with pytest.raises(hf.ConfigError, match="length"):
        plain(tmp_path, train_dataloader=data, save_interval="0.5dur").fit()
    trainer = plain(tmp_path, train_dataloader=data, save_interval="4ba", max_duration="1ep")
    trainer.fit()
    assert names(tmp_path) == ["ep0-ba4", "ep1-ba6"]


def test_save_checkpoint_anywhere(tmp_path: Path) -> None:
    """save_checkpoint saves at once, under any name; saving to the save folder happens once for one batch."""
    trainer = plain(tmp_path / "runs", max_duration="1ep")
    trainer.fit()
    assert trainer.save_checkpoint(str(tmp_path / "here-{batch}.pt")) == str(tmp_path / "here-6.pt")
    with pytest.raises(hf.CheckpointNotFoundError, match=r"that is a file: torch\.load"):
        hf.load(tmp_path / "here-6.pt")
    trainer.save_checkpoint(str(tmp_path / "there"), weights_only=True)
    trainer.save_checkpoint(str(tmp_path / "w.safetensors"))
    assert list(hf.load(tmp_path / "there")["state"]) == ["model", "integrations", "metadata"]
    trainer.save_checkpoint_to_save_folder()
    trainer.close()
    assert names(tmp_path / "runs") == ["ep1-ba6"]
    for act in (lambda: trainer.fit("1ep"), trainer.save_checkpoint_to_save_folder):
        with pytest.raises(hf.SessionError, match="this trainer is closed"):
            act()


class Odd(Callback):
    """Its state holds what cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1, "code": print}


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_what_cannot_be_saved(tmp_path: Path, suffix: str) -> None:
    """A callback whose state cannot be saved ends training, and what is said to do about it helps."""
    options: dict[str, Any] = {"callbacks": Odd(), "save_filename": "b{batch}" + suffix, "max_duration": "1ba"}
    with pytest.raises(hf.UnsupportedStateError, match=r"'Odd'.*'code'.*or leave it out by save_ignore_keys"):
        plain(tmp_path, **options).fit()
    plain(tmp_path, save_ignore_keys="state/callbacks/Odd/code", **options).fit()
    assert names(tmp_path) == [f"b1{suffix}"]


def test_no_link_to_the_newest_is_made_behind_a_link(tmp_path: Path) -> None:
    """A sub-folder that is a link may lead anywhere: refused at the start and where it comes later."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    storage = resolve(root)
    check_link(storage, "sub/latest")
    link_latest(storage, "sub/latest", "ep1")
    assert os.readlink(root / "sub" / "latest") == "../ep1"
    link_latest(storage, "sub/latest", "ep2")
    assert os.readlink(root / "sub" / "latest") == "../ep2"
    assert os.listdir(root / "sub") == ["latest"]
    (root / "out").symlink_to(outside)
    for act in (lambda: check_link(storage, "out/latest"), lambda: link_latest(storage, "out/a/latest", "ep2")):
        with pytest.raises(hf.StorageError, match="symbolic link"):
            act()
    assert not os.listdir(outside)
