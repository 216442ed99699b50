"""Directories that ranks report from nodes of their own to a run on an object store."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes_kit import FakeNodes
from object_kit import moto_bucket
from process_kit import wait_until
from session_kit import START_ID, Pair, begin, make

import holdfast as hf
from holdfast.errors import CheckpointNotFoundError, StorageError
from holdfast.storage import Storage, resolve
from holdfast.torch import TorchTrainer
from holdfast.trainers.function import trainer as trainer_module
from holdfast.trainers.function.config import CheckpointUploadMode
from holdfast.trainers.function.engines.process_engine import ClusterEngine
from holdfast.trainers.function.handoff import Unfinished, remove_local
from holdfast.trainers.function.worker import delivery
from holdfast.writer.ingest.sources import put_incoming

pytestmark = pytest.mark.usefixtures("all_forked")
SYNC, ASYNC = CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC
HOME = f".incoming-{START_ID}/1-0"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with moto_bucket() as uri:
        yield uri


@pytest.fixture
def root(bucket: str, request: pytest.FixtureRequest) -> Storage:
    return resolve(f"{bucket}/{request.node.name.replace('[', '-').rstrip(']')}")


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNodes]:
    """Two nodes, which every trainer of the test runs on."""
    made = FakeNodes(a=1, b=1)
    monkeypatch.setattr(trainer_module, "_make_engine", lambda _, storage, **more: ClusterEngine(made, storage=storage))
    yield made
    made.close()


def apart(root: Storage, **fields: Any) -> dict[str, Any]:
    """The first message of a driver on another machine."""
    where = {"storage": root.describe(), "uri": root.uri, "name": ""}
    return begin(None, run_root=where, apart=True, **fields)


def fit(root: Storage, function: Any, **failure: Any) -> hf.Result:
    place, _, name = root.uri.rpartition("/")
    return TorchTrainer(
        function,
        scaling_config=hf.ScalingConfig(num_workers=2, engine="ray"),
        run_config=hf.RunConfig(name=name, storage_path=place, failure_config=hf.FailureConfig(**failure)),
    ).fit()


def names(root: Storage) -> set[str]:
    """First parts of all paths."""
    return {info.path.split("/")[0] for info in root.list()}


# -- what a rank does -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delete", [None, True])
def test_the_driver_gets_it_through_the_store(root: Storage, tmp_path: Path, delete: bool | None) -> None:
    """SYNC: the report is entered, then brought; the caller's goes after the commit, if it should."""
    seen, calls = [], []

    def script(controller: Any, header: dict[str, Any]) -> None:
        if header["on"] == "report":
            assert (header["source"], header["coming"]) == ({"path": HOME, "owned": True}, True)
            calls.append(header["call"])
        else:
            assert header == {"on": "part", "index": 1}
            seen.append(root.read(f"{HOME}/000000"))
            controller.answer(calls[0], checkpoint=None)

    with Pair(apart(root), script):
        hf.report({}, make(tmp_path / "mine"), delete_local_checkpoint_after_upload=delete)
    assert seen == [b"weights"]
    assert (tmp_path / "mine").exists() is (delete is None)
    assert {path.name for path in tmp_path.iterdir()} <= {"mine"}


def test_in_the_background(root: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASYNC: the caller's directory is gone at once; the word that it is in the store follows. The end waits for it."""
    monkeypatch.setattr(delivery, "remove_local", lambda path: (time.sleep(0.3), remove_local(path)))

    def script(controller: Any, header: dict[str, Any]) -> None:
        if header["on"] == "part":
            assert root.read(f"{HOME}/000000") == b"weights"
            controller.committed(header["index"])

    with Pair(apart(root), script) as pair:
        hf.report({}, make(tmp_path / "mine"), checkpoint_upload_mode=ASYNC)
        assert not (tmp_path / "mine").exists()
        pair.session.drain()
        (header,) = pair.controller.headers("report")
    assert (header["source"], header["coming"]) == ({"path": HOME, "owned": True}, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_a_store_that_fails(root: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """The driver hears of it, for the other ranks; the caller has his files, and the next report is made as ever."""

    def refuse(*_: Any) -> None:
        raise StorageError("the store is on fire")

    calls, failed = [], []

    def script(controller: Any, header: dict[str, Any]) -> None:
        if header["on"] == "report":
            calls.append(header["call"])
        elif "error" in header:
            failed.append(header["error"]["message"])
        else:
            controller.answer(calls[-1], checkpoint=None)

    with Pair(apart(root), script) as pair:
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.trainers.function.worker.delivery.put_incoming", refuse)
            with pytest.raises(StorageError, match="on fire"):
                hf.report({}, make(tmp_path / "mine"), checkpoint_upload_mode=mode)
                pair.session.drain()
        assert (tmp_path / "mine" / "model.pt").read_bytes() == b"weights"
        hf.report({}, make(tmp_path / "mine"))
    assert failed == ["the store is on fire"]


def test_a_commit_that_fails(root: Storage, tmp_path: Path) -> None:
    """SYNC: the caller has his files back, and nothing of them stays in the store."""

    def script(controller: Any, header: dict[str, Any]) -> None:
        if header["on"] == "report":
            controller.first = header["call"]
        else:
            controller.refuse(controller.first, StorageError("another rank's disk is full"))

    with Pair(apart(root), script), pytest.raises(StorageError, match="disk is full"):
        hf.report({}, make(tmp_path / "mine"), delete_local_checkpoint_after_upload=True)
    assert (tmp_path / "mine" / "model.pt").read_bytes() == b"weights"
    assert list(root.list()) == []


def test_a_commit_that_fails_later(root: Storage, tmp_path: Path) -> None:
    """ASYNC: until the commit nothing of the caller's is deleted, so he has it back, and hears of the failure once."""

    def script(controller: Any, header: dict[str, Any]) -> None:
        if header["on"] == "part":
            controller.trouble(StorageError("another rank's disk is full"), index=header["index"])

    with Pair(apart(root), script) as pair:
        hf.report({}, make(tmp_path / "mine"), checkpoint_upload_mode=ASYNC)
        with pytest.raises(StorageError, match="disk is full"):
            pair.session.drain()
        pair.session.drain()
    assert (tmp_path / "mine" / "model.pt").read_bytes() == b"weights"


def test_both_sides_fail_at_once(root: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller ends a report while this rank still brings it, and fails at that: raised once, put back once."""
    begun, told = threading.Event(), threading.Event()

    def refuse(*_: Any) -> None:
        begun.set()
        assert told.wait(30)
        raise StorageError("our disk is on fire")

    monkeypatch.setattr("holdfast.trainers.function.worker.delivery.put_incoming", refuse)
    with Pair(apart(root), lambda *_: None) as pair:
        hf.report({}, make(tmp_path / "mine"), checkpoint_upload_mode=ASYNC)
        assert begun.wait(30)
        pair.controller.trouble(StorageError("another rank's disk is full"), index=1)
        with pytest.raises(StorageError, match="disk is full"):
            pair.session.drain()
        told.set()
        pair.session.abandon()
        pair.session.drain()
        pair.controller.wait(lambda _: pair.controller.headers("part"))
        assert ["error" in one for one in pair.controller.headers("part")] == [True]  # for the node, which goes on else
    assert (tmp_path / "mine" / "model.pt").read_bytes() == b"weights"


def test_a_report_that_fails_before_it_is_brought(
    root: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node, which reads along, hears that nothing comes of it: a worker that ends well has left it nothing."""
    original, begun, go_on = put_incoming, threading.Event(), threading.Event()

    def wait(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        original(*arguments)

    told: list[Any] = []
    node = Unfinished(lambda *message: told.append(message), told.append, storage=root)

    def script(controller: Any, header: dict[str, Any]) -> None:
        node.note(0, header)
        if header["on"] == "report" and header["index"] == 2:
            controller.trouble(StorageError("another rank's disk is full"), index=2)
        elif header["on"] == "part" and header["index"] == 1:
            controller.committed(1)

    monkeypatch.setattr("holdfast.trainers.function.worker.delivery.put_incoming", wait)
    with Pair(apart(root), script) as pair:
        for name in ("one", "two"):
            hf.report({}, make(tmp_path / name), checkpoint_upload_mode=ASYNC)
        assert begun.wait(30)
        assert wait_until((tmp_path / "two").exists)  # put back
        go_on.set()
        pair.controller.wait(lambda _: len(pair.controller.headers("part")) == 2)
        with pytest.raises(StorageError, match="disk is full"):
            pair.session.drain()
        pair.session.drain()
    node.end(0, finish=True)
    assert not [one for one in threading.enumerate() if one.name == "holdfast-unfinished"]
    assert told == []
    assert (tmp_path / "two" / "model.pt").read_bytes() == b"weights"


def test_uploads_in_the_background_follow_one_another(root: Storage, tmp_path: Path) -> None:
    """Every report is entered at once; the word where its files are comes in the order of the reports."""
    go_on, order = threading.Event(), []

    def script(controller: Any, header: dict[str, Any]) -> None:
        order.append((header["on"], header["index"]))
        if header["on"] == "part":
            controller.committed(header["index"])

    def upload(checkpoint: hf.Checkpoint, name: str) -> hf.Checkpoint:
        assert go_on.wait(30)
        return hf.Checkpoint(f"{root.uri}/{name}")

    with Pair(apart(root), script) as pair:
        hf.report({}, make(tmp_path / "one"), checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)
        hf.report({}, make(tmp_path / "two"), checkpoint_upload_mode=ASYNC)
        pair.controller.wait(lambda _: len(pair.controller.headers("report")) == 2)
        go_on.set()
        pair.session.drain()
    assert order == [("report", 1), ("report", 2), ("part", 1), ("part", 2)]


def test_a_failing_train_function_still_brings_what_it_reported(
    root: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a shared disk, a report that was entered is finished, in bounds."""
    original, slow = put_incoming, threading.Event()

    def take_time(*arguments: Any) -> None:
        slow.wait(0.3)
        original(*arguments)

    monkeypatch.setattr("holdfast.trainers.function.worker.delivery.put_incoming", take_time)
    with Pair(apart(root), lambda *_: None) as pair:
        hf.report({}, make(tmp_path / "mine"), checkpoint_upload_mode=ASYNC)
        pair.session.abandon(30)
        assert wait_until(lambda: pair.controller.headers("part") == [{"on": "part", "index": 1}])
        begun, going, ended = threading.Event(), threading.Event(), threading.Event()

        def hang(*_: Any) -> None:
            begun.set()
            going.wait(30)
            ended.set()

        monkeypatch.setattr("holdfast.trainers.function.worker.delivery.put_incoming", hang)
        hf.report({}, make(tmp_path / "late"), checkpoint_upload_mode=ASYNC)
        assert begun.wait(30)
        pair.session.abandon(0.1)
        assert not ended.is_set()  # it was given up, and not waited for
        going.set()
    assert (tmp_path / "late" / "model.pt").read_bytes() == b"weights"


def test_a_directory_that_is_not_there(root: Storage, tmp_path: Path) -> None:
    with Pair(apart(root)), pytest.raises(CheckpointNotFoundError, match="rank 0: there is no"):
        hf.report({}, hf.Checkpoint.from_directory(tmp_path / "nothing"))


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # nodes that import torch; the test of the kill is in the ordinary suite
def test_directories_become_one_checkpoint(root: Storage, nodes: FakeNodes) -> None:
    """One file of both ranks is stored once, differing ones all; a dictionary comes along; nothing else is left."""

    def train() -> None:
        rank = hf.get_context().get_world_rank()
        for number in range(3):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "same.json").write_text("{}")
                Path(folder, "model.pt").write_bytes(b"%d" % rank * 100_000)
                mode = CheckpointUploadMode.ASYNC if number == 1 else CheckpointUploadMode.SYNC
                hf.report({"n": number}, hf.Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
        hf.report({"n": 3}, hf.Checkpoint.from_dict({"rank": rank}) if rank == 0 else None)

    result = fit(root, train)
    assert [row["n"] for _, row in result.best_checkpoints] == [0, 1, 2, 3]
    assert names(root) - {"logs", "reports", "lease.json", "run.json"} == {
        f"checkpoint_{number:06d}" for number in range(4)
    }
    for checkpoint, _ in result.best_checkpoints[:3]:
        assert checkpoint.verify().ok
        with checkpoint.as_directory() as folder:
            found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        assert found["same.json"] == b"{}"
        assert (found["model.pt"], found["model.rank-1.pt"]) == (b"0" * 100_000, b"1" * 100_000)
        assert "same.rank-1.json" not in found
    assert result.checkpoint is not None
    assert result.checkpoint.to_dict() == {"rank": 0}


def test_a_node_is_killed_while_it_brings_one(root: Storage, nodes: FakeNodes, tmp_path: Path) -> None:
    """The checkpoint before is gone on from; what was in the store of the lost one is swept."""
    mark, folder_of = str(tmp_path / "half"), str(tmp_path)

    def train() -> None:
        from holdfast.trainers.function.worker import delivery

        context = hf.get_context()
        rank, first = context.get_world_rank(), int(context.get_trial_id().rsplit("-", 1)[1]) == 1
        start = 0
        if (checkpoint := hf.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                start = json.loads(Path(folder, "step.json").read_text()) + 1

        def half(storage: Any, home: str, source: Any) -> None:
            storage.put(f"{home}/000000", b"half of it")
            Path(mark).touch()
            time.sleep(600)

        for step in range(start, 3):
            with tempfile.TemporaryDirectory(dir=folder_of) as folder:
                Path(folder, "step.json").write_text(str(step))
                Path(folder, f"rank-{rank}.bin").write_bytes(b"x" * 10_000)
                if first and step == 1 and rank == 1:
                    delivery.put_incoming = half
                hf.report({"step": step, "start": start}, hf.Checkpoint.from_directory(folder))

    def kill() -> None:
        while not os.path.exists(mark):
            time.sleep(0.02)
        nodes.agents["b"].send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    result = fit(root, train, max_failures=1)
    killer.join(10)
    assert list(result.metrics_dataframe["step"]) == [0, 1, 2]
    assert list(result.metrics_dataframe["start"]) == [0, 1, 1]
    assert len(result.attempts) == 2
    assert not [name for name in names(root) if name.startswith(".incoming")]
    for checkpoint, _ in result.best_checkpoints:
        assert checkpoint.verify().ok
        assert {"rank-0.bin", "rank-1.bin", "step.json"} <= {one.path for one in checkpoint.manifest.files}  # type: ignore[union-attr]


def kill_when(mark: Path, kill: Callable[[int], object]) -> threading.Thread:
    """Call ``kill`` with the pid that a worker writes into a file."""

    def work() -> None:
        while not mark.exists():
            time.sleep(0.02)
        kill(int(mark.read_text()))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("how", "starts"), [("worker", [0, 0, 2]), pytest.param("agent", [0, 1, 1], marks=pytest.mark.slow)]
)
def test_a_worker_is_killed_while_it_brings_one_in_the_background(
    root: Storage, nodes: FakeNodes, tmp_path: Path, how: str, starts: list[int]
) -> None:
    """Its node finishes that, and the run goes on from it; if the agent there is dead too, the next worker sweeps it.

    Nothing stays on the disk or in the store either way.
    """
    mark, folder_of = str(tmp_path / "half"), str(tmp_path / "scratch")
    Path(folder_of).mkdir()

    def train() -> None:
        from holdfast.trainers.function.worker import delivery

        context = hf.get_context()
        rank, first = context.get_world_rank(), int(context.get_trial_id().rsplit("-", 1)[1]) == 1
        start = 0
        if (checkpoint := hf.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                start = json.loads(Path(folder, "step.json").read_text()) + 1

        def half(storage: Any, home: str, source: Any) -> None:
            storage.put(f"{home}/000000", b"half of it")
            Path(f"{mark}-part").write_text(str(os.getpid()))
            os.rename(f"{mark}-part", mark)
            time.sleep(600)

        for step in range(start, 3):
            if first and step == 1 and rank == 1:
                delivery.put_incoming = half
            folder = tempfile.mkdtemp(dir=folder_of)
            Path(folder, "step.json").write_text(str(step))
            Path(folder, f"rank-{rank}.bin").write_bytes(b"x" * 10_000)
            mode = CheckpointUploadMode.ASYNC if step == 1 else CheckpointUploadMode.SYNC
            wanted = {"checkpoint_upload_mode": mode, "delete_local_checkpoint_after_upload": True}
            hf.report({"step": step, "start": start}, hf.Checkpoint.from_directory(folder), **wanted)
            if first and step == 1:
                time.sleep(600)

    def kill(pid: int) -> None:
        os.kill(pid if how == "worker" else nodes.agents["b"].pid, signal.SIGKILL)

    killer = kill_when(Path(mark), kill)
    result = fit(root, train, max_failures=1)
    killer.join(10)
    assert list(result.metrics_dataframe["step"]) == [0, 1, 2]
    assert list(result.metrics_dataframe["start"]) == starts
    assert len(result.attempts) == 2
    assert os.listdir(folder_of) == []
    assert not [name for name in names(root) if name.startswith(".incoming")]
    assert len(result.best_checkpoints) == 3
    for checkpoint, row in result.best_checkpoints:
        assert checkpoint.verify().ok
        with checkpoint.as_directory() as folder:
            assert json.loads(Path(folder, "step.json").read_text()) == row["step"]
    if how == "agent":
        logs = b"".join(root.read(f"logs/attempt-00002/rank-{rank}.log") for rank in range(2))
        assert b"rank 1 of an earlier start has reported it (report 2), and died before" in logs


@pytest.mark.parametrize("engine", [pytest.param("ray", marks=pytest.mark.slow), "local"])
def test_a_worker_is_killed_with_a_share_on_the_disk(
    root: Storage, tmp_path: Path, request: pytest.FixtureRequest, engine: str
) -> None:
    """``RunConfig(local_dir=...)``: its node brings the share, and the run goes on from that save; no disk has any."""
    mark = str(tmp_path / "staged")
    if engine == "ray":
        request.getfixturevalue("nodes")

    def train() -> None:
        from holdfast.trainers.function import handoff

        context = hf.get_context()
        rank, first = context.get_world_rank(), int(context.get_trial_id().rsplit("-", 1)[1]) == 1
        start = 0
        if (checkpoint := hf.get_checkpoint()) is not None:
            start = hf.load(checkpoint)["step"] + 1

        def hang(*_: Any, **__: Any) -> None:
            Path(f"{mark}-part").write_text(str(os.getpid()))
            os.rename(f"{mark}-part", mark)
            time.sleep(600)

        for step in range(start, 3):
            hf.get_all_reported_checkpoints("committed")  # all of the step before is brought
            if first and step == 1 and rank == 1:
                handoff.bring_share = hang
            hf.report({"step": step, "start": start}, state={"weights": [float(step)] * 100, "step": step})
            if first and step == 1:
                time.sleep(600)

    killer = kill_when(Path(mark), lambda pid: os.kill(pid, signal.SIGKILL))
    place, _, name = root.uri.rpartition("/")
    result = TorchTrainer(
        train,
        scaling_config=hf.ScalingConfig(num_workers=2, engine=engine),  # type: ignore[arg-type]
        run_config=hf.RunConfig(
            name=name,
            storage_path=place,
            local_dir=tmp_path / "disk",
            failure_config=hf.FailureConfig(max_failures=1),
        ),
    ).fit()
    killer.join(10)
    assert list(result.metrics_dataframe["step"]) == [0, 1, 2]
    assert list(result.metrics_dataframe["start"]) == [0, 0, 2]
    assert len(result.attempts) == 2
    for step, (checkpoint, _) in enumerate(result.best_checkpoints):
        assert checkpoint.verify().ok
        assert hf.load(checkpoint)["step"] == step
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_states_go_over_the_disks_of_nodes(root: Storage, nodes: FakeNodes, tmp_path: Path) -> None:
    """``RunConfig(local_dir=...)``: all checkpoints are in the store when fit() returns, and load; no disk has any."""

    def train() -> None:
        import torch

        for step in range(3):
            hf.report({"step": step}, state={"weights": torch.full((5000,), float(step)), "step": step})

    place, _, name = root.uri.rpartition("/")
    result = TorchTrainer(
        train,
        scaling_config=hf.ScalingConfig(num_workers=2, engine="ray"),
        run_config=hf.RunConfig(name=name, storage_path=place, local_dir=tmp_path / "disk"),
    ).fit()
    for step, (checkpoint, _) in enumerate(result.best_checkpoints):
        assert checkpoint.verify().ok
        loaded = hf.load(checkpoint)
        assert (loaded["step"], float(loaded["weights"].sum())) == (step, 5000.0 * step)
    assert len(result.best_checkpoints) == 3
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    assert names(root) == {
        "checkpoint_000000",
        "checkpoint_000001",
        "checkpoint_000002",
        "logs",
        "reports",
        "lease.json",
        "run.json",
    }
