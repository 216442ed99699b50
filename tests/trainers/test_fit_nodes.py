"""`TorchTrainer` on nodes without a cluster: a node dies, is cut off, drained, or is not like the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import clock_kit
import node_functions
import pytest
from engine_kit import fitting
from nodes_kit import FakeNodes

import holdfast as hf
from holdfast.torch import TorchTrainer
from holdfast.trainers.function import trainer
from holdfast.trainers.function.engines.process_engine import ClusterEngine

pytestmark = pytest.mark.usefixtures("forked")
LIMIT_S = 90.0
Fit = Callable[..., TorchTrainer]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNodes]:
    """Two nodes of one place each."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = FakeNodes(a=1, b=1)
    yield made
    made.close()


@pytest.fixture
def fit(root: Path, nodes: FakeNodes, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """Make trainers that run on these nodes."""

    def make(function: Any, *, failures: int = 0, silence_s: float = 20.0, workers: Any = 2, **config: Any) -> Any:
        def engine(scaling: Any, storage: Any, **_: Any) -> ClusterEngine:
            return ClusterEngine(nodes, storage=storage, silence_s=silence_s)

        monkeypatch.setattr(trainer, "_make_engine", engine)
        monkeypatch.setattr(trainer, "_runs_on_ray", lambda _: True)
        preemptions = {"max_preemptions": config.pop("max_preemptions")} if "max_preemptions" in config else {}
        validation = config.pop("validation", None)
        return TorchTrainer(
            function,
            validation=validation,
            train_loop_config={"folder": str(root), "steps": 5, "step": 3, **config},
            scaling_config=hf.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=hf.RunConfig(
                name="run",
                storage_path=root,
                failure_config=hf.FailureConfig(max_failures=failures, **preemptions),
            ),
        )

    return make


def wait_until(met: Callable[[], Any], future: Future[Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not met():
        if future.done():
            future.result()
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:.0f} s"
        time.sleep(0.02)


def wait_for(root: Path, name: str, future: Future[Any]) -> str:
    wait_until((root / name).exists, future, name)
    return (root / name).read_text()


def litter(run: Path) -> list[str]:
    """What no checkpoint lists and the run does not need."""
    known = {"run.json", "run-changes.json", "lease.json", ".lease.lock"}
    for folder in run.glob("checkpoint_*"):
        if (folder / "manifest.json").exists():
            listed = hf.Checkpoint(folder).manifest.files
            known |= {f"{folder.name}/{path}" for path in ("manifest.json", *(one.path for one in listed))}
    found = [str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir()]
    return sorted(
        path
        for path in found
        if path not in known and not path.startswith(("reports/", "logs/", "fence-")) and ".metrics" not in path
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "start", "directories"),
    [("before_the_seal", 2, False), ("after_the_part", 3, False), ("in_the_intake", 2, True)],
)
def test_a_node_dies_in_a_report(
    root: Path, nodes: FakeNodes, fit: Fit, how: str, start: int, directories: bool
) -> None:
    """Before its share is sealed, the previous checkpoint counts; after it is stored, the new one; nothing is left."""
    made = fit(node_functions.steps, failures=1, how=how, directories=directories)
    with fitting(made, LIMIT_S) as future:
        wait_for(root, "stopped", future)
        # The share of the step before goes on in the background, and is lost with a node that dies before its end.
        wait_until((root / "run" / "checkpoint_000001" / "manifest.json").exists, future, "step 2 is committed")
        nodes.kill_node("b")
        nodes.set(b=0, c=1)
        begun = wait_for(root, "begun-2-0", future)
    result = future.result()
    assert int(begun) == start
    assert result.metrics["step"] == 5
    assert [one["step"] for one in rows(result)] == [1, 2, 3, 4, 5]
    assert litter(root / "run") == []


def rows(result: hf.Result) -> list[dict[str, Any]]:
    return result.metrics_dataframe.to_dict("records")


@pytest.mark.slow
def test_a_node_is_cut_off_and_comes_back(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """It is given up; what its worker stores after the restart is part of no checkpoint; the next start sweeps it."""
    made = fit(node_functions.steps, failures=1, silence_s=5.0, how="cut_off", second_waits=True)
    with fitting(made, LIMIT_S) as future:
        wait_for(root, "stopped", future)
        pids = nodes.processes("b")
        (wire := nodes.wires["b"]).cut()
        nodes.set(b=0, c=1)
        assert wait_for(root, "begun-2-1", future) == "2"
        (root / "write").touch()
        assert wait_for(root, "written", future) == "None"
        late = litter(root / "run")
        assert late
        wire.mend()
        wait_until(lambda: not set(nodes.processes("b")) & set(pids), future, "the old ranks end")
        (root / "go-on").touch()
    result = future.result()
    assert [(one["step"], one["total"]) for one in rows(result)] == [(1, 1), (2, 3), (3, 6), (4, 10), (5, 15)]
    assert result.checkpoint is not None
    assert result.checkpoint.verify()
    assert litter(root / "run") == late
    assert fit(node_functions.steps, steps=6).fit().metrics["step"] == 6
    assert litter(root / "run") == []


@pytest.mark.slow
def test_a_replacement_without_a_package_is_set_aside(
    root: Path, nodes: FakeNodes, fit: Fit, tmp_path_factory: pytest.TempPathFactory, caplog: Any
) -> None:
    """The node on which train_func cannot import something costs no failure; the run goes on when another one comes."""
    package = tmp_path_factory.mktemp("package")
    (package / "only_on_some_nodes.py").touch()
    for node in "abd":
        nodes.environments[node] = {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(package)])}
    made = fit(node_functions.needs_a_package, failures=1, how="before_the_seal")
    with fitting(made, LIMIT_S) as future:
        wait_for(root, "stopped", future)
        nodes.kill_node("b")
        nodes.set(b=0, c=1)
        wait_until(lambda: nodes.refused, future, "the node is refused")
        nodes.set(d=1)
    assert future.result().metrics["step"] == 5
    assert nodes.refused == ["c"]
    assert "node c (127.0.0.1) cannot run workers: No module named 'only_on_some_nodes'" in caplog.text


def test_a_package_is_missing_at_the_first_start(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """It is an error that names the package, and the node that failed first; both lack it."""
    made = fit(node_functions.needs_a_package)
    named = r"rank (0 on node a|1 on node b) \(127.0.0.1\): ModuleNotFoundError.*only_on_some"
    with pytest.raises(hf.TrainingFailedError, match=named):
        made.fit()


@pytest.mark.slow
def test_checkpoints_are_validated_on_a_node(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """The function runs in a process of a node, beside the workers; what it returns belongs to the checkpoint."""
    nodes.environments = {node: {"NODE_OF_THE_TEST": node} for node in "ab"}
    result = fit(node_functions.validated, validation=node_functions.validate).fit()
    assert [(row["step"], row["seen"]) for _, row in result.best_checkpoints] == [(1, 10), (2, 20)]
    assert {row["node"] for _, row in result.best_checkpoints} <= {"a", "b"}
    log = root / "run" / "logs" / "validation-checkpoint_000000.log"
    assert "validates step 1" in log.read_text()


@pytest.mark.slow
def test_a_full_disk_on_one_node(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """The message names the node."""
    made = fit(node_functions.steps, how="full_disk", step=1, rank=0)
    with pytest.raises(hf.TrainingFailedError, match=r"rank 0 on node a \(127.0.0.1\): StorageFullError"):
        made.fit()


@pytest.mark.slow
def test_the_node_of_rank_0_is_drained(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """All ranks save at one step and go on elsewhere; that is no failure, and no step is lost."""
    made = fit(node_functions.moves)
    with fitting(made, LIMIT_S) as future:
        wait_for(root, "begun-1-0", future)
        wait_for(root, "begun-1-1", future)
        nodes.set(c=1)
        nodes.drain("a")
        saved = wait_for(root, "saved-1-0", future)
    result = future.result()
    assert (root / "saved-1-1").read_text() == saved == (root / "begun-2-0").read_text()
    done = [one["step"] for one in rows(result)]
    assert done == list(range(1, int(saved) + 4))
    assert nodes.launched == ["a", "b", "c"]


@pytest.mark.slow
def test_two_drains_one_after_the_other(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """A second node that is drained before the workers have moved costs no second restart."""
    made = fit(node_functions.moves, max_preemptions=1, hold_at=5)
    with fitting(made, LIMIT_S) as future:
        wait_for(root, "held-0", future)
        nodes.drain("a")
        nodes.set(c=1, d=1)
        nodes.drain("b")
        (root / "go-on").touch()
    result = future.result()
    assert [(root / f"begun-{number}-0").exists() for number in (1, 2, 3)] == [True, True, False]
    done = [one["step"] for one in rows(result)]
    assert done == list(range(1, len(done) + 1))
    assert sorted(nodes.launched) == ["a", "b", "c", "d"]


@pytest.mark.slow
def test_two_drains_seconds_apart_with_fast_saves(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """The first one waits a little for others, because the saves so far took no time: one restart for both."""
    made = fit(node_functions.moves, max_preemptions=1, save_every=5)
    with fitting(made, LIMIT_S) as future:
        wait_until((root / "run" / "checkpoint_000002" / "manifest.json").exists, future, "saves were made")
        nodes.set(c=1, d=1)
        nodes.drain("a", 60.0)
        time.sleep(2.0)
        assert not (root / "begun-2-0").exists()
        nodes.drain("b", 60.0)
    result = future.result()
    assert [(root / f"begun-{number}-0").exists() for number in (1, 2, 3)] == [True, True, False]
    done = [row["step"] for row in rows(result)]
    assert done == list(range(1, len(done) + 1))


@pytest.mark.slow
def test_the_node_of_somebody_else_is_drained(root: Path, nodes: FakeNodes, fit: Fit) -> None:
    """Nothing happens."""
    made = fit(node_functions.moves, last=40)
    with fitting(made, LIMIT_S) as future:
        wait_for(root, "begun-1-0", future)
        nodes.drain("z")
    assert future.result().metrics["step"] == 40
    assert not (root / "begun-2-0").exists()
    assert not list(root.glob("saved-*"))


@pytest.mark.slow
@pytest.mark.skipif(not clock_kit.WORKS, reason="no C compiler")
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_an_hour_off(root: Path, nodes: FakeNodes, fit: Fit, hours: int) -> None:
    """The clock of one node changes nothing: a node dies, and the run ends with what an undisturbed one has."""
    nodes.environments["b"] = clock_kit.environment(root, hours * 3600)
    nodes.options = ("-B",)  # not forked: a library is preloaded
    made = fit(node_functions.clock, failures=1, how="before_the_seal")
    with fitting(made, LIMIT_S) as future:
        wait_for(root, "stopped", future)
        apart = float((root / "clock-1").read_text()) - float((root / "clock-0").read_text())
        assert abs(apart - hours * 3600) < 600
        nodes.agents["a"].kill()
    result = future.result()
    assert [(one["step"], one["total"]) for one in rows(result)] == [(1, 1), (2, 3), (3, 6), (4, 10), (5, 15)]
    assert result.checkpoint is not None
    assert result.checkpoint.verify()
    assert litter(root / "run") == []
