"""Reports of directories: when they return, what becomes of the files, and uploads by the user's own function."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
from session_kit import START_ID, Pair, agreeable, begin, make, silent, trouble_at_a_question

import holdfast as hf
from holdfast.errors import ConfigError, HoldfastError, StorageFullError
from holdfast.trainers.function.config import CheckpointUploadMode
from holdfast.trainers.function.worker import delivery

SYNC, ASYNC, NO_UPLOAD = CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC, CheckpointUploadMode.NO_UPLOAD


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_sync_returns_after_the_commit(root):
    """And not before: the controller has it in its hands."""
    order = []

    def script(controller, header):
        order.append("asked")
        controller.answer(header["call"], checkpoint=None)

    with Pair(begin(root), script):
        hf.report({"loss": 1}, make(root.parent / "mine"))
        order.append("returned")
    assert order == ["asked", "returned"]
    assert (root.parent / "mine" / "model.pt").read_bytes() == b"weights"


def test_sync_with_deletion(root):
    """The directory is handed over; what the writer leaves of it is the writer's business."""

    def script(controller, header):
        assert header["source"] == {"path": str(root / f".incoming-{START_ID}" / "1-0"), "owned": True}
        controller.answer(header["call"], checkpoint=None)

    with Pair(begin(root), script):
        hf.report({}, make(root.parent / "mine"), delete_local_checkpoint_after_upload=True)
    assert not (root.parent / "mine").exists()


def test_a_failed_sync_report_raises_what_happened_and_leaves_the_files(root):
    """The error arrives as itself with the driver's traceback; the directory is back in its place."""

    def script(controller, header):
        controller.refuse(header["call"], StorageFullError("no space left for checkpoint_000000"))

    with Pair(begin(root), script):
        for delete in (None, True):
            with pytest.raises(StorageFullError, match="no space left") as caught:
                hf.report({}, make(root.parent / "mine"), delete_local_checkpoint_after_upload=delete)
            assert "StorageFullError" in str(caught.value.__cause__)
            assert (root.parent / "mine" / "model.pt").read_bytes() == b"weights"


def test_async_inside_a_temporary_directory(root):
    """The usual way to write a checkpoint: the context deletes its directory right after the call."""
    with Pair(begin(root), silent) as pair:
        for number in range(3):
            with tempfile.TemporaryDirectory(dir=root.parent) as folder:
                make(Path(folder), b"%d" % number)
                hf.report({"n": number}, hf.Checkpoint.from_directory(folder), checkpoint_upload_mode=ASYNC)
            assert not Path(folder).exists()
        reports = pair.controller.wait(lambda _: (found := pair.controller.headers("report"))[2:] and found)
        for number, header in enumerate(reports):
            assert header["call"] is None
            assert (Path(header["source"]["path"]) / "model.pt").read_bytes() == b"%d" % number
            pair.controller.committed(header["index"])
        pair.session.drain()


def test_async_without_deletion_returns_when_the_files_are_safe(root, monkeypatch):
    """Where nothing can be cloned that is after the copy: until then the caller may not touch them."""
    from holdfast.trainers.function import handoff

    monkeypatch.setattr(handoff, "clone_tree", lambda *_: False)
    options = {"checkpoint_upload_mode": ASYNC, "delete_local_checkpoint_after_upload": False}
    with Pair(begin(root)) as pair:
        hf.report({}, make(root.parent / "mine"), **options)
        header = pair.controller.headers("report")[0]
        assert header["call"] is not None
        assert header["source"] == {"path": str(root.parent / "mine"), "owned": False}
        assert (root.parent / "mine").exists()


def test_drain_waits_for_background_commits(root):
    """train_func has returned; what it reported is not committed yet."""
    with Pair(begin(root), silent) as pair:
        hf.report({}, make(root.parent / "mine"), checkpoint_upload_mode=ASYNC)
        drained = threading.Event()

        def drain():
            pair.session.drain()
            drained.set()

        thread = threading.Thread(target=drain)
        thread.start()
        pair.controller.wait(lambda _: pair.controller.headers("report"))
        assert not drained.wait(0.05)
        pair.controller.committed(1)
        assert drained.wait(20)
        thread.join()


def test_what_a_report_in_the_background_took_comes_back_when_it_fails(root):
    """Before anybody hears of the failure; what is committed stays taken."""
    with Pair(begin(root), trouble_at_a_question(1)) as pair:
        first, second = make(root.parent / "first"), make(root.parent / "second")
        hf.report({}, first, checkpoint_upload_mode=ASYNC)
        hf.get_all_reported_checkpoints()
        assert (root.parent / "first" / "model.pt").read_bytes() == b"weights"
        with pytest.raises(StorageFullError):
            hf.report({}, second, checkpoint_upload_mode=ASYNC)
        hf.report({}, second, checkpoint_upload_mode=ASYNC)
        pair.session.drain()
        assert not (root.parent / "second").exists()


@pytest.mark.parametrize("where", ["call", "end"])
def test_trouble_in_the_background_surfaces_once(root, where):
    """At the next call of any function, or at the end of train_func if there is none."""

    def script(controller, header):
        if header["on"] == "report" and header["call"] is None:
            controller.trouble(StorageFullError("no space left"), index=header["index"])
        else:
            agreeable(controller, header)

    with Pair(begin(root), trouble_at_a_question(1) if where == "call" else script) as pair:
        hf.report({}, make(root.parent / "mine"), checkpoint_upload_mode=ASYNC)
        if where == "call":
            hf.get_all_reported_checkpoints()
            with pytest.raises(StorageFullError, match="no space left"):
                hf.report({"loss": 2})
            hf.report({"loss": 3})
            # Whoever goes on after the error has still reported as often as the other ranks.
            pair.controller.wait(lambda _: [metrics for _, metrics in pair.controller.rows()][1:] == [
                {"loss": 2}, {"loss": 3}
            ])  # fmt: skip
        else:
            with pytest.raises(StorageFullError, match="no space left"):
                pair.session.drain()
        pair.session.drain()


@pytest.mark.parametrize("call", ["directory", "values"])
def test_trouble_stops_a_report_with_data_but_not_the_counting(root, call):
    """The error comes in place of the new checkpoint: its report counts, and is one without on all ranks."""
    with Pair(begin(root, first_index=2), trouble_at_a_question(1)) as pair:
        hf.get_all_reported_checkpoints()
        with pytest.raises(StorageFullError, match="no space left"):
            if call == "directory":
                hf.report({"loss": 1}, make(root.parent / "mine"), checkpoint_upload_mode=ASYNC)
            else:
                hf.save_checkpoint(epoch=1)
        (row,) = pair.controller.wait(lambda _: pair.controller.rows())
        assert row == (2, {"loss": 1} if call == "directory" else {})
        assert [(one["index"], one["root"]) for one in pair.controller.headers("part")] == [(2, 1)]
        pair.controller.trouble(StorageFullError("no space left"), index=3, root=1)  # of another rank, which raised it
        hf.get_all_reported_checkpoints()
        hf.report({})
        assert not list(root.iterdir())


def test_a_dictionary_checkpoint(root):
    """It lives in this worker's memory: it is written into the run and handed over, under ASYNC in the background."""
    loaded = []

    def script(controller, header):
        if (source := header.get("source")) is not None:
            assert source["owned"]
            loaded.append((header["on"], hf.load(source["path"])))
        agreeable(controller, header)

    with Pair(begin(root), script) as pair:
        for mode in (SYNC, ASYNC):
            hf.report({}, hf.Checkpoint.from_dict({"epoch": 3, "name": "a"}), checkpoint_upload_mode=mode)
        pair.session.drain()
        assert [one["call"] is None for one in pair.controller.headers("report")] == [False, True]
    assert loaded == [(on, {"epoch": 3, "name": "a"}) for on in ("report", "part")]


def test_a_dictionary_checkpoint_with_a_run_elsewhere():
    """Without a directory of the run it goes to a temporary one."""

    def script(controller, header):
        assert hf.load(header["source"]["path"]) == {"epoch": 3}
        agreeable(controller, header)

    with Pair(begin(None), script):
        hf.report({}, hf.Checkpoint.from_dict({"epoch": 3}))


# -- uploads --------------------------------------------------------------------------------------------------------


def test_no_upload(root):
    """The files are where they belong: only their place is told, and they are never deleted."""
    with Pair(begin(root)) as pair:
        path = hf.get_context().get_storage().build_checkpoint_path_from_name("mine")
        make(Path(path))
        hf.report({}, hf.Checkpoint(path), checkpoint_upload_mode=NO_UPLOAD, delete_local_checkpoint_after_upload=True)
        header = pair.controller.headers("report")[0]
        assert header["kind"] == "uploaded"
        assert header["location"]["name"] == "mine"
        assert header["location"]["uri"] == str(root)
        assert Path(path).exists()
        with pytest.raises(ConfigError, match="is no place in this run"):
            hf.report({}, make(root.parent / "other"), checkpoint_upload_mode=NO_UPLOAD)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_an_upload_by_the_users_function(root, mode):
    """It gets the checkpoint and a name that all ranks share, and says where it has put the files."""
    asked = []

    def upload(checkpoint, name):
        asked.append((checkpoint, name, threading.current_thread() is threading.main_thread()))
        return make(root / name)

    with Pair(begin(root)) as pair:
        checkpoint = make(root.parent / "mine")
        hf.report({}, checkpoint, checkpoint_upload_fn=upload, checkpoint_upload_mode=mode, checkpoint_dir_name="best")
        hf.report({}, make(root.parent / "two"), checkpoint_upload_fn=upload, checkpoint_upload_mode=mode)
        pair.session.drain()
        assert asked == [
            (checkpoint, "best", mode is SYNC),
            (hf.Checkpoint(root.parent / "two"), f"checkpoint_000002-{START_ID}", mode is SYNC),
        ]
        told = [(one["on"], one["location"]["name"]) for one in pair.controller.headers() if "location" in one]
        on = "report" if mode is SYNC else "part"
        assert told == [(on, "best"), (on, f"checkpoint_000002-{START_ID}")]
        assert [one["kind"] for one in pair.controller.headers("report")] == ["uploaded"] * 2
        # Ray's rule: ASYNC deletes the local directory afterwards, SYNC does not.
        assert (root.parent / "mine").exists() is (mode is SYNC)


def test_reports_after_an_upload_in_the_background_do_not_wait_for_it(root):
    """The report is entered at once, so the controller hears every number in turn, and what comes after it too."""
    go = threading.Event()

    def upload(_, name):
        assert go.wait(20)
        return make(root / name)

    with Pair(begin(root)) as pair:
        hf.report({"n": 1})
        mine = make(root.parent / "mine")
        hf.report({"n": 2}, mine, checkpoint_upload_fn=upload, checkpoint_upload_mode=ASYNC)
        hf.report({"n": 3})
        rows = pair.controller.wait(lambda _: len(pair.controller.rows()) == 3 and pair.controller.rows())
        assert [number for number, _ in rows] == [1, 2, 3]
        go.set()
        pair.session.drain()


@pytest.mark.parametrize("mine", [False, True], ids=["our copy", "the user's function"])
def test_a_worker_says_that_a_storage_is_at_work(root, monkeypatch, mine):
    """Of a copy that takes long; a function of the user is silent, as anything in train_func that may hang."""
    go, download = threading.Event(), delivery._download

    def slow(*args):
        assert go.wait(20)
        return download(*args)

    def upload(_, name):
        assert go.wait(20)
        return make(root / name)

    monkeypatch.setattr(delivery, "_download", slow)
    with Pair(begin(root, beat_s=0.02)) as pair:
        options = {"checkpoint_upload_fn": upload} if mine else {}
        checkpoint = make(root.parent / "mine") if mine else hf.Checkpoint.from_dict({"a": 1})
        hf.report({}, checkpoint, checkpoint_upload_mode=ASYNC, **options)
        if mine:
            threading.Event().wait(0.2)
            assert pair.controller.headers("storing") == []
        else:
            pair.controller.wait(lambda _: len(pair.controller.headers("storing")) > 2)
        go.set()
        pair.session.drain()


def test_an_upload_that_hangs_is_given_up(root, monkeypatch):
    """Its report fails, by a name for everything; those behind it, and the end, do not wait for it."""
    monkeypatch.setattr(delivery, "_UPLOAD_S", 0.1)
    go = threading.Event()

    def upload(_, name):
        if "000001" in name:
            go.wait(20)
        return make(root / name)

    options = {"checkpoint_upload_fn": upload, "checkpoint_upload_mode": ASYNC}
    with Pair(begin(root, report_timeout_s=0.5)) as pair:
        hf.report({}, make(root.parent / "mine"), **options)
        hf.report({}, make(root.parent / "two"), **options)
        with pytest.raises(HoldfastError, match=r"rank 0: checkpoint_upload_fn has not returned.*report 1 is given up"):
            pair.session.drain()
        pair.session.drain()
        assert [("error" in one, one["index"]) for one in pair.controller.headers("part")] == [(True, 1), (False, 2)]
        go.set()


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_an_upload_that_returns_no_checkpoint(root, mode):
    """The error says what it should have been; under ASYNC the other ranks hear of it, and the next call raises it."""
    with Pair(begin(root)) as pair:
        options = {"checkpoint_upload_fn": lambda *_: "somewhere", "checkpoint_upload_mode": mode}
        if mode is SYNC:
            with pytest.raises(ConfigError, match="returned 'somewhere', not a Checkpoint"):
                hf.report({}, make(root.parent / "mine"), **options)
            assert pair.controller.headers("report") == []
            return
        hf.report({}, make(root.parent / "mine"), **options)
        with pytest.raises(ConfigError, match="returned 'somewhere', not a Checkpoint"):
            pair.session.drain()
        (part,) = pair.controller.wait(lambda _: pair.controller.headers("part"))
        assert (part["index"], part["error"]["type"]) == (1, "ConfigError")
        hf.report({})
        pair.session.drain()


def test_an_upload_to_another_place_is_refused(root):
    """The run would not know what to do with it."""
    with Pair(begin(root)), pytest.raises(ConfigError, match="is no place in this run"):
        hf.report({}, make(root.parent / "mine"), checkpoint_upload_fn=lambda one, _: one)
