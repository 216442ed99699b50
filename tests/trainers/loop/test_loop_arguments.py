"""What a script written for Composer may give, and what is nonsense: taken, or refused by name with what to do."""

from __future__ import annotations

import inspect
import os
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_kit import Crash, CrashAt, loader, plain

import holdfast as hf
from holdfast import callbacks, core, loggers, storage
from holdfast.callbacks import CheckpointSaver, EarlyStopper, LoadCheckpoint
from holdfast.core import Time
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage import LibcloudObjectStore

# Every argument of Composer 0.32.1.
OF_TRAINER = """
    model train_dataloader train_dataloader_label train_subset_num_batches spin_dataloaders max_duration algorithms
    algorithm_passes optimizers schedulers scale_schedule_ratio step_schedulers_every_batch eval_dataloader
    eval_interval eval_subset_num_batches callbacks loggers run_name progress_bar log_to_console console_stream
    console_log_interval log_traces auto_log_hparams load_path load_object_store load_weights_only
    load_strict_model_weights load_progress_bar load_ignore_keys load_exclude_algorithms save_folder save_filename
    save_latest_filename save_overwrite save_interval save_weights_only save_ignore_keys save_num_checkpoints_to_keep
    save_metrics autoresume parallelism_config device precision precision_config device_train_microbatch_size
    accumulate_train_batch_on_tokens seed deterministic_mode dist_timeout ddp_sync_strategy profiler python_log_level
    compile_config
"""
OF_SAVER = """
    folder filename remote_file_name latest_filename latest_remote_file_name save_interval overwrite
    num_checkpoints_to_keep weights_only ignore_keys num_concurrent_uploads upload_timeout_in_seconds
"""
OF_UPLOADER = """
    bucket_uri backend_kwargs file_path_format_string num_concurrent_uploads upload_staging_folder use_procs
    num_attempts
"""


@pytest.mark.parametrize(
    ("cls", "names", "needed"),
    [
        (hf.Trainer, OF_TRAINER, {}),
        (CheckpointSaver, OF_SAVER, {}),
        (RemoteUploaderDownloader, OF_UPLOADER, {"bucket_uri": "memory://x"}),
        (LoadCheckpoint, "load_path load_weights_only strict_model_weights ignore_keys event", {}),
        (EarlyStopper, "monitor dataloader_label comp min_delta patience", {}),
        (LibcloudObjectStore, "provider container chunk_size key_environ secret_environ provider_kwargs", {}),
    ],
)
def test_every_argument_of_composer(cls: Any, names: str, needed: dict[str, Any]) -> None:
    """Each is taken, or answered with what to do instead: none is just unexpected."""
    known = inspect.signature(cls).parameters
    for name in names.split():
        if name not in known:
            with pytest.raises(hf.ConfigError, match=f"no argument {name}: .+"):
                cls(**needed, **{name: None})


OF_FIT = """
    train_dataloader train_dataloader_label train_subset_num_batches spin_dataloaders duration reset_time schedulers
    scale_schedule_ratio step_schedulers_every_batch eval_dataloader eval_subset_num_batches eval_interval
    device_train_microbatch_size precision
"""


@pytest.mark.parametrize(("method", "names"), [("fit", OF_FIT), ("eval", "eval_dataloader subset_num_batches")])
def test_every_argument_of_its_methods(method: str, names: str) -> None:
    """Each is taken, or answered with what to do instead; nothing is trained."""
    trainer = plain()
    known = inspect.signature(getattr(trainer, method)).parameters
    for name in names.split():
        if name not in known:
            with pytest.raises(hf.ConfigError, match=rf"Trainer.{method} has no argument {name}: .+"):
                getattr(trainer, method)(**{name: None})


def test_names_of_composer() -> None:
    """The classes that its pages on checkpoints name are where a change of imports looks for them."""
    for module, names in (
        (callbacks, "Callback CheckpointSaver EarlyStopper LoadCheckpoint"),
        (core, "Algorithm Callback Event State Time TimeUnit Timestamp"),
        (loggers, "Logger LoggerDestination RemoteUploaderDownloader ConsoleLogger"),
        (storage, "LibcloudObjectStore"),
    ):
        assert [name for name in names.split() if not hasattr(module, name)] == []
    for make in ("iteration", "epoch", "batch", "sample", "token", "duration"):
        assert int(getattr(Time, f"from_{make}")(3 if make != "duration" else 0.5)) in (0, 3)
    assert Time.from_timedelta("1h20m40s") == +Time(4840, "sec")


NONSENSE: list[tuple[str, Any]] = [
    ("model", "a model"),
    ("train_dataloader", 5),
    ("train_dataloader", lambda: iter(())),
    ("eval_dataloader", {"a": 5}),
    ("loss_fn", 5),
    ("loss_fn", torch.nn.MSELoss),
    ("max_duration", []),
    ("max_duration", object()),
    ("max_duration", "-2ep"),
    ("max_duration", True),
    ("eval_interval", "soon"),
    ("eval_interval", "-1ep"),
    ("eval_interval", lambda state: True),
    ("eval_dataloader", (1, 2)),
    ("eval_dataloader", (loader(6), 5)),
    ("eval_dataloader", (torch.ones(2), torch.ones(2))),
    ("train_dataloader", (loader(6), loader(6))),
    ("eval_subset_num_batches", 0),
    ("optimizers", 3),
    ("optimizers", [torch.optim.AdamW]),
    ("optimizers", {"a": 1}),
    ("schedulers", "cosine"),
    ("schedulers", [lambda: 1.0]),
    ("callbacks", "CheckpointSaver"),
    ("callbacks", CheckpointSaver),
    ("callbacks", [3]),
    ("callbacks", [None]),
    ("callbacks", (one for one in ())),
    ("loggers", "s3://bucket"),
    ("loggers", [RemoteUploaderDownloader]),
    ("algorithms", ["ema"]),
    ("run_name", 3.5),
    ("run_name", True),
    ("run_name", "a\0b"),
    ("seed", "x"),
    ("seed", -1),
    ("seed", 1.5),
    ("device", 3.5),
    ("device", "xla"),
    ("precision", 16),
    ("precision", []),
    ("grad_accum", "auto"),
    ("grad_clip_norm", "1"),
    ("grad_clip_norm", -1.0),
    ("grad_clip_norm", True),
    ("grad_clip_norm", torch.ones(2)),
    ("grad_clip_norm", float("nan")),
    ("progress_bar", "no"),
    ("step_schedulers_every_batch", "yes"),
    ("save_folder", 3),
    ("save_folder", b"bytes"),
    ("save_folder", "a\0b"),
    ("save_folder", "nowhere://x"),
    ("save_filename", None),
    ("save_filename", 7),
    ("save_filename", ""),
    ("save_filename", "/"),
    ("save_filename", "a//b"),
    ("save_filename", "a" * 250 + "{batch}"),
    ("save_filename", "ep{epoch:zz}"),
    ("save_filename", "ep{epoch!x}"),
    ("save_filename", "{run_name:04d}"),
    ("save_filename", "ep{batch"),
    ("save_latest_filename", 3),
    ("save_latest_filename", ""),
    ("save_latest_filename", "../latest"),
    ("save_latest_filename", "{nothing}"),
    ("save_remote_file_name", 5),
    ("save_overwrite", "False"),
    ("save_interval", []),
    ("save_interval", lambda: True),
    ("save_interval", "0ba"),
    ("save_interval", "3 apples"),
    ("save_interval", float("nan")),
    ("save_weights_only", 2),
    ("save_ignore_keys", 3),
    ("save_ignore_keys", [3]),
    ("save_ignore_keys", {"state": 1}),
    ("save_num_checkpoints_to_keep", "2"),
    ("save_num_checkpoints_to_keep", -5),
    ("save_num_checkpoints_to_keep", 1.5),
    ("save_metrics", None),
    ("load_path", 5),
    ("load_path", ""),
    ("load_path", "a\0b"),
    ("load_path", "nowhere://x"),
    ("load_weights_only", "yes"),
    ("load_strict_model_weights", "no"),
    ("load_strict", "0"),
    ("load_ignore_keys", 3),
    ("load_ignore_keys", [""]),
    ("load_progress_bar", 2),
    ("load_object_store", "s3://bucket"),
    ("autoresume", "true"),
]


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=[f"{one[0]}-{at}" for at, one in enumerate(NONSENSE)])
def test_nonsense(tmp_path: Path, name: str, value: Any) -> None:
    """What cannot be meant is refused by the constructor with an error that names it; nothing is written."""
    options: dict[str, Any] = {"folder": tmp_path / "runs"}
    if name == "load_object_store":
        options["load_path"] = "x"
    options["folder" if name == "save_folder" else name] = value
    with pytest.raises(hf.ConfigError) as caught:
        plain(**options)
    named = "nowhere" if value == "nowhere://x" else name.removeprefix("save_")
    assert named in str(caught.value), caught.value
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: CheckpointSaver(keep=3),
        lambda: CheckpointSaver(keep=hf.Keep(last=1), num_checkpoints_to_keep=2),
        lambda: RemoteUploaderDownloader("memory://x", num_attempts="3"),
        lambda: RemoteUploaderDownloader("memory://x", num_concurrent_uploads=0),
        lambda: RemoteUploaderDownloader("memory://x", file_path_format_string="{nothing}"),
        lambda: RemoteUploaderDownloader("memory://x", file_path_format_string="always the same"),
        lambda: RemoteUploaderDownloader(3),
        lambda: RemoteUploaderDownloader("s3://x", backend_kwargs={"a": 1}),
        lambda: LoadCheckpoint(3),
        lambda: LoadCheckpoint("x", event=3),
        lambda: LoadCheckpoint("x", load_weights_only="yes"),
        lambda: EarlyStopper("loss", comp="sideways"),
        lambda: EarlyStopper("loss", comp=3),
        lambda: EarlyStopper("loss", patience="0.5dur"),
        lambda: LibcloudObjectStore("local", "runs", 1 << 20),
    ],
)
def test_nonsense_for_other_classes(make: Any) -> None:
    """Savers, uploaders and callbacks refuse what cannot be meant, too."""
    with pytest.raises(hf.ConfigError):
        make()


SENSE: list[tuple[str, Any, str]] = [
    ("run_name", 42, "42"),
    ("run_name", 0, "0"),
    ("run_name", uuid.UUID(int=3), str(uuid.UUID(int=3))),
    ("grad_clip_norm", np.float32(0.5), ""),
    ("grad_clip_norm", np.int64(2), ""),
    ("grad_clip_norm", torch.tensor(0.5), ""),
    ("save_overwrite", np.bool_(True), ""),
    ("save_weights_only", 1, ""),
    ("load_progress_bar", 0, ""),
]


@pytest.mark.parametrize(("name", "value", "run_name"), SENSE, ids=[f"{one[0]}-{at}" for at, one in enumerate(SENSE)])
def test_other_kinds_of_the_same(name: str, value: Any, run_name: str) -> None:
    """Numbers of NumPy and torch, 0 and 1, and what names a run without being text are what they look like."""
    trainer = plain(
        f"memory://sense-{os.getpid()}/{name}-{type(value).__name__}-{value}",
        max_duration="1ba",
        save_filename="b{batch}.pt",
        **{name: value},
    )
    trainer.fit()
    if run_name:
        assert trainer.state.run_name == run_name


def test_a_better_value_is_seen_in_full() -> None:
    """A function that compares gets both values as exact as they are, and numbers if it cannot do with tensors."""
    big = float(1 << 25)
    for comp in (torch.greater, lambda new, best: round(new, 3) > round(best, 3)):
        stopper = EarlyStopper("accuracy", comp=comp)
        stopper.best = big
        assert stopper._improved(big + 1)
        assert not stopper._improved(big)


@pytest.mark.parametrize(("comp", "end"), [("less", 2), ("gt", 3), (torch.less, 2), (torch.greater, 3), (None, 2)])
def test_early_stopper(comp: Any, end: int) -> None:
    """Written for Composer: operators of torch and their names; more than the patience without better ones ends it."""

    class Rising(callbacks.Callback):
        def eval_end(self, state: Any, logger: Any) -> None:
            state.eval_metric_values["eval"]["loss"] = torch.tensor(float(state.timestamp.epoch))

    trainer = plain(
        None, callbacks=[Rising(), EarlyStopper("loss", "eval", comp, patience="4ba")], max_duration="3ep",
        eval_dataloader=loader(6),
    )  # fmt: skip
    trainer.fit()
    assert int(trainer.state.timestamp.epoch) == end


def test_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there is a bar, with the metrics of evaluations; a life that begins in mid-epoch has one too."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options: dict[str, Any] = {"progress_bar": True, "eval_dataloader": loader(6), "save_interval": "4ba"}
    with pytest.raises(Crash):
        plain(tmp_path, callbacks=CrashAt(5), **options).fit()
    capsys.readouterr()
    with plain(tmp_path, autoresume=True, max_duration="1ep", **options) as trainer:
        trainer.fit()
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "eval/loss" in shown


def test_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a job gets a line now and then: batch, share, pace, epoch, metrics, loss; none without the bar."""
    plain(None, progress_bar=True).fit()
    assert "batches/s" not in capsys.readouterr().err, "a short training needs no line"
    monkeypatch.setattr("holdfast.trainers.loop.loggers._LINE_S", (0.0, 0.0))
    plain(None, progress_bar=True, eval_dataloader=loader(6)).fit()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert re.fullmatch(r"holdfast: batch 3 \(25 %\), [\d.e+]+ batches/s  epoch 0  loss [\d.]+", lines[2])
    assert re.fullmatch(r"holdfast: batch 9 .* epoch 1  eval/loss [\d.]+  loss [\d.]+", lines[8])
    plain(None, progress_bar=False).fit()
    assert capsys.readouterr().err == ""
