"""The queue of uploads and its source of files: order, threads, tries, the end, and a target that others use too."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.copying.sending import TransferStopped
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    HoldfastError,
    StorageError,
    StoragePermissionError,
    StorageUnavailableError,
)
from holdfast.format.commit import PartSummary, commit
from holdfast.format.names import MANIFEST_NAME
from holdfast.storage import LocalStorage, MemoryStorage, Storage, StorageTraits
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import MirrorLimits
from holdfast.writer.uploads import files as files_module
from holdfast.writer.uploads import queue as queue_module
from holdfast.writer.uploads.files import FileUploads, UploadJob, UploadPointer
from holdfast.writer.uploads.queue import UploadQueue

WAIT = MirrorLimits(when_behind="wait")


class Scripted:
    """A source that does what a test says."""

    uri = "scripted://"
    lost: HoldfastError | None = None

    def __init__(self, act: Callable[[str], object] = lambda name: None) -> None:
        self.act = act
        self.taken: list[str] = []
        self.stop: Callable[[], bool] = lambda: False

    def take(self, name: str, *, stop: Callable[[], bool]) -> None:
        self.stop = stop
        self.taken.append(name)
        self.act(name)

    def newest(self) -> None:
        return None


def test_the_oldest_goes_first_and_one_thread_takes_one_at_a_time() -> None:
    """What waited at the start goes before what comes later; each is settled once it is there."""
    source, settled = Scripted(), queue.SimpleQueue[str]()
    uploads = UploadQueue(source, WAIT, waiting=("a", "b"), settled=settled.put)
    uploads.add("c")
    assert [settled.get(timeout=30) for _ in range(3)] == ["a", "b", "c"]
    uploads.close(30.0, "")
    assert source.taken == ["a", "b", "c"]
    assert uploads.needed() == frozenset()


def test_as_many_go_side_by_side_as_there_are_workers() -> None:
    """With three workers three uploads are under way at once, never the same one twice; a fourth waits."""
    meeting = threading.Barrier(3)
    source = Scripted(lambda name: meeting.wait(30))
    uploads = UploadQueue(source, WAIT, num_workers=3, waiting=tuple("abcdef"))
    uploads.go()
    uploads.close(60.0, "")
    assert sorted(source.taken) == list("abcdef")
    assert set(source.taken[:3]) == set("abc")


def test_what_is_added_again_while_it_is_under_way_goes_again() -> None:
    """The first time brought what was there before: it still waits, and is brought once more."""
    begun, going = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        begun.set()
        going.wait(30)

    source = Scripted(hold)
    uploads = UploadQueue(source, WAIT)
    uploads.add("a")
    assert begun.wait(30)
    uploads.add("a")
    going.set()
    uploads.close(30.0, "")
    assert source.taken == ["a", "a"]


def test_what_cannot_be_uploaded_leaves_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    """An error that trying again does not mend costs that one alone, and what was sent of it is removed."""

    def act(name: str) -> None:
        if name == "bad":
            raise CheckpointError("damaged here")

    source, dropped = Scripted(act), []
    uploads = UploadQueue(source, WAIT, waiting=("bad", "good"), drop=dropped.append)
    uploads.close(30.0, "")
    assert source.taken == ["bad", "good"]
    assert dropped == ["bad"]
    assert "bad is not uploaded to scripted://: damaged here" in caplog.text


def test_a_target_that_fails_is_tried_again_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other error pauses the queue, keeps the order, and followers hear of it and of its end."""
    monkeypatch.setattr(queue_module, "pause_s", lambda failures, chance: 0.0)
    errors = [StorageError("no answer"), StorageError("no answer")]

    def act(name: str) -> None:
        if errors:
            raise errors.pop()

    source, heard = Scripted(act), queue.SimpleQueue[dict[str, Any]]()
    uploads = UploadQueue(source, WAIT, waiting=("a", "b"))
    uploads.go()
    state: dict[str, Any] = {"version": None, "waiting": ["?"]}
    while state["waiting"] or state["error"]:
        uploads.follow(state["version"], heard.put)
        state = heard.get(timeout=30)
    assert source.taken == ["a", "a", "a", "b"]
    assert "could not be reached, trying again while training goes on: no answer" in caplog.text
    assert "answers again" in caplog.text
    uploads.close(30.0, "")


def test_the_end_stops_what_takes_too_long(caplog: pytest.LogCaptureFixture) -> None:
    """Within its bound the end waits; then the upload under way is asked to stop, and what is left is named."""
    begun = threading.Event()

    def slow(name: str) -> None:
        begun.set()
        while not source.stop():
            time.sleep(0.01)
        raise TransferStopped

    source, ended = Scripted(slow), []
    uploads = UploadQueue(source, WAIT, num_workers=2, waiting=("a", "b", "c"), ended=ended.append)
    uploads.go()
    assert begun.wait(30)
    uploads.close(0.2, "they stay here")
    assert ended == [True]
    assert "not at scripted://: a, b, c; they stay here" in caplog.text


# -- files


class Answers:
    """Takes the answers of uploads by name."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()

    def of(self, name: str) -> Callable[[BaseException | None], None]:
        return lambda error: self._heard.put((name, error))

    def next(self) -> tuple[str, BaseException | None]:
        return self._heard.get(timeout=60)


class Refusing(MemoryStorage):
    """A target whose writes fail as a test says: by path, so many errors."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.errors: dict[str, list[Exception]] = {}
        self.tries: list[str] = []

    def create(self, path: str, size: int) -> Any:
        self.tries.append(path)
        if self.errors.get(path):
            raise self.errors[path].pop()
        return super().create(path, size)


@pytest.fixture
def source(tmp_path: Path) -> LocalStorage:
    found = LocalStorage(tmp_path)
    for name in ("a", "b"):
        found.put(name, name.encode() * 10)
    return found


def job(name: str, **options: Any) -> UploadJob:
    return UploadJob(path=f"there/{name}", name=name, **options)


def test_a_file_is_tried_as_often_as_its_job_says(source: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the storage are tried again, a refusal is not; each ends with one answer, and others go on."""
    monkeypatch.setattr(files_module, "_pause", lambda seconds, stop: pauses.append(seconds))
    pauses: list[float] = []
    target, answers = Refusing("tries"), Answers()
    target.errors = {
        "there/a": [StorageUnavailableError("down")] * 2,
        "there/b": [StorageUnavailableError("down")] * 9,
        "there/c": [StoragePermissionError("no")],
    }
    source.put("c", b"")
    uploads = FileUploads(target, num_workers=1)
    for name in ("a", "b", "c", "d"):
        uploads.add(source, job(name), answers.of(name))
    told = dict(answers.next() for _ in range(4))
    assert told["a"] is None
    assert isinstance(told["b"], StorageUnavailableError)
    assert isinstance(told["c"], StoragePermissionError)
    assert isinstance(told["d"], StorageError)  # there is no such file
    assert [target.tries.count(f"there/{name}") for name in "abc"] == [3, 3, 1]
    assert pauses == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    assert target.read("there/a") == b"a" * 10
    uploads.close()


def test_a_pointer_never_goes_back(source: LocalStorage) -> None:
    """With several uploads at once an older one may end last: the pointer stays with the newer one."""
    target, answers = Refusing("pointers"), Answers()
    late = threading.Event()
    read = source.open

    def slow(path: str) -> Any:
        if path == "a":
            assert late.wait(60)
        return read(path)

    source.open = slow  # type: ignore[method-assign]
    uploads = FileUploads(target, num_workers=2)
    for number, name in enumerate("ab"):
        pointer = UploadPointer(path="latest", text=f"there/{name}", order=(1, number, name))
        uploads.add(source, job(name, pointer=pointer), answers.of(name))
    assert answers.next() == ("b", None)
    late.set()
    assert answers.next() == ("a", None)
    assert target.read("there/a") == b"a" * 10
    assert target.read("latest") == b"there/b"
    uploads.close()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_pointer_of_another_trainer_is_left_alone(source: LocalStorage, is_taken: bool) -> None:
    """Once our trainer is dead another one may go on: what it has pointed to meanwhile stays; else ours counts."""
    target, answers = Refusing("shared"), Answers()
    target.put("latest", b"there/old")
    begun, going = threading.Event(), threading.Event()
    read = source.open

    def slow(path: str) -> Any:
        begun.set()
        assert going.wait(60)
        return read(path)

    source.open = slow  # type: ignore[method-assign]
    uploads = FileUploads(target, num_workers=1)
    uploads.add(
        source, job("a", pointer=UploadPointer(path="latest", text="there/a", order=(1, 1, "a"))), answers.of("a")
    )
    assert begun.wait(60)
    uploads.trainer_gone()
    if is_taken:
        target.put("latest", b"there/newer")
    going.set()
    assert answers.next() == ("a", None)
    assert target.read("latest") == (b"there/newer" if is_taken else b"there/a")
    uploads.close()


class Store(Refusing):
    """A target that many clients write to at once."""

    traits = StorageTraits(num_parallel=4)


def manifest(number: int) -> bytes:
    """The manifest of a checkpoint that has no files."""
    storage = MemoryStorage(f"manifest-{number}")
    fields = {"run_id": "run", "checkpoint_id": f"id-{number}", "attempt": 1, "step": number}
    commit(storage, "made", fields, [PartSummary(writer=0, files=())])
    return storage.read(f"made/{MANIFEST_NAME}")


def held_back(source: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Reading of a source waits: set once something is read, to be set for it to go on."""
    begun, going = threading.Event(), threading.Event()
    read = source.open

    def slow(path: str) -> Any:
        begun.set()
        assert going.wait(60)
        return read(path)

    monkeypatch.setattr(source, "open", slow)
    return begun, going


@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_a_newer_upload_of_another_trainer_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once our trainer is dead another one may upload under a fixed name: what comes there meanwhile is newer.

    It stays, whether ours was under way or waited; what nobody has replaced is sent, one after another.
    """
    source, target, answers = LocalStorage(tmp_path), Store(f"newer-{kind}"), Answers()
    of = "{}" if kind == "file" else "{}/" + MANIFEST_NAME

    def put(storage: Storage, name: str, number: int) -> bytes:
        data = str(number).encode() if kind == "file" else manifest(number)
        storage.put(of.format(name), data)
        return data

    ours = {name: put(source, name, number) for number, name in enumerate("abcde")}
    begun, going = held_back(source, monkeypatch)
    uploads = FileUploads(target, num_workers=1)
    put(target, "first", 90)
    put(target, "second", 91)
    for name, path in (("a", "first"), ("b", "second"), ("c", "third"), ("d", "fourth"), ("e", "fourth")):
        uploads.add(source, UploadJob(path=path, name=name, kind=kind), answers.of(name))
    assert begun.wait(60)
    uploads.trainer_gone()
    newer = {path: put(target, path, number) for number, path in enumerate(("first", "second", "third"), 100)}
    going.set()
    told = dict(answers.next() for _ in ours)
    assert {name for name, error in told.items() if error is not None} == {"a", "b", "c"}
    assert all("another trainer" in str(told[name]) or "meanwhile" in str(told[name]) for name in "abc")
    for path, data in newer.items():
        assert target.read(of.format(path)) == data
    assert target.read(of.format("fourth")) == ours["e"]
    assert "second is not uploaded" in caplog.text
    uploads.close()


def test_a_target_that_does_not_answer_is_looked_at_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came there since the trainer died counts as another trainer's then; what is older is replaced."""
    monkeypatch.setattr(files_module, "_CLOCKS_S", 0.0)
    source, target, answers = LocalStorage(tmp_path), Store("silent"), Answers()
    for name in ("a", "b", "c"):
        source.put(name, name.encode())
    begun, going = held_back(source, monkeypatch)
    uploads = FileUploads(target, num_workers=1)
    for name in ("a", "b", "c"):
        target.put(f"there/{name}", b"old")
        uploads.add(source, job(name), answers.of(name))
    assert begun.wait(60)

    def no_answer(path: str) -> Any:
        raise StorageUnavailableError("no answer")

    with monkeypatch.context() as silent:
        silent.setattr(target, "stat", no_answer)
        uploads.trainer_gone()
    target.delete("there/b")
    target.put("there/c", b"newer")
    going.set()
    told = dict(answers.next() for _ in "abc")
    assert (told["a"], told["b"]) == (None, None)
    assert "another trainer" in str(told["c"])
    assert [target.read(f"there/{name}") for name in "abc"] == [b"a", b"b", b"newer"]
    uploads.close()


@pytest.mark.parametrize("is_silent", [False, True])
def test_uploads_of_one_path_do_not_take_each_other_for_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """With several workers the second one waits for the first, also where the target does not say what it got."""
    source, target, answers = LocalStorage(tmp_path), Store(f"one-path-{is_silent}"), Answers()
    for name in ("a", "b"):
        source.put(name, name.encode())
    begun, going = held_back(source, monkeypatch)
    uploads = FileUploads(target, num_workers=2)
    for name in ("a", "b"):
        uploads.add(source, UploadJob(path="there", name=name), answers.of(name))
    assert begun.wait(60)
    uploads.trainer_gone()
    stat, counts = target.stat, iter(range(1, 100))

    def answer(path: str) -> Any:
        if is_silent and next(counts) == 2:  # the look after the first file
            raise StorageUnavailableError("no answer")
        return stat(path)

    monkeypatch.setattr(target, "stat", answer)
    going.set()
    assert dict(answers.next() for _ in "ab") == {"a": None, "b": None}
    assert target.read("there") == b"b"
    uploads.close()


def test_copies_go_with_their_upload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy made for its upload is removed once it is there. One that failed may be the only one: it stays.

    Its trainer may ask again; when that is dead, the log says where the copy is.
    """
    target, answers = Refusing("copies"), Answers()
    target.errors["there/two"] = [StoragePermissionError("no")] * 2
    source = LocalStorage(tmp_path)
    for name in ("one", "two"):
        source.put(f"{name}/file", b"x")
    uploads = FileUploads(target, num_workers=1)
    for name in ("one", "two"):
        uploads.add(source, UploadJob(path=f"there/{name}", name=f"{name}/file", kind="copy"), answers.of(name))
    assert answers.next() == ("one", None)
    assert isinstance(answers.next()[1], StoragePermissionError)
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    uploads.trainer_gone()
    uploads.add(source, UploadJob(path="there/two", name="two/file", kind="copy"), answers.of("two"))
    assert isinstance(answers.next()[1], StoragePermissionError)
    uploads.close()
    assert (tmp_path / "two" / "file").read_bytes() == b"x"
    assert f"stays in {tmp_path}/two/file" in caplog.text


def test_where_files_are_written_in_place_nothing_is_sent_for_a_dead_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next trainer may be writing the same file there, and each would remove the other's. A copy has no other."""
    source, target, answers = LocalStorage(tmp_path / "source"), LocalStorage(tmp_path / "target"), Answers()
    uploads = FileUploads(target, num_workers=1)
    for name in ("one", "two"):
        source.put(f"{name}/file", b"x")
    uploads.trainer_gone()
    uploads.add(source, UploadJob(path="one", name="one/file"), answers.of("one"))
    uploads.add(source, UploadJob(path="two", name="two/file", kind="copy"), answers.of("two"))
    assert "written in place" in str(answers.next()[1])
    assert answers.next() == ("two", None)
    assert [info.path for info in target.list()] == ["two"]
    assert "one is not uploaded" in caplog.text
    uploads.close()


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_client_hears_how_an_upload_ended(tmp_path: Path, source: LocalStorage, in_thread: bool) -> None:
    """Through the socket as in a thread: done, or the error by its class; closing waits for what was asked for."""
    target = MemoryStorage("client") if in_thread else LocalStorage(tmp_path / "target")
    with WriterClient.start(source, remote=target) as client:
        assert (client.process_id is None) is in_thread
        assert client.upload(source, target, job("a")).result(60) is None
        with pytest.raises(StorageError):
            client.upload(source, target, job("c", num_attempts=1)).result(60)
        with pytest.raises(CheckpointNotFoundError):
            client.upload(source, target, job("c", kind="checkpoint")).result(60)
        last = client.upload(source, target, job("b"))
    assert last.result(0) is None
    assert (target.read("there/a"), target.read("there/b")) == (b"a" * 10, b"b" * 10)


def test_uploads_go_on_after_the_writer_is_killed(tmp_path: Path, source: LocalStorage) -> None:
    """A writer that dies is started again, and what it had not answered is uploaded by the new one."""
    target = LocalStorage(tmp_path / "target")
    big = bytes(64 << 20)
    source.put("big", big)
    with WriterClient.start(source) as client:
        asked = client.upload(source, target, job("big"))
        process = client._conversation.process
        assert process is not None
        process.kill()
        assert asked.result(60) is None
        assert client._conversation.process is not process
    assert target.read("there/big") == big
