"""What a worker asks: the newest checkpoint, all of them, and who it is."""

from __future__ import annotations

import threading

import pytest
from session_kit import Pair, begin, make, silent

import holdfast as hf
from holdfast.errors import ConfigError
from holdfast.trainers.function.config import CheckpointUploadMode, ReportedCheckpointStatus

SYNC, ASYNC, NO_UPLOAD = CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC, CheckpointUploadMode.NO_UPLOAD


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_get_checkpoint_at_the_start_asks_nobody(root):
    """All ranks were told the same."""
    hf.save(root / "checkpoint_000004", {"a": 1})
    told = {"storage": hf.Checkpoint(root / "checkpoint_000004").storage.describe(), "uri": str(root)}
    with Pair(begin(root, checkpoint={**told, "name": "checkpoint_000004"}), silent) as pair:
        assert hf.get_checkpoint() == hf.Checkpoint(root / "checkpoint_000004")
        assert hf.get_checkpoint().load() == {"a": 1}
        assert hf.load_checkpoint() == {"a": 1}
        assert pair.controller.heard == []
    with Pair(begin(root), silent):
        assert hf.get_checkpoint() is None
        assert hf.load_checkpoint() is None


def test_get_checkpoint_later_asks_with_the_number_of_reports(root):
    """So that all ranks get the same, whatever is committed meanwhile."""

    def script(controller, header):
        if header["on"] == "ask":
            assert (header["what"], header["upto"]) == ("checkpoint", 2)
            where = begin(root)["run_root"]
            controller.answer(header["call"], checkpoint={**where, "name": "checkpoint_000000"})

    with Pair(begin(root), script):
        hf.report({})
        hf.report({})
        assert hf.get_checkpoint() == hf.Checkpoint(root / "checkpoint_000000")


def test_get_checkpoint_during_an_upload_in_the_background(root):
    """The question does not wait for the upload; what to do about it is the controller's business."""
    go = threading.Event()

    def upload(_, name):
        assert go.wait(20)
        return make(root / name)

    with Pair(begin(root)) as pair:
        hf.report({}, make(root.parent / "mine"), checkpoint_upload_fn=upload, checkpoint_upload_mode=ASYNC)
        assert hf.get_checkpoint() is None
        assert [one["on"] for one in pair.controller.headers()] == ["report", "ask"]
        go.set()
        pair.session.drain()


def test_a_checkpoint_in_the_drivers_memory_is_out_of_reach(root):
    """An error that says so beats a place that looks empty."""
    where = {"storage": None, "uri": "memory://elsewhere", "name": "mine"}
    with Pair(begin(root, checkpoint=where)), pytest.raises(ConfigError, match="lives in the memory of the driver"):
        hf.get_checkpoint()


def test_all_reported_checkpoints(root):
    """With metrics and status; modes and time-outs are passed on."""

    def script(controller, header):
        if header["on"] != "ask":
            return
        where = {**begin(root)["run_root"], "name": "checkpoint_000000"}
        row = {"checkpoint": where, "metrics": {"acc": 1}, "status": "PENDING_VALIDATION"}
        controller.answer(header["call"], checkpoints=[row])

    with Pair(begin(root), script) as pair:
        hf.report({})
        (one,) = hf.get_all_reported_checkpoints()
        assert one.checkpoint == hf.Checkpoint(root / "checkpoint_000000")
        assert one.metrics == {"acc": 1}
        assert one.status is ReportedCheckpointStatus.PENDING_VALIDATION
        hf.get_all_reported_checkpoints("committed", timeout_s=3)
        asks = [{k: v for k, v in one.items() if k not in ("on", "call")} for one in pair.controller.headers("ask")]
        assert asks == [
            {"what": "all", "mode": "validated", "upto": 1, "timeout_s": None},
            {"what": "all", "mode": "committed", "upto": 1, "timeout_s": 3},
        ]
        with pytest.raises(ConfigError, match="consistency_mode='now'"):
            hf.get_all_reported_checkpoints("now")
        with pytest.raises(ConfigError, match="timeout_s=-1"):
            hf.get_all_reported_checkpoints(timeout_s=-1)


def test_the_context(root):
    """Everything Ray's has, and the trial functions answer with the run."""
    told = begin(root, rank=3, world_size=8, local_rank=1, local_world_size=2, node_rank=1, attempt=2)
    with Pair(told):
        context = hf.get_context()
        assert context.get_world_rank() == 3
        assert context.get_world_size() == 8
        assert context.get_local_rank() == 1
        assert context.get_local_world_size() == 2
        assert context.get_node_rank() == 1
        assert context.get_experiment_name() == "exp"
        assert context.get_trial_name() == "exp"
        assert context.get_trial_id() == "exp-00002"
        assert context.get_trial_dir() == str(root)
        assert context.get_trial_resources() == {"num_workers": 8}
        storage = context.get_storage()
        assert storage.experiment_fs_path == str(root)
        assert storage.storage_fs_path == str(root.parent)
        assert storage.experiment_dir_name == "exp"
        path = storage.build_checkpoint_path_from_name("mine")
        assert hf.Checkpoint(path, storage.storage_filesystem) == hf.Checkpoint(root / "mine")
        with pytest.raises(ConfigError):
            storage.build_checkpoint_path_from_name("a/b")
        with pytest.warns(DeprecationWarning, match="train_loop_config"):
            assert context.get_metadata() == {}
    with Pair(begin(None)):
        assert hf.get_context().get_storage().storage_filesystem is None
        assert hf.get_context().get_trial_dir() == "elsewhere/run"
