"""A worker's session against a controller that follows a script: metrics, arguments, and the end."""

from __future__ import annotations

import contextlib
import math
import os
import threading

import pytest
import torch
from session_kit import Pair, begin, begin_on, make, silent

import holdfast as hf
from holdfast.errors import CheckpointNotFoundError, ConfigError, SessionError
from holdfast.trainers.function.config import CheckpointUploadMode

SYNC, ASYNC, NO_UPLOAD = CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC, CheckpointUploadMode.NO_UPLOAD


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_metrics_arrive_in_order_without_loss(root):
    """A thousand reports in a row, with one that brings a checkpoint in their midst, in the order of the calls."""
    with Pair(begin(root)) as pair:
        for number in range(1, 500):
            hf.report({"loss": number})
        hf.report({"loss": 500}, make(root.parent / "mine"))
        for number in range(501, 1001):
            hf.report({"loss": number})
        pair.session.drain()
        rows = pair.controller.wait(lambda _: len(pair.controller.rows()) == 1000 and pair.controller.rows())
        assert rows == [(number, {"loss": number}) for number in range(1, 1001)]
        assert len(pair.controller.heard) < 200


def test_an_option_that_there_is_not_is_refused_without_data_too(root):
    """A callback that misspells one hears of it at its first report, not at its first checkpoint."""
    with Pair(begin(root)) as pair:
        with pytest.raises(TypeError, match="'checkpoint_uplod_mode'"):
            pair.session.report({"loss": 1}, checkpoint_uplod_mode=hf.CheckpointUploadMode.ASYNC)
        pair.session.report({"loss": 1}, checkpoint_upload_mode=hf.CheckpointUploadMode.ASYNC)
        pair.session.drain()
        assert pair.controller.wait(lambda _: pair.controller.rows()) == [(1, {"loss": 1})]


def test_other_ranks_only_count(root):
    """Their metrics are checked, but not sent."""
    with Pair(begin(root, rank=1, world_size=2)) as pair:
        for number in range(10):
            hf.report({"loss": number})
        with pytest.raises(ConfigError, match="'bad'"):
            hf.report({"bad": torch.zeros(2)})
        hf.report({"loss": 10}, make(root.parent / "mine"))
        pair.controller.wait(lambda _: pair.controller.headers("report"))
        assert pair.controller.headers("rows") == []
        assert pair.controller.headers("count")[-1]["upto"] == 11
        assert pair.controller.headers("report")[0] | {"time": 0} == {
            "on": "report", "index": 12, "kind": "directory", "call": 1, "metrics": None, "time": 0, "name": None,
            "validation": False, "source": {"path": str(root.parent / "mine"), "owned": False},
        }  # fmt: skip


def test_reports_go_on_after_a_restart(root):
    """The controller says which number is next."""
    with Pair(begin(root, first_index=41)) as pair:
        hf.report({"loss": 1})
        assert pair.controller.wait(lambda _: pair.controller.rows()) == [(41, {"loss": 1})]


def test_what_counts_as_a_metric(root):
    """Tensors, NaN and nesting arrive as numbers; the time of the call is with them."""
    with Pair(begin(root)) as pair:
        hf.report({"loss": torch.tensor(0.5), "val": {"acc": torch.tensor([3])}, "nan": float("nan")})
        rows = pair.controller.wait(lambda _: pair.controller.rows())
        nan = rows[0][1].pop("nan")
        assert math.isnan(nan)
        assert rows == [(1, {"loss": 0.5, "val": {"acc": 3}})]
        assert pair.controller.headers()[0]["rows"][0]["time"] > 1e9


def test_a_report_that_raises_counts_and_fails_for_all(root):
    """Else a rank that goes on after the error would give its next files to a report of others that came before."""
    with Pair(begin(root)) as pair:
        with pytest.raises(ConfigError, match="'model'"):
            hf.report({"model": torch.nn.Linear(1, 1)})
        with pytest.raises(ConfigError, match="'model'"):
            hf.report({"model": torch.nn.Linear(1, 1)}, make(root.parent / "mine"))
        with pytest.raises(CheckpointNotFoundError, match="rank 0"):
            hf.report({"loss": 3}, hf.Checkpoint(root / "missing"))
        hf.report({"loss": 4})
        rows = pair.controller.wait(lambda _: len(pair.controller.rows()) == 2 and pair.controller.rows())
        assert rows == [(3, {"loss": 3}), (4, {"loss": 4})]
        told = [(one["on"], one.get("index") or one.get("upto") or one["first"]) for one in pair.controller.headers()]
        # The failure comes first: what all ranks have entered is committed.
        assert told[:5] == [("count", 1), ("part", 2), ("count", 2), ("part", 3), ("rows", 3)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_score_is_checked_where_it_counts(root, rank):
    """A string cannot rank: rank 0 hears at the call; metrics without a checkpoint rank nothing."""
    told = begin(root, rank=rank, world_size=2, score={"attribute": "val/acc", "order": "max"})
    with Pair(told):
        hf.report({"val": {"acc": "good"}})
        expected = pytest.raises(ConfigError, match="'val/acc' is 'good'") if rank == 0 else contextlib.nullcontext()
        with expected:
            hf.report({"val": {"acc": "good"}}, make(root.parent / "mine"))
        hf.report({"other": 1}, make(root.parent / "mine"))
        hf.report({"val": {"acc": float("nan")}}, make(root.parent / "mine"))


def test_reports_of_several_threads_are_numbered_one_after_another(root):
    """Any thread may report; nothing is lost and no number comes twice."""
    with Pair(begin(root)) as pair:

        def report(base):
            for number in range(200):
                hf.report({"value": base + number})

        threads = [threading.Thread(target=report, args=(base,)) for base in (0, 1000, 2000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hf.get_checkpoint()
        rows = pair.controller.rows()
        assert [number for number, _ in rows] == list(range(1, 601))
        assert len({metrics["value"] for _, metrics in rows}) == 600


def test_a_thread_may_report_while_another_waits_for_its_commit(root):
    """SYNC holds its caller, not everybody."""
    with Pair(begin(root), silent) as pair:
        thread = threading.Thread(target=hf.report, args=({}, make(root.parent / "mine")))
        thread.start()
        report = pair.controller.wait(lambda _: pair.controller.headers("report"))[0]
        hf.report({"loss": 2})
        pair.controller.wait(lambda _: len(pair.controller.rows()) == 2)
        assert thread.is_alive()
        pair.controller.answer(report["call"], checkpoint=None)
        thread.join(20)
        assert not thread.is_alive()


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"checkpoint": "/some/path"}, r"checkpoint='/some/path'.*Checkpoint\.from_directory"),
        ({"state": [1]}, "state="),
        ({"state": {}, "checkpoint": True}, "both checkpoint= and state="),
        ({"checkpoint": True, "checkpoint_upload_mode": "ASYNC"}, "CheckpointUploadMode.SYNC"),
        ({"checkpoint": True, "checkpoint_upload_fn": 3}, "checkpoint_upload_fn=3"),
        ({"checkpoint": True, "delete_local_checkpoint_after_upload": 1}, "True, False or None"),
        ({"checkpoint": True, "checkpoint_upload_fn": print, "checkpoint_upload_mode": NO_UPLOAD}, "SYNC or ASYNC"),
        ({"state": {}, "checkpoint_upload_mode": NO_UPLOAD}, "stores the state itself"),
        ({"checkpoint": True, "checkpoint_dir_name": "a/b"}, "checkpoint_dir_name='a/b'"),
        ({"checkpoint": True, "checkpoint_dir_name": ".hidden"}, "checkpoint_dir_name='.hidden'"),
        ({"checkpoint": True, "checkpoint_dir_name": "logs"}, "checkpoint_dir_name='logs'"),
        ({"checkpoint": True, "checkpoint_dir_name": ""}, "checkpoint_dir_name=''"),
        ({"checkpoint": True, "validation": "yes"}, "validation='yes'"),
        (
            {"checkpoint": True, "validation": {"top": 3, "timeout_s": 2}},
            "timeout_s beside top can be meant in",
        ),
        ({"checkpoint": True, "validation": {"top": object()}}, "arguments of the function are stored with the checkp"),
        ({"validation": True}, "without a checkpoint"),
        ({"checkpoint": True, "validation": {"fn": print}}, "'fn'"),
    ],
)
def test_wrong_arguments_are_named(root, options, match):
    """Nothing but that has been told to anybody then."""
    with Pair(begin(root)) as pair:
        if options.get("checkpoint") is True:
            options = {**options, "checkpoint": make(root.parent / "mine")}
        with pytest.raises(ConfigError, match=match):
            hf.report({}, **options)
        pair.controller.wait(lambda heard: [one["on"] for one in heard] == ["part", "count"])


def test_name_and_validation_are_passed_on(root):
    """As they were given; without a checkpoint, other ranks may ask for validation in vain."""
    with Pair(begin(root)) as pair:
        hf.report({}, make(root.parent / "mine"), checkpoint_dir_name="best", validation=True)
        hf.report({}, make(root.parent / "mine"), validation={"num_batches": 3})
        told = [(one["name"], one["validation"]) for one in pair.controller.headers("report")]
        arguments = {"fn_kwargs": {"num_batches": 3}, "timeout_s": None}
        assert told == [("best", True), (None, arguments)]
        hf.report({}, make(root.parent / "mine"), validation=hf.ValidationTaskConfig(timeout_s=2.0))
        assert pair.controller.headers("report")[-1]["validation"] == {"fn_kwargs": {}, "timeout_s": 2.0}
    with Pair(begin(root, rank=1, world_size=2)) as pair:
        hf.report({}, validation=True)
        pair.controller.wait(lambda heard: heard == [{"on": "count", "upto": 1}])


# -- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("report", lambda: hf.report({})),
        ("get_checkpoint", hf.get_checkpoint),
        ("get_context", hf.get_context),
        ("get_all_reported_checkpoints", hf.get_all_reported_checkpoints),
        ("save_checkpoint", lambda: hf.save_checkpoint(a=1)),
        ("load_checkpoint", hf.load_checkpoint),
    ],
)
def test_outside_of_a_worker(root, name, call):
    """Before and after a session: the error names the function and what to use instead."""
    with Pair(begin(root)):
        pass
    with pytest.raises(SessionError, match=rf"holdfast\.{name}\(\) was called outside of train_func.*ray_tune"):
        call()


def test_a_closed_session_takes_nothing(root):
    """Somebody kept the object."""
    with Pair(begin(root)) as pair:
        pass
    with pytest.raises(SessionError, match="this session is over"):
        pair.session.report({})


def test_no_thread_is_left(root):
    """`close` ends all of them, twice is fine."""
    before = set(threading.enumerate())
    with Pair(begin(root)) as pair:
        mine = make(root.parent / "mine")
        upload = {"checkpoint_upload_fn": lambda _, name: make(root / name), "checkpoint_upload_mode": ASYNC}
        hf.report({}, mine, **upload)
        pair.session.drain()
        pair.session.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread


def test_the_end_of_the_driver_ends_the_worker(root):
    """Whoever waits is released, and in a real worker the process is gone by then."""
    with Pair(begin(root), lambda controller, _: controller.channel.close()) as pair:
        with pytest.raises(SessionError, match="the driver of this run is gone"):
            hf.report({}, make(root.parent / "mine"), delete_local_checkpoint_after_upload=True)
        assert pair.gone.wait(20)
        with pytest.raises(SessionError):
            hf.get_all_reported_checkpoints()
        # The driver's writer may be at work on it: nothing is taken back.
        assert not (root.parent / "mine").exists()


def test_a_worker_without_its_driver_exits_at_once(root):
    """In a process of its own, in the middle of training, without anybody calling anything."""
    import socket

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        theirs.close()
        begin_on(ours, begin(root))
        threading.Event().wait(60)
        os._exit(99)
    ours.close()
    theirs.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_forked_child_is_no_worker(root):
    """A worker of a DataLoader reports nothing, and does not keep the channel open after its parent."""
    with Pair(begin(root)) as pair:
        pid = os.fork()
        if pid == 0:
            try:
                hf.report({})
            except SessionError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        hf.report({"loss": 1})
        assert pair.controller.wait(lambda _: pair.controller.rows()) == [(1, {"loss": 1})]


def test_abandon_sends_what_is_ready(root):
    """train_func has raised: uploads in the background end, metrics go out, and nothing raises."""

    def upload(_, name):
        return make(root / name)

    with Pair(begin(root), silent) as pair:
        mine = make(root.parent / "mine")
        hf.report({"n": 1}, mine, checkpoint_upload_fn=upload, checkpoint_upload_mode=ASYNC)
        hf.report({"n": 2})
        pair.session.abandon(20)
        pair.controller.wait(lambda _: len(pair.controller.rows()) == 2)


def test_abandon_is_bounded(root):
    """An upload that never ends does not keep a failed worker alive."""
    go, ended = threading.Event(), threading.Event()

    def upload(_, name):
        go.wait(200)
        ended.set()
        return make(root / name)

    with Pair(begin(root), silent) as pair:
        mine = make(root.parent / "mine")
        hf.report({"n": 1}, mine, checkpoint_upload_fn=upload, checkpoint_upload_mode=ASYNC)
        pair.session.abandon(0.05)
        assert not ended.is_set()  # it was given up, and not waited for
        go.set()
