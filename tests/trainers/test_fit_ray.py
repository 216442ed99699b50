"""`TorchTrainer.fit` where scripts written for Ray Train expect something of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_functions import attempt, rank, save_directory
from fit_kit import make, read

import holdfast as hf

pytestmark = pytest.mark.usefixtures("forked")


def stored(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "run").iterdir() if path.name.startswith("checkpoint"))


def test_an_upload_that_somebody_still_writes(tmp_path: Path) -> None:
    """The directory need not exist when report() is called: the function waits until it does, in the background."""

    def train() -> None:
        place = Path(hf.get_context().get_storage().build_checkpoint_path_from_name("later"))

        def write() -> None:
            time.sleep(0.3)
            place.mkdir()
            (place / "epoch.txt").write_text("7")

        writer = threading.Thread(target=write)
        writer.start()

        def upload(checkpoint: hf.Checkpoint, name: str) -> hf.Checkpoint:
            writer.join()
            return checkpoint

        hf.report(
            {"epoch": 7},
            hf.Checkpoint.from_directory(place),
            checkpoint_dir_name="later",
            checkpoint_upload_mode=hf.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
            delete_local_checkpoint_after_upload=False,
        )

    result = make(tmp_path, train, workers=1).fit()
    assert read(result.checkpoint) == "7"
    assert result.checkpoint is not None
    assert result.checkpoint.name == "later"


class Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.heard.append((metrics, checkpoint and checkpoint.name))


def test_callbacks_get_the_metrics_of_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In the order of the ranks; the history of the run has those of rank 0. One that leaves early is said."""

    def train() -> None:
        hf.report({"loss": rank()})
        if rank() == 1:
            sys.exit(0)
        hf.report({"loss": 5})

    listener = Listener()
    result = make(tmp_path, train, callbacks=[listener]).fit()
    assert listener.heard == [([{"loss": 0}, {"loss": 1}], None), ([{"loss": 5}, {}], None)]
    assert list(result.metrics_dataframe["loss"]) == [0, 5]
    told = capfd.readouterr().err
    assert "by sys.exit(0) train_func ended on rank 1 after report 1; the others returned, the last after" in told


def test_a_worker_that_left_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that waits for a rank which has ended fails after the limit of reports; the error names the rank."""
    monkeypatch.setenv("HOLDFAST_REPORT_TIMEOUT_S", "1")

    def train() -> None:
        hf.report({"loss": 1})
        if rank() == 1:
            sys.exit(0)
        torch.distributed.all_reduce(torch.ones(1))

    with pytest.raises(hf.TrainingFailedError, match=r"had ended before on rank 1 after report 1 \(by sys") as caught:
        make(tmp_path, train).fit()
    assert "gloo" in str(caught.value.failures[0])


def test_one_checkpoint_means_one_after_a_restart_too(tmp_path: Path) -> None:
    """The one that was resumed from goes as soon as the next one is committed."""

    def train() -> None:
        for epoch in range(2):
            save_directory(epoch, {"epoch": epoch})
        if attempt() == 1:
            raise ValueError("once")
        hf.report({"stored": json.dumps(stored(tmp_path))})

    result = make(tmp_path, train, workers=1, failures=1, checkpoint_config=hf.CheckpointConfig(num_to_keep=1)).fit()
    assert json.loads(result.metrics["stored"]) == ["checkpoint_000003"]
    assert result.attempts[1].resumed_from == "checkpoint_000001"
    assert stored(tmp_path) == ["checkpoint_000003"]


def test_a_dictionary_checkpoint_in_the_config(tmp_path: Path) -> None:
    """It lives in the memory of the driver, and reaches the workers all the same."""

    def train(config: dict[str, Any]) -> None:
        hf.report({"epoch": config["start"].to_dict()["epoch"], "pid": os.getpid()})

    config = {"start": hf.Checkpoint.from_dict({"epoch": 3})}
    result = make(tmp_path, train, workers=1, train_loop_config=config).fit()
    assert result.metrics["epoch"] == 3
    assert result.metrics["pid"] != os.getpid()


def test_spellings_of_ray(tmp_path: Path) -> None:
    """Collectives without a process group of the user's, positional arguments, and the keywords of Ray 1.x."""

    def train() -> None:
        from holdfast.collective import barrier, broadcast_from_rank_zero

        found = [broadcast_from_rank_zero({"from": hf.world_rank(), "n": number}) for number in range(3)]
        barrier()
        hf.report(loss=1.0, found=found, ranks=hf.world_size() + hf.local_rank())
        with pytest.raises(TypeError, match="'checkpont'"):
            hf.report({"a": 1}, checkpont=None)
        assert isinstance(hf.get_context(), hf.TrainContext)
        save = None
        if rank() == 0:
            (tmp_path / "mine").mkdir()
            (tmp_path / "mine" / "epoch.txt").write_text("1")
            save = hf.Checkpoint.from_directory(tmp_path / "mine")
        hf.report({"loss": 2.0}, save, "by-name")
        there = hf.get_all_reported_checkpoints(hf.CheckpointConsistencyMode.COMMITTED)
        assert [one.checkpoint.name for one in there] == ["by-name"]

    result = make(tmp_path, train).fit()
    first = result.metrics_dataframe.iloc[0]
    assert first["found"] == [{"from": 0, "n": number} for number in range(3)]
    assert first["ranks"] == 2
    assert result.metrics == {"loss": 2.0}


def test_no_workers_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The function runs in this process, in this thread, and can touch what is here; everything else is as ever."""
    seen: list[Any] = []

    def train(config: dict[str, Any]) -> None:
        seen.append((os.getpid(), threading.current_thread(), config["n"], hf.get_context().get_world_size()))
        start = 0 if (checkpoint := hf.get_checkpoint()) is None else checkpoint.to_dict()["epoch"] + 1
        for epoch in range(start, 3):
            hf.report({"epoch": epoch}, state={"epoch": epoch})
            if len(seen) == 1 and epoch == 1:
                raise ValueError("once")

    result = make(tmp_path, train, workers=0, failures=1, train_loop_config={"n": 1}).fit()
    assert seen == [(os.getpid(), threading.current_thread(), 1, 1)] * 2
    assert result.metrics == {"epoch": 2}
    assert len(result.attempts) == 2
    assert "workers   none: train_func runs in this process" in capfd.readouterr().err
    with pytest.raises(hf.SessionError):
        hf.report({})


def test_a_validation_that_leaves_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has failed at once; nobody waits for it to run out of time."""

    def train() -> None:
        hf.report({"epoch": 0}, state={"epoch": 0}, validation=True)

    def leave(_: hf.Checkpoint) -> dict[str, float]:
        raise SystemExit(2)

    assert make(tmp_path, train, workers=0, validation=leave).fit().checkpoint is not None
    assert "the validation of checkpoint_000000 failed: SystemExit: 2" in capfd.readouterr().err


def test_what_a_function_raises_here(tmp_path: Path) -> None:
    """The error has the exception itself as its cause; Ctrl-C ends the run and stays what it is."""
    wrong = ValueError("mine")

    def train() -> None:
        hf.report({"epoch": 0}, state={"epoch": 0})
        raise wrong

    with pytest.raises(hf.TrainingFailedError) as caught:
        make(tmp_path, train, workers=0).fit()
    assert caught.value.__cause__ is wrong

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, interrupted, workers=0, failures=5).fit()
    result = make(tmp_path, lambda: None, workers=0).fit()
    assert result.checkpoint is not None
    assert [one.reason for one in result.attempts][1:] == ["SIGINT", "finished"]


def test_a_run_in_a_folder_of_runs(tmp_path: Path) -> None:
    """The name leads into directories; what other runs are beside is what the context calls their place."""

    def train() -> None:
        storage = hf.get_context().get_storage()
        hf.report({"name": hf.get_context().get_experiment_name(), "place": storage.storage_fs_path}, state={"n": 1})

    result = make(tmp_path, train, workers=0, name="sweep/lr-0.1").fit()
    assert result.metrics == {"name": "sweep/lr-0.1", "place": str(tmp_path)}
    assert result.path == str(tmp_path / "sweep" / "lr-0.1")
    assert hf.Result.from_path(tmp_path / "sweep/lr-0.1").metrics == result.metrics


def test_errors_are_of_the_kinds_that_scripts_catch(tmp_path: Path) -> None:
    """RuntimeError and TypeError where Ray Train raises these; our own kinds as well."""
    with pytest.raises(RuntimeError, match="there is no run"):
        hf.Result.from_path(tmp_path)
    with pytest.raises(TypeError, match="not on a local disk"):
        os.fspath(hf.Checkpoint("memory://somewhere/checkpoint"))
    result = make(tmp_path, lambda: hf.report({"loss": 1}), workers=0).fit()
    with pytest.raises(RuntimeError, match="has no checkpoint"):
        result.get_best_checkpoint("loss", "min")
    result = make(tmp_path, lambda: hf.report({"loss": 1}, state={"n": 1}), workers=0).fit()
    with pytest.raises(RuntimeError, match="there are: loss") as caught:
        result.get_best_checkpoint("los", "min")
    assert isinstance(caught.value, hf.ConfigError)


def test_accelerate_is_told_the_device(tmp_path: Path) -> None:
    """It takes any GPU it sees otherwise."""
    result = make(tmp_path, lambda: hf.report({"on": os.environ["ACCELERATE_TORCH_DEVICE"]}), workers=1).fit()
    assert result.metrics == {"on": "cpu"}


def test_a_directory_on_one_rank_and_an_upload_on_the_other(tmp_path: Path) -> None:
    """They are one checkpoint; a file of another content under one name is kept with the rank in its name."""

    def train() -> None:
        mine = tmp_path / f"mine-{rank()}"
        mode = hf.CheckpointUploadMode.SYNC
        if rank() == 1:
            mine = Path(hf.get_context().get_storage().build_checkpoint_path_from_name("both"))
            mode = hf.CheckpointUploadMode.NO_UPLOAD
        mine.mkdir(parents=True)
        (mine / f"shard-{rank()}.txt").write_text(str(rank()))
        (mine / "same.txt").write_text("same")
        (mine / "other.txt").write_text(str(rank()))
        hf.report({"epoch": 0}, hf.Checkpoint.from_directory(mine), checkpoint_upload_mode=mode)

    result = make(tmp_path, train).fit()
    assert result.checkpoint is not None
    assert result.checkpoint.name == "both"
    assert result.checkpoint.verify().ok
    with result.checkpoint.as_directory() as directory:
        files = {path.name: path.read_text() for path in Path(directory).glob("*.txt")}
    assert files == {
        "shard-0.txt": "0",
        "shard-1.txt": "1",
        "same.txt": "same",
        "other.txt": "1",
        "other.rank-0.txt": "0",
    }
    assert len(os.listdir(tmp_path / "mine-0")) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_function_returns(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """`Result.return_value` is what train_func returned on rank 0; what cannot travel is None, and said."""

    def train(config: dict[str, Any]) -> Any:
        if config.get("lock"):
            return threading.Lock()
        return {"rank": rank(), "tensor": torch.ones(2)}

    found = make(tmp_path, train, workers=workers, train_loop_config={}).fit().return_value
    assert found["rank"] == 0
    assert torch.equal(found["tensor"], torch.ones(2))
    assert hf.Result.from_path(tmp_path / "run").return_value is None
    if workers:
        assert make(tmp_path, train, workers=workers, train_loop_config={"lock": True}).fit().return_value is None
        assert "cannot be sent to the driver" in "".join(
            p.read_text() for p in (tmp_path / "run/logs").rglob("*-0.log")
        )


LAUNCHED = """
import os, sys, tempfile
from pathlib import Path
import holdfast as hf, torch
from holdfast.torch import TorchTrainer

def train():
    context = hf.get_context()
    rank, start = context.get_world_rank(), 0
    if (checkpoint := hf.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            start = int(Path(folder, "step").read_text()) + 1
    for step in range(start, 3):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        if rank == 1 and step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step" if rank == 0 else f"of-{rank}").write_text(str(step))
            metrics = {"rank": rank, "step": step, "sum": total.item()}
            hf.report(metrics, checkpoint=hf.Checkpoint.from_directory(folder))
    hf.collective.barrier()
    return [rank, context.get_world_size(), context.get_local_rank(), start]

result = TorchTrainer(
    train, scaling_config=hf.ScalingConfig(num_workers=0), run_config=hf.RunConfig(name="run", storage_path=sys.argv[1])
).fit()
print("RESULT", os.environ["RANK"], result.metrics, result.return_value, result.checkpoint.name, flush=True)
"""


@pytest.mark.long
def test_local_mode_under_torchrun(tmp_path: Path) -> None:
    """The processes of torchrun are the ranks of one run, each with its files; after a kill torchrun restarts them."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [str(script), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = "{'rank': 0, 'step': 2, 'sum': 2.0} [0, 2, 0, 1] checkpoint_000002"
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("RESULT")) == [
        f"RESULT 0 {told}", f"RESULT 1 {told}",
    ]  # fmt: skip
    assert "2 processes that torchrun has started" in ended.stderr
    assert "resumes from checkpoint_000000" in ended.stderr
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoint_000002").iterdir())
    assert [name for name in kept if name in ("step", "of-1")] == ["of-1", "step"]


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_under_torchrun_ends_every_rank(tmp_path: Path, failing: int) -> None:
    """A rank that raises ends the launch with its error named, though the other waits for it in a collective."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED.replace("os.kill(os.getpid(), 9)", "raise ValueError('no such thing')").replace(
        "rank == 1 and", f"rank == {failing} and"
    ))  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert f"rank {failing}: ValueError: no such thing" in ended.stderr
    assert "RESULT" not in ended.stdout


def test_local_mode_on_several_machines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun with several nodes the error says what there is instead."""
    for name, value in {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(hf.ConfigError, match=r"4 processes, 2 of them on this machine: local mode is for one machine"):
        make(tmp_path, lambda: None, workers=0).fit()
