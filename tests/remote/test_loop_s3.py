"""The loop trainer on a real object store: an S3 server in a process of its own, and faults on the way to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import loop_kit
import pytest
from catalog_kit import catalog_of
from loop_kit import Crash, CrashAt, plain
from object_kit import BUCKET, KEY, SECRET, moto, s3_environment
from process_kit import wait_until

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.errors import StorageUnavailableError
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage import resolve
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.testing import Exchange, Fault, FaultProxy, assert_state_equal


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The server behind a proxy, with endpoint and credentials in the environment."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "GCS_"))]:
        monkeypatch.delenv(name)
    with FaultProxy(server) as between:
        for name, value in s3_environment(between.url).items():
            monkeypatch.setenv(name, value)
        yield between


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_s3_folder(proxy: FaultProxy, tmp_path: Path, suffix: str) -> None:
    """save_folder in a bucket: killed, autoresumed, loaded through the pointer; it ends as at home."""
    uri = f"s3://{BUCKET}/loop{suffix}/runs"
    options = {"save_filename": "ba{batch}" + suffix, "save_interval": "3ba"}
    whole = plain(tmp_path)
    whole.fit()
    with pytest.raises(Crash):
        plain(uri, callbacks=CrashAt(8), autoresume=True, **options).fit()
    again = plain(uri, autoresume=True, **options)
    assert int(again.state.timestamp.batch) == 6
    again.fit()
    assert_state_equal(again.state.model, whole.state.model)
    assert resolve(uri).read("latest-rank0.symlink") == f"loop{suffix}/runs/ba12{suffix}".encode()
    assert int(plain(None, load_path=f"{uri}/latest-rank0").state.timestamp.batch) == 12
    if not suffix:
        assert catalog_of(uri).records()[0].name == "ba12"


def test_nothing_is_kept_here(proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """save_num_checkpoints_to_keep=0 with an s3:// folder, as Composer's guide has it."""
    monkeypatch.chdir(tmp_path)
    uri = f"s3://{BUCKET}/guide/checkpoints"
    plain(uri, save_filename="ep{epoch}.pt", save_num_checkpoints_to_keep=0, save_overwrite=True).fit()
    assert int(plain(None, load_path=f"{uri}/ep1.pt").state.timestamp.epoch) == 1
    assert int(plain(None, load_path=f"{uri}/ep2.pt").state.timestamp.epoch) == 2
    assert os.listdir(tmp_path) == []


def test_forbidden_is_not_nothing(proxy: FaultProxy) -> None:
    """A bucket that refuses us is an error, never a training from zero."""
    uri = f"s3://{BUCKET}/forbidden/runs"
    plain(uri, max_duration="1ep", save_filename="e{epoch}.pt").fit()
    proxy.inject(Fault(kind="403", times=None))
    with pytest.raises(hf.StoragePermissionError):
        plain(uri, autoresume=True, save_filename="e{epoch}.pt")


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_a_bucket_that_is_down_costs_saves_alone(
    proxy: FaultProxy, suffix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be saved is left out and said; only a training whose last save was lost ends with an error."""

    def resolve_impatient(uri: str) -> ObjectStorage:
        return ObjectStorage(uri, {"max_retries": 0})

    monkeypatch.setattr("holdfast.trainers.loop.saving.folder.resolve", resolve_impatient)
    uri = f"s3://{BUCKET}/down{suffix}"
    options = {"save_filename": "ba{batch}" + suffix, "save_interval": "3ba"}
    proxy.inject(Fault(kind="503", path="/ba6"))
    trainer = plain(uri, **options)
    trainer.fit()
    trainer.close()
    assert "a checkpoint was NOT saved, the storage does not answer" in caplog.text
    assert [path.rsplit("/", 1)[1] for path in trainer.saved_checkpoints] == [f"ba{n}{suffix}" for n in (3, 9, 12)]
    proxy.inject(Fault(kind="503", path="/ba18"))
    with pytest.raises(StorageUnavailableError, match=f"the newest is {uri}/ba15{suffix}: when it answers again"):
        plain(uri, autoresume=True, max_duration="18ba", **options).fit()
    proxy.inject()
    assert int(plain(uri, autoresume=True, **options).state.timestamp.batch) == 15


def test_a_link_that_cannot_be_set_loses_no_checkpoint(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, the next save sets it, and until then nothing is deleted that it may mean."""
    monkeypatch.setattr(
        "holdfast.trainers.loop.saving.folder.resolve", lambda uri: ObjectStorage(uri, {"max_retries": 0})
    )
    uri = f"s3://{BUCKET}/unlinked"

    def train(batches: int) -> None:
        saver = CheckpointSaver(uri, "ba{batch}", save_interval="3ba", keep=hf.Keep(last=1))
        trainer = plain(None, callbacks=saver, autoresume=True, run_name="r", max_duration=f"{batches}ba")
        trainer.fit()
        trainer.close()

    faults = [Fault(kind="503", method="PUT", path="symlink", at=number) for number in (1, 2)]
    proxy.inject(*faults)
    train(9)
    assert "is saved, but its link" in caplog.text
    assert "NOT saved" not in caplog.text
    there = resolve(uri)
    assert there.read("latest-rank0.symlink") == b"unlinked/ba3"
    assert [record.step for record in catalog_of(there).records()] == [9, 6, 3]
    proxy.inject()
    train(12)
    assert there.read("latest-rank0.symlink") == b"unlinked/ba12"
    assert [record.step for record in catalog_of(there).records()] == [12]


def test_uploads_to_a_bucket_that_is_down_for_a_while(
    proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, and all of them arrive; where they cannot, the end says so and the local ones stay."""

    def uploader(name: str) -> RemoteUploaderDownloader:
        found = RemoteUploaderDownloader(f"s3://{BUCKET}/{name}", num_attempts=1)
        found.storage = ObjectStorage(found.storage.uri, {"max_retries": 0})
        return found

    options = {"run_name": "r", "save_filename": "ba{batch}", "save_interval": "4ba"}
    proxy.inject(Fault(kind="503", path="/ba4", times=1))
    trainer = plain(tmp_path / "one", loggers=uploader("away"), **options)
    trainer.fit()
    trainer.close()
    assert "NOT uploaded to" in caplog.text
    for batch in (4, 8, 12):
        assert hf.Checkpoint(f"s3://{BUCKET}/away/r/checkpoints/ba{batch}").verify().ok
    proxy.inject(Fault(kind="503", path="/gone/", times=None))
    trainer = plain(tmp_path / "two", loggers=uploader("gone"), **options)
    (tmp_path / "notes").write_text("of the user, who may remove it")
    trainer.logger.upload_file("r/notes", tmp_path / "notes", overwrite=True)
    with pytest.raises(StorageUnavailableError, match=r"4 upload\(s\) to .* are missing") as raised:
        trainer.fit()
    assert hf.Checkpoint(tmp_path / "two" / "ba12").verify().ok
    kept = str(raised.value).rpartition("there are copies: ")[2]
    assert Path(kept).read_text() == "of the user, who may remove it"


def test_uploads_through_faults(proxy: FaultProxy, tmp_path: Path) -> None:
    """Requests that fail now and then are repeated; what arrives is whole."""
    uploader = RemoteUploaderDownloader(f"s3://{BUCKET}/through")
    trainer = plain(tmp_path, loggers=uploader, run_name="r", save_filename="ba{batch}", save_interval="4ba")
    proxy.inject(Fault(kind="503", method="PUT", every=5, times=4), Fault(kind="reset", method="PUT", every=7, times=2))
    trainer.fit()
    trainer.close()
    proxy.forget()
    for batch in (4, 8, 12):
        assert hf.Checkpoint(f"s3://{BUCKET}/through/r/checkpoints/ba{batch}").verify().ok


_TO_BE_KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from loop_kit import plain
from holdfast.callbacks import Callback
from holdfast.loggers import RemoteUploaderDownloader

class Say(Callback):
    def fit_start(self, state, logger):  # nothing else asks the bucket from here on: the proxy holds everybody up
        logger.upload_file("r/notes.txt", sys.argv[1] + "/loop_kit.py")

    def checkpoint_committed(self, checkpoint):
        print("saved", flush=True)

folder, bucket, suffix = sys.argv[2:]
options = {"save_filename": "ba{batch}" + suffix, "save_interval": "4ba", "run_name": "r", "callbacks": Say()}
trainer = plain(folder, loggers=RemoteUploaderDownloader(bucket), **options)
trainer.fit()
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_a_killed_trainer_is_uploaded_all_the_same(proxy: FaultProxy, tmp_path: Path, suffix: str) -> None:
    """SIGKILL while the bucket holds the first upload up: all that was saved arrives, in order, and no copy stays."""
    bucket = f"s3://{BUCKET}/killed{suffix}"
    (tmp_path / "scratch").mkdir()
    reached, going = threading.Event(), threading.Event()

    def hold(exchange: Exchange) -> None:
        reached.set()
        going.wait(120)

    proxy.inject(Fault(kind="call", call=hold, method="PUT", times=1))
    command = [
        sys.executable,
        "-c",
        _TO_BE_KILLED,
        str(Path(loop_kit.__file__).parent),
        str(tmp_path / "runs"),
        bucket,
        suffix,
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    trainer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    try:
        assert trainer.stdout is not None
        for _ in range(3):
            assert trainer.stdout.readline() == b"saved\n"
        assert reached.wait(120)
    finally:
        trainer.kill()
        trainer.communicate()
        going.set()
    there = resolve(f"{bucket}/r")
    newest = f"killed{suffix}/r/checkpoints/ba12{suffix}".encode()
    assert wait_until(
        lambda: there.exists(pointer := "checkpoints/latest-rank0.symlink") and there.read(pointer) == newest
    )
    assert there.exists("notes.txt")
    end = suffix or "/manifest.json"
    sent = [one.path for one in proxy.exchanges if one.method == "PUT" and one.status == 200]
    whole = [path.removesuffix(end).rpartition("/")[2] for path in sent if path.endswith(end) and "/ba" in path]
    assert whole == ["ba4", "ba8", "ba12"]
    for batch in (4, 8, 12):
        again = plain(None, load_path=f"{bucket}/r/checkpoints/ba{batch}{suffix}")
        assert int(again.state.timestamp.batch) == batch
        if not suffix:
            assert hf.Checkpoint(f"{bucket}/r/checkpoints/ba{batch}").verify().ok
    assert [path for path in (tmp_path / "scratch").iterdir() if path.name.startswith("holdfast-")] == []


@pytest.mark.parametrize("scheme", ["gs", "oci"])
def test_other_clouds(server: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gs:// and oci:// in save_folder and load_path, by their S3-compatible sides, which moto plays."""
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    keys = {"GCS_KEY": KEY, "GCS_SECRET": SECRET, "OCI_ACCESS_KEY_ID": KEY, "OCI_SECRET_ACCESS_KEY": SECRET}
    where = {"GCS_ENDPOINT_URL": server, "OCI_ENDPOINT_URL": server, "OCI_NAMESPACE": "tenancy", "OCI_REGION": "r"}
    for name, value in {**keys, **where}.items():
        monkeypatch.setenv(name, value)
    uri = f"{scheme}://{BUCKET}/clouds-{scheme}/runs"
    with plain(uri, save_filename="ep{epoch}.pt", max_duration="1ep") as trainer:
        trainer.fit()
        assert trainer.saved_checkpoints == [f"{uri}/ep1.pt"]
    assert int(plain(None, load_path=f"{uri}/latest-rank0").state.timestamp.batch) == 6
    assert int(plain(uri, autoresume=True, save_filename="ep{epoch}.pt").state.timestamp.batch) == 6


@pytest.mark.parametrize("kind", ["500", "503", "reset", "truncated"])
@pytest.mark.slow
def test_loading_through_faults(proxy: FaultProxy, kind: str) -> None:
    """Requests that fail while a checkpoint is found and loaded are repeated; what is loaded is right."""
    uri = f"s3://{BUCKET}/faulty-{kind}/runs"
    first = plain(uri, save_filename="ep{epoch}.pt", max_duration="1ep")
    first.fit()
    first.close()
    proxy.inject(Fault(kind=kind, method="GET", every=3, times=3))
    again = plain(uri, save_filename="ep{epoch}.pt", autoresume=True)
    proxy.forget()
    assert int(again.state.timestamp.batch) == 6
    assert_state_equal(again.state.model, first.state.model)
