"""The command line against a real S3 server behind a proxy that counts requests and lets them go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from catalog_kit import catalog_of
from checkpoint_kit import MODEL, Shape, build
from object_kit import BUCKET, KEY, SECRET, client, moto, s3_environment
from test_cli import as_json, invoke

from holdfast import Checkpoint
from holdfast.errors import ConfigError, StorageError
from holdfast.storage import LocalStorage, resolve
from holdfast.storage.object.client import UnfinishedUploads
from holdfast.testing import Fault, FaultProxy


def big() -> tuple[Shape, ...]:
    """Tensors of which the largest goes through the windows of a copy more than once."""
    return tuple(
        Shape(f"{item}/w", (rows, 1_000_000), bytes(range(251)) * (rows * 15_000))
        for item, rows in (("model", 10), ("ema", 3), ("optimizer", 3))
    )


@pytest.fixture(scope="module")
def server():
    with moto() as url, FaultProxy(url) as proxy:
        yield url, proxy


@pytest.fixture
def proxy(server):
    server[1].inject()
    server[1].forget()
    yield server[1]
    server[1].inject()


@pytest.fixture(autouse=True)
def root(proxy, monkeypatch, request) -> str:
    """Give an s3:// prefix of this test's own, with endpoint and credentials in the environment."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "GCS_"))]:
        monkeypatch.delenv(name)
    for name, value in s3_environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["holdfast"])
    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture
def run(tmp_path) -> LocalStorage:
    """Three checkpoints of a run that share the frozen item ``ema``."""
    storage = LocalStorage(tmp_path / "gpt")
    catalog = catalog_of(storage)
    catalog.index.register_attempt("aaaaaaaa", host="h", pid=1)
    for step in (1, 2, 3):
        tensors = (
            Shape("ema/w", (400_000,), b"frozen" * 200_000),
            Shape("model/w", (400_000,), bytes([step]) * 1_600_000),
        )
        fields = {"run_id": catalog.index.run_id, "attempt": 1, "step": step}
        catalog.add(f"step_{step}", build(storage, f"step_{step}", tensors=tensors, **fields))
    catalog.index.save()
    return storage


def bulk(proxy) -> int:
    return sum(one.sent_bytes for one in proxy.exchanges)


def test_a_run_goes_there_and_back_and_nothing_twice(run, root, proxy, tmp_path) -> None:
    """Unchanged files are copied by the server, the second push sends small change, the pull equals the source."""
    first = as_json("push", run.uri, root)
    total = sum(row["bytes_sent"] + row["bytes_copied"] for row in first["checkpoints"])
    assert first["bytes_copied"] == 2 * Checkpoint(f"{run.uri}/step_1").manifest.with_role("tensors")[0].size
    assert bulk(proxy) < total - first["bytes_copied"] + 300_000
    proxy.forget()
    again = as_json("push", run.uri, root)
    assert (again["bytes_sent"], again["bytes_there"]) == (0, total)
    assert bulk(proxy) < 20_000
    back = as_json("pull", f"{root}/gpt", tmp_path / "back", "--verify")
    assert back["ok"]
    for info in run.list():
        if info.path != "run.json":
            assert LocalStorage(tmp_path / "back" / "gpt").read(info.path) == run.read(info.path)


def test_between_two_prefixes_of_a_bucket(run, root) -> None:
    """`cp` needs no local end."""
    as_json("push", run.uri, root)
    assert as_json("cp", f"{root}/gpt", f"{root}/backup", "--verify")["verified"]
    assert Checkpoint(f"{root}/backup/step_2").verify().ok


def test_requests_that_fail_change_nothing(run, root, proxy, tmp_path) -> None:
    """With one request in five going wrong, push and pull bring everything."""
    proxy.inject(Fault(kind="500", share=0.1, seed=1), Fault(kind="reset", share=0.1, seed=2))
    assert as_json("push", run.uri, root)["ok"]
    assert as_json("pull", f"{root}/gpt", tmp_path / "back")["ok"]
    assert any(one.fault for one in proxy.exchanges)
    proxy.inject()
    assert all(Checkpoint(f"{root}/gpt/step_{step}").verify().ok for step in (1, 2, 3))
    assert all(Checkpoint(tmp_path / "back" / "gpt" / f"step_{step}").verify().ok for step in (1, 2, 3))


def test_a_killed_push_goes_on_and_complete_objects_are_not_sent_again(root, proxy, tmp_path) -> None:
    """Kill -9 in the middle: no checkpoint there, and the second push finds what was complete."""
    made = build(LocalStorage(tmp_path), "c", tensors=big())
    reached = threading.Event()

    def hold(_one: object) -> bool:
        reached.set()
        time.sleep(0.3)  # the kill comes meanwhile
        return True

    proxy.inject(Fault(kind="call", call=hold, method="PUT", path="optimizer"))
    code = "from holdfast.cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, "push", str(tmp_path / "c"), root]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert reached.wait(60)
    there = resolve(root)
    deadline = time.monotonic() + 60
    while not any("model" in info.path for info in there.list()):  # the others are done while that one is held up
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.inject()
    assert not there.exists("c/manifest.json")
    again = as_json("push", tmp_path / "c", root)
    assert again["bytes_there"] >= made.with_role("tensors")[0].size
    assert again["bytes_sent"] + again["bytes_there"] == made.total_bytes
    assert Checkpoint(f"{root}/c").verify().ok


def test_ls_and_show_read_only_small_files(run, root, proxy) -> None:
    """However large the tensors are: manifests and indexes, in a few requests; of a run, its index.

    And whether its newest is there.
    """
    as_json("push", run.uri, f"{root}/runs")
    storage = resolve(f"{root}/own")
    for number in range(3):
        build(storage, f"c{number}", tensors=(*MODEL, *big()), step=number)
    # Without an index: manifest and late metrics of each checkpoint, and five requests more.
    for most, *command in (
        (4, "ls", f"{root}/runs/gpt"),
        (6 + 2 * 3, "ls", f"{root}/own"),
        (8, "show", f"{root}/own/c1"),
        (8, "show", f"{root}/own/c1", "--tensors"),
    ):
        proxy.forget()
        as_json(*command)
        asked = proxy.exchanges
        assert len(asked) <= most, "\n".join(f"{one.method} {one.path} {one.query} {one.range}" for one in asked)
        assert sum(one.received_bytes for one in asked) < 100_000
        assert not any(".safetensors" in one.path for one in asked)
        assert {one.method for one in asked} <= {"GET", "HEAD"}


def test_verify_without_deep_reads_no_tensor(root, proxy) -> None:
    """Sizes alone; with --deep all bytes, once."""
    manifest = build(resolve(root), "c", tensors=big())
    for flag, most in (("--no-deep", 1_500_000), ("--deep", manifest.total_bytes + 1_500_000)):
        proxy.forget()
        assert as_json("verify", f"{root}/c", flag)["ok"]
        assert sum(one.received_bytes for one in proxy.exchanges) < most


def test_no_credentials_are_shown(run, root, monkeypatch, capfd) -> None:
    """Neither in what is printed, nor in errors, nor in what lies in the bucket afterwards."""
    texts = [invoke("push", run.uri, root).output, invoke("sweep", root).output]
    storage = resolve(root)
    texts += [storage.read(info.path).decode("latin-1") for info in storage.list()]
    bad = f"s3://{BUCKET}-not-there/x"
    texts += [invoke(*command, code=1).output for command in (("push", run.uri, bad), ("sweep", bad))]
    texts += [str(capfd.readouterr())]
    for text in texts:
        assert SECRET not in text
        assert KEY not in text


# -- unfinished uploads ----------------------------------------------------------------------------------------------


def uploads(root: str) -> list[str]:
    return [upload.path for upload in UnfinishedUploads(resolve(root)).find()]


def begin(server, key: str) -> None:
    s3 = client(server[0])
    upload = s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    s3.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * 1000)


def test_settings_that_boto3_refuses_are_said(monkeypatch) -> None:
    """No exception of the client reaches the user, also before the first request."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://-no-name-")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(ConfigError, match="boto3 refuses these settings") as caught:
        UnfinishedUploads(resolve(f"s3://{BUCKET}/x"))
    assert SECRET not in str(caught.value)


def test_unfinished_uploads_below_a_prefix_are_removed(server, root) -> None:
    """Only there, only old ones, and only for good."""
    prefix = root.partition(f"{BUCKET}/")[2]
    for key in (f"{prefix}/run/a.bin", f"{prefix}/run/sub/b.bin", f"{prefix}/runner/c.bin"):
        begin(server, key)
    # moto dates every upload back to 2010.
    young = as_json("sweep", f"{root}/run", "--older", "36500d")
    assert [row["state"] for row in young["uploads"]] == ["kept", "kept"]
    planned = as_json("sweep", f"{root}/run")
    assert [(row["path"], row["state"]) for row in planned["uploads"]] == [
        ("a.bin", "would be removed"), ("sub/b.bin", "would be removed"),
    ]  # fmt: skip
    assert len(uploads(f"{root}/run")) == 2
    assert "2 of 2 unfinished uploads removed" in invoke("sweep", f"{root}/run", "--yes").stdout
    assert uploads(f"{root}/run") == []
    assert uploads(root) == ["runner/c.bin"]


def test_what_a_killed_writer_of_ours_leaves_is_found(root, proxy) -> None:
    """Trainer and writer die in the middle of an upload: its parts are in the bucket until they are swept."""
    code = (
        "import sys, torch, holdfast as hf\n"
        "hf.save(sys.argv[1], {'w': torch.zeros(10_000_000)})\n"
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code, f"{root}/c"], env=environment)
    killed = threading.Event()

    def kill(_one: object) -> bool:
        if not killed.is_set():
            with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
                children = [int(pid) for pid in file.read().split()]
            for pid in (*children, process.pid):
                os.kill(pid, signal.SIGKILL)
            killed.set()
        return True

    proxy.inject(Fault(kind="call", call=kill, method="PUT", path="partNumber=2"))
    assert killed.wait(60)
    process.wait()
    proxy.inject()
    (path,) = uploads(root)
    assert path.startswith("c/")
    assert path.endswith(".safetensors")
    invoke("sweep", root, "--yes")
    assert uploads(root) == []


def test_where_there_is_nothing_to_sweep_it_is_said(root, monkeypatch) -> None:
    """Local disks, other kinds of stores, a time that is none, and boto3 missing."""
    assert "no object store" in invoke("sweep", "/tmp", code=2).output
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert "by themselves" in invoke("sweep", "az://container/x", code=2).output
    assert "--older soon" in invoke("sweep", root, "--older", "soon", code=2).output
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert "[s3-sweep]'" in invoke("sweep", root, code=1).output


def test_a_refusal_is_no_empty_answer(root, proxy) -> None:
    """403 says which rights it needs; a store without the request says so."""
    proxy.inject(Fault(kind="403"))
    assert "s3:AbortMultipartUpload" in invoke("sweep", root, code=1).output
    with pytest.raises(StorageError):
        UnfinishedUploads(resolve(root)).find()


def test_doctor_of_a_bucket(root) -> None:
    """Requests, conditional writes, copies, clock and speed; and nothing is left."""
    found = as_json("doctor", root, "--bytes", "8MiB")
    names = {one["name"]: one["level"] for one in found["findings"] if one["part"] == "storage"}
    assert {"requests", "conditional writes", "listing", "clock", "copies", "write speed", "read speed"} < set(names)
    assert set(names.values()) <= {"ok", "warn"}
    assert [info.path for info in resolve(root).list()] == []
