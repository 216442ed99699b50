"""Trials of a real Ray Tune that save, die, are restarted and cloned, through Holdfast's checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray
import ray.tune
import trials
from object_kit import BUCKET, moto_bucket
from process_kit import wait_gone, wait_until
from ray.tune.schedulers import PopulationBasedTraining

import holdfast as hf
import holdfast.ray_tune

# Warnings of Ray about itself.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::ResourceWarning")]
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server, and a Ray of two CPUs whose trials know it."""
    with moto_bucket() as uri, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        # Ray's own logs are longer than everything else here, and its sockets need a short path.
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False
        )
        try:
            yield uri
        finally:
            ray.shutdown()


def tuned(
    trainable: Any,
    folder: Path,
    config: dict[str, Any],
    *,
    keep: int | None = None,
    storage: Any = None,
    **options: Any,
) -> Any:
    """Run trials of one CPU each; every trial is restarted twice at most. ``storage``: path and filesystem."""
    path, filesystem = storage or (str(folder / "tune"), None)
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(trainable, {"cpu": 1}),
        param_space={**config, "folder": str(folder)},
        tune_config=ray.tune.TuneConfig(metric="loss", mode="min", **options),
        run_config=ray.tune.RunConfig(
            name="t", storage_path=path, storage_filesystem=filesystem, verbose=0,
            failure_config=ray.tune.FailureConfig(max_failures=2),
            checkpoint_config=ray.tune.CheckpointConfig(
                num_to_keep=keep, checkpoint_score_attribute="loss" if keep else None, checkpoint_score_order="min"
            ),
        ),
    )  # fmt: skip
    return tuner.fit()


def uninterrupted(steps: int = 10) -> tuple[list[float], list[float]]:
    state = trials.objects()
    losses = [trials.train_one(state) for _ in range(steps)]
    return trials.weights(state), losses


@pytest.mark.parametrize("remote", [False, True])
def test_killed(tmp_path: Path, remote: bool) -> None:
    """A trial killed with SIGKILL goes on from its newest checkpoint and ends with the weights of one that was not.

    Tune keeps the two best by the metric, on a disk or in a bucket; each is a checkpoint with every byte as it was, and
    with nothing of a report in which the trial died.
    """
    bucket = pyarrow.fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"], region="us-east-1")
    (result,) = tuned(trials.killed_once, tmp_path, {}, keep=2, storage=(f"{BUCKET}/tune", bucket) if remote else None)
    expected, losses = uninterrupted()
    assert (tmp_path / "died").exists()
    assert json.loads(result.metrics["weights"]) == expected
    assert result.metrics["of"] == {"last": result.metrics["loss"]}
    assert list(result.metrics_dataframe["torn"].dropna()) == ["NotFound"]  # replaced, not added to
    kept = [hf.Checkpoint(one.path, one.filesystem) for one, _ in result.best_checkpoints]
    assert all(one.verify().ok for one in kept)
    best = sorted(range(10), key=lambda step: losses[step])[:2]
    # The newest stays as well as the two best: a trial goes on from it.
    assert {one.load()["steps"] for one in kept} >= {step + 1 for step in best}
    assert max(one.load()["steps"] for one in kept) == 10
    assert len(kept) <= 3


def test_restored(tmp_path: Path) -> None:
    """A trial is killed, then the driver: `Tuner.restore` ends with the weights of a run that was not.

    No checkpoint has files of one that was there before.
    """
    address = ray.get_runtime_context().gcs_address
    code = "import sys, trials; trials.drive(*sys.argv[1:])"
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path), address], timeout=300, check=False)
    assert died.returncode == -signal.SIGKILL
    trainable = ray.tune.with_resources(trials.killed_once, {"cpu": 1})
    (result,) = ray.tune.Tuner.restore(str(tmp_path / "t"), trainable, resume_errored=True).fit()
    assert json.loads(result.metrics["weights"]) == uninterrupted()[0]
    kept = sorted(tmp_path.glob("t/*/checkpoint_*"))
    assert [hf.load(path)["steps"] for path in kept] == list(range(1, 11))
    assert all(len(list(path.glob("state-*.json"))) == 1 for path in kept)


def test_population(tmp_path: Path) -> None:
    """Population based training clones the better trial: the worse one goes on from a checkpoint of the other.

    Ray kills the child processes of a trial that it pauses. Nobody hears of the death of a writer.
    """
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=4, quantile_fraction=0.5, synch=True,
        hyperparam_mutations={"lr": [0.05, 0.0001]},
    )  # fmt: skip
    config = {"lr": ray.tune.grid_search([0.05, 0.0001])}
    results = tuned(trials.population, tmp_path, config, scheduler=scheduler)
    assert not results.errors
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    cloned = [one for one in starts if one["from"] != one["trial"]]
    assert cloned
    assert all(one["steps"] % 4 == 0 for one in cloned)
    assert all(result.metrics["steps"] == 8 for result in results)
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    assert not [path for path in logs.glob("worker-*") if "writer process died" in path.read_text(errors="replace")]


@pytest.mark.parametrize("remote", [False, True])
def test_by_reference(tmp_path: Path, store: str, remote: bool) -> None:
    """A checkpoint of a run is reported by its place: Tune stores one small file; a killed trial goes on."""
    run = f"{store}/run" if remote else str(tmp_path / "run")
    (result,) = tuned(trials.by_reference, tmp_path, {"run": run})
    assert json.loads(result.metrics["weights"]) == uninterrupted()[0]
    stored = list((tmp_path / "tune").rglob("checkpoint_*/*"))
    assert {path.name for path in stored if not path.name.startswith(".")} == {holdfast.ray_tune.REFERENCE_NAME}
    assert sum(path.stat().st_size for path in stored) < 10_000


@pytest.mark.parametrize(("how", "said"), [("gone", "no committed checkpoint"), ("other", "another checkpoint")])
def test_not_there(tmp_path: Path, how: str, said: str) -> None:
    """A reported checkpoint that was deleted or replaced is an error that names it, never a fresh start."""
    results = tuned(trials.gone, tmp_path, {"where": str(tmp_path / "c"), "how": how})
    (error,) = results.errors
    assert said in str(error)
    assert str(tmp_path / "c") in str(error)


def test_outside_of_a_trial() -> None:
    """Nothing to report to is said at once."""
    with pytest.raises(hf.errors.SessionError, match="trial"):
        holdfast.ray_tune.report({"loss": 1.0})
    with pytest.raises(hf.errors.SessionError, match="trial"):
        holdfast.ray_tune.get_checkpoint()


def test_an_actor_that_ray_kills(tmp_path: Path) -> None:
    """``ray.kill`` ends the children of an actor too: a sealed save is committed all the same, the lease given up."""
    actor = ray.remote(trials.Saver).remote()
    pid = ray.get(actor.save.remote(str(tmp_path)))
    ray.kill(actor)
    assert wait_gone(pid)
    assert wait_until(lambda: not (tmp_path / "lease.json").exists())
    assert hf.load(tmp_path)["step"] == 1


def test_a_trial_that_trains_on_the_cluster(tmp_path: Path) -> None:
    """``engine="ray"`` in a trial: reports reach Tune; killed with its process, the run goes on; nothing is left."""
    (result,) = tuned(trials.fit_on_the_cluster, tmp_path, {})
    assert result.error is None
    assert result.metrics["steps"] == 5
    assert 2 <= result.metrics["start"] < 5  # the worker may have been ahead of what Tune had heard
    assert (tmp_path / "died").exists()
    (run,) = (tmp_path / "runs").iterdir()
    assert len(hf.Result.from_path(run).attempts) == 2
    told = json.loads(Path(result.checkpoint.path, "holdfast-reference.json").read_text())
    weights, _ = uninterrupted(5)
    assert trials.weights(hf.load(run / told["name"], trials.objects())) == weights
    deadline = time.monotonic() + 30
    while any(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
