"""Uploads of the loop trainer: what is sent, under which names, in which order, and what is made up for later."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_kit import Crash, CrashAt, names, plain
from process_kit import wait_until

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver
from holdfast.core import State
from holdfast.loggers import Logger, LoggerDestination, RemoteUploaderDownloader
from holdfast.storage import LibcloudObjectStore, MemoryStorage
from holdfast.trainers.loop.parallel import Ranks
from holdfast.trainers.loop.saving.finder import Destinations, FolderEntry
from holdfast.trainers.loop.saving.saves import PostCommit


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_uploads(suffix: str, tmp_path: Path) -> None:
    """A RemoteUploaderDownloader copies what is saved locally.

    0 to keep leaves nothing here; autoresume finds it there; load_object_store reads it.
    """
    bucket = f"memory://bucket{suffix}-{os.getpid()}"

    def make(folder: Path, **options: Any) -> hf.Trainer:
        uploader = RemoteUploaderDownloader(bucket)
        return plain(
            folder, loggers=uploader, run_name="r", save_filename="ba{batch}" + suffix, save_interval="2ba",
            save_remote_file_name="{run_name}/all/ba{batch}" + suffix, **options,
        )  # fmt: skip

    with pytest.raises(Crash):
        make(tmp_path / "a", callbacks=CrashAt(7), save_num_checkpoints_to_keep=0).fit()
    assert names(tmp_path / "a") == []
    store = MemoryStorage(bucket.removeprefix("memory://"))
    assert store.read("r/checkpoints/latest-rank0.symlink") == f"r/all/ba6{suffix}".encode()
    again = make(tmp_path / "b", autoresume=True)
    assert int(again.state.timestamp.batch) == 6
    again.fit()
    loaded = plain(None, load_path="r/checkpoints/latest-rank0", load_object_store=store)
    assert int(loaded.state.timestamp.batch) == 12
    loaded = plain(None, load_path=f"r/all/ba8{suffix}", load_object_store=RemoteUploaderDownloader(bucket))
    assert int(loaded.state.timestamp.batch) == 8


def test_a_trainer_has_one_writer(tmp_path: Path) -> None:
    """Directories, single files in two folders and an uploader: one process stores and sends all of it."""
    own: set[str] = set()

    def writers() -> set[str]:
        children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
        return {pid for pid in children if b"holdfast.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()}

    of_others = writers()  # of tests before, kept for their next save

    class Look(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            own.update(writers() - of_others)

    files = [CheckpointSaver(tmp_path / name, "ba{batch}.pt", latest_remote_file_name=None) for name in ("one", "two")]
    files[1].remote_file_name = None
    trainer = plain(
        tmp_path / "run", save_filename="ba{batch}", save_interval="2ba", run_name="r", callbacks=[*files, Look()],
        loggers=RemoteUploaderDownloader(str(tmp_path / "far")),
    )  # fmt: skip
    trainer.fit()
    assert len(own) == 1
    assert not Path(f"/proc/{own.pop()}").exists(), "it has ended with the training"
    trainer.close()
    far = tmp_path / "far" / "r" / "checkpoints"
    assert {path.name for path in far.iterdir()} >= {"ba4", "ba8", "ba6.pt", "latest-rank0.symlink"}
    assert {"ba6.pt", "ba12.pt"} <= set(names(tmp_path / "two"))


def test_uploads_have_the_names_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded from the folder "checkpoints" is loaded as "checkpoints/ep1.pt"."""
    pytest.importorskip("libcloud")
    (tmp_path / "bucket").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    access: dict[str, Any] = {"provider": "local", "container": "bucket", "provider_kwargs": {"key": str(tmp_path)}}
    trainer = plain(
        "checkpoints", save_filename="ep{epoch}.pt", save_num_checkpoints_to_keep=0, save_overwrite=True,
        loggers=[RemoteUploaderDownloader(bucket_uri="libcloud://bucket", backend_kwargs=access)],
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    assert names(tmp_path / "here" / "checkpoints") == []
    loaded = plain(None, load_path="checkpoints/ep1.pt", load_object_store=LibcloudObjectStore(**access))
    assert int(loaded.state.timestamp.epoch) == 1
    newest = plain(None, load_path="checkpoints/latest-rank0", load_object_store=LibcloudObjectStore(**access))
    assert int(newest.state.timestamp.epoch) == 2


def test_an_upload_onto_itself_is_refused(tmp_path: Path) -> None:
    """The place of uploads is the save folder: with nothing kept here the only copy would be deleted as uploaded."""
    remote = RemoteUploaderDownloader(str(tmp_path))
    folder = tmp_path / "r" / "checkpoints"
    trainer = plain(folder, run_name="r", loggers=remote, save_num_checkpoints_to_keep=0)
    with pytest.raises(hf.ConfigError, match="uploaded onto itself"):
        trainer.fit()
    assert not folder.exists()


def test_uploads_are_not_overwritten(tmp_path: Path) -> None:
    """What was uploaded by an earlier run refuses a fresh start, wherever that saves locally."""
    bucket = f"memory://guard-{os.getpid()}"
    plain(tmp_path / "a", loggers=RemoteUploaderDownloader(bucket), run_name="r").fit()
    with pytest.raises(hf.CheckpointExistsError, match="memory://guard"):
        plain(tmp_path / "b", loggers=RemoteUploaderDownloader(bucket), run_name="r").fit()
    plain(tmp_path / "b", loggers=RemoteUploaderDownloader(bucket), run_name="s").fit()


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_an_upload_that_was_cut_off_is_made_up_for(tmp_path: Path, suffix: str) -> None:
    """What is resumed from is uploaded if it was not, older ones that never were stay: 0 deletes after an upload."""
    options: dict[str, Any] = {"save_filename": "ba{batch}" + suffix, "save_interval": "1ba", "run_name": "it"}
    with pytest.raises(Crash):
        plain(tmp_path / "runs", callbacks=CrashAt(3), **options).fit()
    before = names(tmp_path / "runs")
    remote = RemoteUploaderDownloader(str(tmp_path / "remote"))
    options |= {"loggers": remote, "save_num_checkpoints_to_keep": 0, "autoresume": True, "max_duration": "5ba"}
    with plain(tmp_path / "runs", **options) as again:
        now = int(again.state.timestamp.batch)
        again.fit()
    sent = {f"ba{number}{suffix}" for number in range(now, 6)}
    assert sent <= set(names(tmp_path / "remote" / "it" / "checkpoints"))
    assert set(names(tmp_path / "runs")) == {one for one in before if one != f"ba{now}{suffix}"}


def test_one_upload_that_is_refused_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads that ended together: what is refused for good is raised, the others are said and tried again.

    The copies of what is refused are gone by then, those of the others once they are uploaded.
    """
    (copies := tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    met = threading.Barrier(4)
    errors: dict[str, Exception] = {
        "a": hf.StoragePermissionError("a is refused"), "b": hf.StorageUnavailableError("b: nobody answers"),
        "c": hf.StoragePermissionError("c is refused"), "d": hf.StorageUnavailableError("d: nobody answers"),
    }  # fmt: skip

    class Bucket(MemoryStorage):
        def create(self, path: str, size: int) -> Any:
            met.wait(60)
            if (error := errors.pop(path, None)) is not None:
                raise error
            return super().create(path, size)

    uploader = RemoteUploaderDownloader("memory://x", num_concurrent_uploads=4, num_attempts=1)
    uploader.storage = bucket = Bucket(f"refuses-{os.getpid()}")
    (tmp_path / "file").write_text("x")
    for name in "abcd":
        uploader.upload_file(None, name, str(tmp_path / "file"))
    wait([one.ended for one in uploader._sent], timeout=60)
    assert len(list(copies.iterdir())) == 2
    met = threading.Barrier(2)
    with pytest.raises(hf.StoragePermissionError, match="a is refused"):
        uploader.batch_checkpoint(None, None)  # type: ignore[arg-type]
    assert all(text in caplog.text for text in ("b: nobody answers", "c is refused", "d: nobody answers"))
    uploader.wait()
    assert sorted(info.path for info in bucket.list("")) == ["b", "d"]
    assert wait_until(lambda: not list(copies.iterdir()))
    uploader.close(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_a_finished_training_is_uploaded(tmp_path: Path, suffix: str) -> None:
    """The upload of the last checkpoint was cut off: the next start trains nothing, and sends it."""
    options: dict[str, Any] = {"run_name": "it", "save_filename": "ba{batch}" + suffix, "max_duration": "1ep"}
    plain(tmp_path / "runs", **options).fit()
    remote = tmp_path / "remote" / "it" / "checkpoints"
    options |= {"loggers": RemoteUploaderDownloader(str(tmp_path / "remote")), "autoresume": True}
    for _ in range(2):  # with the upload there, the pointer is put right
        with plain(tmp_path / "runs", **options) as again:
            again.fit()
            assert int(again.state.timestamp.batch) == 6
            assert again.saved_checkpoints == [f"{tmp_path}/runs/ba6{suffix}"]
        assert f"ba6{suffix}" in names(remote)
    loaded = plain(None, load_path="it/checkpoints/latest-rank0", load_object_store=options["loggers"])
    assert int(loaded.state.timestamp.batch) == 6


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_lives_on_empty_machines(tmp_path: Path, suffix: str) -> None:
    """Nothing but uploads tells how many lives there were: what the latest has saved is the newest all the same."""
    options: dict[str, Any] = {"run_name": "it", "save_filename": "ba{batch}" + suffix, "autoresume": True}
    options["loggers"] = RemoteUploaderDownloader(str(tmp_path / "remote"))
    for machine, epochs in (("one", 1), ("one", 2), ("two", 3), ("three", 4)):
        with plain(tmp_path / machine, max_duration=f"{epochs}ep", **options) as trainer:
            assert int(trainer.state.timestamp.epoch) == epochs - 1
            trainer.fit()


def test_every_upload_of_the_moment_is_made_up_for(tmp_path: Path) -> None:
    """Two savers, both uploads of the last moment cut off: both are sent."""

    def make(**options: Any) -> hf.Trainer:
        weights = CheckpointSaver(tmp_path / "weights", "w{batch}.pt", weights_only=True, latest_remote_file_name=None)
        folder = tmp_path / "full"
        return plain(folder, callbacks=weights, run_name="r", autoresume=True, max_duration="1ep", **options)

    make().fit()
    with make(loggers=RemoteUploaderDownloader(str(tmp_path / "remote"))) as again:
        again.fit()
    assert {"ep1-ba6", "w6.pt"} <= set(names(tmp_path / "remote" / "r" / "checkpoints"))


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_damage_here_is_made_good_from_there(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest checkpoint is damaged here and uploaded: the copy is taken, before an older one of here."""
    options: dict[str, Any] = {
        "run_name": "r", "loggers": RemoteUploaderDownloader(str(tmp_path / "remote")), "save_interval": "2ba",
        "save_filename": "ba{batch}" + suffix, "autoresume": True,
    }  # fmt: skip
    with plain(tmp_path / "runs", max_duration="4ba", **options) as first:
        first.fit()
    newest = tmp_path / "runs" / f"ba4{suffix}"
    path = newest if newest.is_file() else next(one for one in newest.iterdir() if one.name.startswith("state-"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = plain(tmp_path / "runs", max_duration="6ba", **options)
    assert int(again.state.timestamp.batch) == 4
    assert f"set aside ba4{suffix}" in capsys.readouterr().err
    again._group.open()
    assert (tmp_path / "runs" / "latest-rank0").resolve().name == f"ba2{suffix}"  # of the good ones here
    again.fit()
    again.close()
    assert names(tmp_path / "remote" / "r" / "checkpoints")[:3] == [f"ba2{suffix}", f"ba4{suffix}", f"ba6{suffix}"]


FAILS = """
import os, sys
import holdfast as hf
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage import MemoryStorage
from loop_kit import plain

class Down(MemoryStorage):
    def create(self, path, size):
        raise hf.StorageUnavailableError("down")

os.chdir(sys.argv[1])
by_thread, by_process = (RemoteUploaderDownloader(os.path.abspath("bucket"), num_attempts=1) for _ in range(2))
by_thread.storage = Down("down")
trainer = plain(None, loggers=[by_thread, by_process])
open("bucket", "w").close()  # in the way of a folder of this name
trainer.logger.upload_file("x", "file")
for uploader in (by_thread, by_process):
    print(type(uploader._sent[0].ended.exception(60)).__name__, uploader._client.process_id is None)
"""


def test_uploads_do_not_hold_the_end(tmp_path: Path) -> None:
    """A process that ends with an upload that failed ends at once, and says nothing of threads."""
    (tmp_path / "file").write_text("x")
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", FAILS, str(tmp_path)],
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.splitlines() == ["StorageUnavailableError True", "StorageError False"]


def test_files_of_the_user(tmp_path: Path) -> None:
    """logger.upload_file sends a copy; an existing name is refused unless overwrite; download_file brings it back."""
    bucket = f"memory://files-{os.getpid()}"
    uploader = RemoteUploaderDownloader(bucket, file_path_format_string="all/{remote_file_name}")
    trainer = plain(None, loggers=uploader, run_name="r")
    (tmp_path / "notes.txt").write_text("one")
    trainer.logger.upload_file("{run_name}/notes.txt", tmp_path / "notes.txt")
    (tmp_path / "notes.txt").write_text("two")
    uploader.wait()
    assert MemoryStorage(f"files-{os.getpid()}").read("all/r/notes.txt") == b"one"
    with pytest.raises(FileExistsError, match=r"notes\.txt is there already"):
        trainer.logger.upload_file("r/notes.txt", tmp_path / "notes.txt")
    trainer.logger.upload_file("r/notes.txt", tmp_path / "notes.txt", overwrite=True)
    uploader.wait()
    with pytest.raises(FileExistsError):
        uploader.download_file("r/notes.txt", tmp_path / "notes.txt")
    uploader.download_file("r/notes.txt", tmp_path / "back.txt")
    assert (tmp_path / "back.txt").read_text() == "two"
    trainer.close()


def test_libcloud_by_hand(tmp_path: Path) -> None:
    """The methods of LibcloudObjectStore, and pointers in its containers: ours, older ones, and Composer's."""
    pytest.importorskip("libcloud")
    (tmp_path / "box").mkdir()
    store = LibcloudObjectStore("local", "box", {"key": str(tmp_path)})
    (tmp_path / "file").write_bytes(b"x" * 5_000_000)
    told: list[tuple[int, int]] = []
    store.upload_object("a/b.bin", tmp_path / "file", callback=lambda done, size: told.append((done, size)))
    assert told[-1] == (5_000_000, 5_000_000)
    assert store.get_object_size("a/b.bin") == 5_000_000
    assert (store.list_objects(), store.list_objects("a/x")) == (["a/b.bin"], [])
    assert store.get_uri("a/b.bin") == "libcloud://local/box/a/b.bin"
    store.download_object("a/b.bin", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"x" * 5_000_000
    with pytest.raises(FileExistsError):
        store.download_object("a/b.bin", str(tmp_path / "back"))
    with pytest.raises(FileNotFoundError):
        store.download_object("a/c.bin", str(tmp_path / "none"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "box", "file"]
    store.close()
    uploader = RemoteUploaderDownloader("libcloud://box", {"provider": "local", "container": "box",
                                                           "provider_kwargs": {"key": str(tmp_path)}})  # fmt: skip
    trainer = plain(tmp_path / "runs", loggers=uploader, run_name="r", save_filename="ep{epoch}.pt", max_duration="1ep")
    trainer.fit()
    trainer.close()
    assert store.read("r/checkpoints/latest-rank0.symlink") == b"r/checkpoints/ep1.pt"
    store.put("r/checkpoints/old.symlink", b"box/r/checkpoints/ep1.pt")
    for name in ("latest-rank0", "latest-rank0.symlink", "old"):
        found = plain(None, load_path=f"r/checkpoints/{name}", load_object_store=store)
        assert found.state.timestamp.batch == 6
    whole = plain(None, load_path="libcloud://box/r/checkpoints/ep1.pt", load_object_store=store)
    assert whole.state.timestamp.batch == 6


def test_a_checkpoint_is_uploaded_before_it_is_deleted() -> None:
    """With num_to_keep=0 another upload may end while a checkpoint is handed over to its own."""
    events: list[str] = []

    class Alone(Ranks):
        @property
        def leads(self) -> bool:  # asked while a commit is taken in
            kept._retain()  # another upload ends
            return True

        @leads.setter
        def leads(self, value: bool) -> None:
            pass

    def upload(storage: Any, saved: FolderEntry, *names: Any, after: Any) -> None:
        kept._retain()
        events.append(f"uploads {saved.name}")
        after()

    folder: Any = SimpleNamespace(
        storage=MemoryStorage("kept"),
        ranks=Alone(),
        is_held=lambda claim: True,
        delete=lambda one, claim: events.append(f"deletes {one.name}") is None,  # it is gone
    )
    uploader: Any = SimpleNamespace(upload=upload)
    names: Any = None  # nothing here asks for them
    kept = PostCommit(
        names, folder, [uploader], claim=None, keep=None, keeps_none=True, announce=lambda checkpoint: None
    )
    saved = FolderEntry(name="ba1", container="directory")
    kept.add(saved, Destinations(None, "ba1", None), b"")
    assert events == ["uploads ba1", "deletes ba1"]


def test_a_destination_of_ones_own_gets_files(tmp_path: Path) -> None:
    """`upload_file` of a destination is called as in Composer: with the state, the name, a path, and ``overwrite``."""
    got: list[Any] = []

    class Mine(LoggerDestination):
        def upload_file(self, state: Any, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
            got.append((state.run_name, remote_file_name, file_path.read_text(), overwrite))

    (tmp_path / "notes.txt").write_text("x")
    trainer = plain(None, loggers=Mine(), run_name="r")
    trainer.logger.upload_file("{run_name}/notes.txt", tmp_path / "notes.txt", overwrite=True)
    assert got == [("r", "r/notes.txt", "x", True)]
