"""`TorchTrainer` on a real Ray cluster: where ranks are, what they store, and what faults do to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from cluster_functions import agreed, digits, directories, many_reports, notes, steps
from cluster_kit import LIMIT_S, Nodes, kill, trainer, wait_gone, wait_until
from engine_kit import Driver, fitting
from object_kit import BUCKET, KEY, SECRET, moto_bucket, s3_environment

import holdfast as hf
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.trainers.function.engines.cluster.engine import ClusterEngine
from holdfast.trainers.function.engines.cluster.ray_api import connect
from holdfast.trainers.function.engines.cluster.ray_nodes import RayNodes, Wanted

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
SCRIPT = Path(__file__).resolve().parents[2] / "trainers" / "fit_script.py"


def waiting(root: Path, workers: int, future: Future[Any], mark: str = "waiting") -> list[dict[str, Any]]:
    """Wait until all workers of the first attempt have left a mark; where they are."""

    def met() -> bool:
        if future.done():
            future.result()
        return len(list(root.glob(f"{mark}-*"))) == workers

    wait_until(met, "the workers wait")
    return notes(root, 1)


def files(checkpoint: hf.Checkpoint) -> dict[str, bytes]:
    """Give the tensors' files, without the id of the start in their names."""
    with checkpoint.as_directory() as folder:
        return {
            "-".join(path.name.split("-")[:2]): path.read_bytes()
            for path in sorted(Path(folder).iterdir())
            if path.suffix == ".safetensors" or path.name == "state.json"
        }


def test_trains_as_on_one_machine(nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks are contiguous on nodes; checkpoints, metrics and logs are those of the local engine."""
    nodes.add(2, 1)
    there, here = tmp_path / "ray", tmp_path / "local"
    result = trainer(there, digits, workers=3).fit()
    found = notes(there, 1)
    assert [(one["rank"], one["local"], one["local_size"], one["node"]) for one in found] == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
        (2, 0, 1, 1),
    ] or [(one["local"], one["node"]) for one in found] == [(0, 0), (0, 1), (1, 1)]  # by the ids of the nodes
    assert len({one["agent"] for one in found}) == 2
    local = trainer(here, digits, workers=3, scaling={"engine": "local"}).fit()
    assert result.checkpoint is not None
    assert local.checkpoint is not None
    assert files(result.checkpoint) == files(local.checkpoint)
    assert list(result.metrics_dataframe["loss"]) == list(local.metrics_dataframe["loss"])
    assert result.metrics.keys() == local.metrics.keys()
    shown = capfd.readouterr().out
    for rank in range(3):
        line = f"rank {rank} of 3 begins"
        assert line in (there / "run" / "logs" / "attempt-00001" / f"rank-{rank}.log").read_text()
        assert re.search(rf"\(rank {rank}, node [0-9a-f]{{8}}\) {line}", shown)
    assert not list((there / "run").glob(".probe-*/*"))


def test_directories_come_from_their_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """Directories that ranks wrote on their own nodes become one checkpoint."""
    nodes.add(1, 1)
    result = trainer(tmp_path, directories).fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert {path.name for path in Path(folder).glob("rank-*")} == {"rank-0.txt", "rank-1.txt"}
    assert not list((tmp_path / "run").glob(".incoming-*"))


def test_worker_killed(nodes: Nodes, tmp_path: Path) -> None:
    """One failure: all are started again by the same agents, and end with what an undisturbed run has."""
    nodes.add(1, 1)
    result = trainer(tmp_path / "a", steps, failures=1, config={"die_at": 3}).fit()
    first, second = notes(tmp_path / "a", 1), notes(tmp_path / "a", 2)
    assert [one["agent"] for one in first] == [one["agent"] for one in second]
    assert [one["zygote"] for one in first] == [one["zygote"] for one in second]
    assert {one["start"] for one in second} == {3}
    undisturbed = trainer(tmp_path / "b", steps).fit()
    assert result.checkpoint is not None
    assert undisturbed.checkpoint is not None
    assert files(result.checkpoint) == files(undisturbed.checkpoint)


def test_agent_killed(nodes: Nodes, tmp_path: Path) -> None:
    """Its node's ranks end with it; another one is started in its place, the other agent stays: one failure."""
    nodes.add(1, 1)
    with fitting(trainer(tmp_path, steps, failures=1, config={"wait_at": 2}), LIMIT_S) as future:
        first = waiting(tmp_path, 2, future)
        kill(first[0]["agent"])
        for one in first:
            wait_gone(one["pid"])
    result = future.result()
    second = notes(tmp_path, 2)
    assert second[0]["agent"] != first[0]["agent"]
    assert second[1]["agent"] == first[1]["agent"]
    assert {one["start"] for one in second} == {3}
    assert (result.metrics["step"], result.metrics["total"]) == (6, 21)


def test_node_killed_without_a_spare(nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says what it waits for, and goes on when a node is added."""
    nodes.add(1, 1)
    shown: list[str] = []

    def said() -> bool:
        shown.append(capfd.readouterr().err)
        return "waiting for room for 2 workers" in "".join(shown)

    with fitting(trainer(tmp_path, steps, failures=1, config={"wait_at": 2}), LIMIT_S) as future:
        first = waiting(tmp_path, 2, future)
        nodes.kill(nodes.of(first[0]["agent"]))
        wait_until(said, "it says what it waits for")
        nodes.add(1)
    assert future.result().metrics["total"] == 21
    assert {one["start"] for one in notes(tmp_path, 2)} == {3}


def test_node_killed_elastic(nodes: Nodes, tmp_path: Path) -> None:
    """A range goes on with the workers that are left."""
    nodes.add(1, 1)
    with fitting(trainer(tmp_path, steps, workers=(1, 2), failures=1, config={"wait_at": 2}), LIMIT_S) as future:
        first = waiting(tmp_path, 2, future)
        nodes.kill(nodes.of(first[0]["agent"]))
    result = future.result()
    second = notes(tmp_path, 2)
    assert [(one["size"], one["start"]) for one in second] == [(1, 3)]
    assert second[0]["agent"] == first[1]["agent"]
    assert list(result.metrics_dataframe["size"]) == [2] * 3 + [1] * 3
    assert result.metrics["total"] == 21


def test_no_room(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be had is an error that names need and capacity, after a bounded wait."""
    nodes.add(1)
    monkeypatch.setenv("HOLDFAST_PLACEMENT_TIMEOUT_S", "3")
    with pytest.raises(hf.TrainingError, match=r"no room for 2 workers within 3 s.*gpu_of_mars 1.*gpu_of_mars 0"):
        trainer(tmp_path, steps, resources={"gpu_of_mars": 1}).fit()
    wait_until(lambda: not live_groups(), "the placement groups are gone")


def live_groups() -> list[Any]:
    return [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]


def test_driver_killed(nodes: Nodes, tmp_path: Path) -> None:
    """Nothing is left of it; a second driver is refused while it lives, and the same command goes on afterwards."""
    nodes.add(1, 1)
    config = {"root": str(tmp_path), "learn": False, "forever": True}
    with script(nodes, config) as driver:
        assert driver.stdout is not None
        pid = next(int(line.split()[-1]) for line in driver.stdout if "pid" in line)
        with pytest.raises(hf.RunBusyError):
            trainer(tmp_path, steps, config={}).fit()
        driver.kill()
        wait_gone(pid)
        wait_until(lambda: not live_groups(), "the placement groups are gone")
    with script(nodes, {**config, "forever": False}) as driver:
        _, said = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 0, said
        assert "run resumes from checkpoint_" in said


@contextmanager
def script(nodes: Nodes, config: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Run a driver of its own, which knows of the cluster by RAY_ADDRESS alone."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), json.dumps(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": nodes.address},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_many_reports(nodes: Nodes, tmp_path: Path) -> None:
    """Reports without data are counted, all of them; how many per second is for the benchmark to say."""
    nodes.add(1, 1)
    begun = time.monotonic()
    result = trainer(tmp_path, many_reports, config={"count": 20_000}).fit()
    print(f"20 000 reports of two ranks in {time.monotonic() - begun:.1f} s, the start included")
    assert list(result.metrics_dataframe["number"]) == list(range(20_000))


def test_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: Nodes) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(hf.ConfigError, match="ray job submit"):
        trainer(tmp_path, steps).fit()


def test_node_drained(nodes: Nodes, tmp_path: Path) -> None:
    """All ranks save at one step before rank 0's node goes; that is a preemption, no failure, and loses no step."""
    nodes.add(1, 1, 1)
    with fitting(trainer(tmp_path, agreed, config={"go_on": 2}), LIMIT_S) as future:
        first = waiting(tmp_path, 2, future, "begun")
        leaving = nodes.of(first[0]["agent"])
        nodes.drain(leaving, 15)
        wait_until(lambda: future.done() or list(tmp_path.glob("saved-1-*")), "the ranks save")
        wait_gone(first[0]["pid"])
        nodes.kill(leaving)
    result = future.result()
    assert len({path.read_text() for path in tmp_path.glob("saved-1-*")}) == 1
    steps_done = list(result.metrics_dataframe["step"])
    assert steps_done == list(range(1, len(steps_done) + 1))
    assert [one.reason for one in result.attempts][:1] != [""]


def test_grows_when_a_node_is_added(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range saves at one step and goes on with more workers; no step is lost or done twice."""
    monkeypatch.setenv("HOLDFAST_GROW_AFTER_S", "1")
    nodes.add(1)
    with fitting(trainer(tmp_path, agreed, workers=(1, 2), config={"go_on": 2}), LIMIT_S) as future:
        first = waiting(tmp_path, 1, future, "begun")
        nodes.add(1)
    result = future.result()
    second = notes(tmp_path, 2)
    assert {one["size"] for one in second} == {2}
    assert second[0]["agent"] == first[0]["agent"] or second[1]["agent"] == first[0]["agent"]
    steps_done = list(result.metrics_dataframe["step"])
    assert steps_done == list(range(1, len(steps_done) + 1))


def test_drain_of_a_node_of_somebody_else(nodes: Nodes, tmp_path: Path) -> None:
    """It changes nothing."""
    _, _, other = nodes.add(1, 1, 0)
    nodes.drain(other, 30)
    assert trainer(tmp_path, steps).fit().metrics["total"] == 21
    assert notes(tmp_path, 2) == []


@ray.remote(num_cpus=0, max_retries=0)
def fit_in_a_task(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "task").write_text(str(os.getpid()))
    return dict(trainer(folder, steps, config=config, scaling={"engine": "auto"}).fit().metrics)


def test_inside_a_task(nodes: Nodes, tmp_path: Path) -> None:
    """It works there, and if the task's process dies, nothing of it is left."""
    nodes.add(1, 1)
    future = fit_in_a_task.remote(tmp_path, {"wait_at": 2})

    def waits() -> bool:
        if ray.wait([future], timeout=0)[0]:
            ray.get(future)  # says why
        return len(list(tmp_path.glob("waiting-*"))) == 2

    wait_until(waits, "the workers wait")
    kill(int((tmp_path / "task").read_text()))
    for one in notes(tmp_path, 1):
        wait_gone(one["pid"])
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(future)
    wait_until(lambda: not live_groups(), "the placement groups are gone")
    assert ray.get(fit_in_a_task.remote(tmp_path, {}))["total"] == 21


def test_secrets_stay_in_the_connection(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of a storage reach the workers, and are in no log, argument or environment that Ray knows of."""
    nodes.add(1)
    with moto_bucket(), pytest.MonkeyPatch.context() as patch:
        for name in s3_environment(endpoint := os.environ["AWS_ENDPOINT_URL"]):
            patch.delenv(name)
        options = {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
        result = trainer(
            tmp_path, steps, workers=1, storage_path="runs", storage_filesystem=ObjectStorage(f"s3://{BUCKET}", options)
        ).fit()
        assert result.metrics["total"] == 21
        logs = {info.path for info in result.checkpoint.storage.list()} if result.checkpoint else set()
    assert any(path.endswith("rank-0.log") for path in logs)
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    texts = []
    for path in [*session.rglob("*"), *Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        with contextlib.suppress(OSError):  # a folder, a socket, a process that has ended
            texts.append(path.read_bytes())
    assert len(texts) > 20
    assert not any(SECRET.encode() in text for text in texts)


def test_accelerators_of_a_node(head: Nodes, nodes: Nodes) -> None:
    """Workers see all accelerators that the run has on their node, in the order of their ranks, and no others."""
    nodes.add_with_gpus(cpus=2, gpus=3)
    wanted = Wanted(least=2, most=2, resources={"CPU": 1.0, "GPU": 1.0})
    engine = ClusterEngine(RayNodes(connect(), wanted), entry="engine_peer:serve")
    try:
        driver = Driver(engine)
        driver.start(2, use_gpu=True)
        seen = [driver.run(rank, lambda channel, facts: os.environ["CUDA_VISIBLE_DEVICES"]) for rank in (0, 1)]
        assert seen[0] == seen[1]
        assert len({*seen[0].split(",")} & {"0", "1", "2"}) == 2
        assert seen[0].split(",") == sorted(seen[0].split(","))
        driver.clear()
    finally:
        engine.close()
