"""From end to end on s3://: save and load, runs that are killed and resumed, the command line, and no credentials."""

import contextlib
import json
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from command_kit import invoke
from gcs_stub import GoogleStub
from object_kit import BUCKET, KEY, SECRET, client, moto, s3_environment
from process_kit import wait_until

import holdfast as hf
from holdfast.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from holdfast.storage import StorageTraits, resolve
from holdfast.storage.object.client import BucketClient
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.testing import FaultProxy

_SCRIPT = Path(__file__).parents[1] / "kits" / "kill_training.py"


@pytest.fixture(scope="module")
def endpoint():
    with moto() as url:
        yield url


@pytest.fixture
def root(endpoint, monkeypatch, request) -> str:
    """Give an s3:// prefix of this test's own, with endpoint and credentials in the environment."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "GCS_"))]:
        monkeypatch.delenv(name)
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name}"


def _state() -> dict:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 7))
    return {"model": model, "note": "héllo", "big": torch.randn(3_000_000)}


def test_save_and_load(root):
    """What was saved is what is loaded, whole or in part, and an existing checkpoint is refused or replaced."""
    state = _state()
    saved = hf.save(f"{root}/first", state, step=7)
    assert saved.uri == f"{root}/first"
    loaded = hf.load(f"{root}/first")
    assert torch.equal(loaded["big"], state["big"])
    assert loaded["note"] == "héllo"
    fresh = {"model": torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 7))}
    hf.load(saved, fresh, only="model")
    assert all(torch.equal(a, b) for a, b in zip(fresh["model"].parameters(), state["model"].parameters(), strict=True))
    with pytest.raises(CheckpointExistsError):
        hf.save(f"{root}/first", {"x": 1})
    hf.save(f"{root}/first", {"x": torch.ones(3)}, overwrite=True)
    assert hf.load(f"{root}/first").keys() == {"x"}
    with pytest.raises(CheckpointNotFoundError):
        hf.load(f"{root}/nothing")
    assert resolve(root).exists("first/manifest.json")


def test_save_async_and_large_files(root, monkeypatch):
    """A state larger than the bound for files is split; an asynchronous save is durable when its handle says so."""
    monkeypatch.setattr(BucketClient, "traits", StorageTraits(num_parallel=16, max_file_bytes=1 << 20))
    state = {f"w{number}": torch.full((200_000,), float(number)) for number in range(6)}
    handle = hf.save_async(f"{root}/async", state)
    handle.result(60)
    sizes = [file.size for file in handle.result().manifest.files if file.path.endswith(".safetensors")]
    assert len(sizes) >= 6
    assert max(sizes) <= 1 << 20
    loaded = hf.load(f"{root}/async")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_an_object_whose_name_is_no_path_stops_nothing(root, endpoint, caplog):
    """It makes its directory a foreign one, which is said once, and stays where it is."""
    run = f"{root}/run"

    def train(upto):
        with hf.Checkpointer(run, {"w": torch.zeros(3)}, every=1, keep=hf.Keep(last=1)) as ck:
            while ck.global_step < upto:
                ck.step()
        return ck

    train(1)
    place = {"Bucket": BUCKET, "Key": f"{run.removeprefix(f's3://{BUCKET}/')}/notes//x"}
    client(endpoint).put_object(**place, Body=b"mine")
    assert "foreign" in invoke("ls", run).output
    assert "step_00000001" in invoke("latest", run).stdout
    assert caplog.text.count("notes is left alone") == 1
    rows = json.loads(invoke("verify", run, "--json", code=1).stdout)["checkpoints"]
    assert {row["name"]: row["state"] for row in rows} == {"step_00000001": "ok", "notes": "unreadable"}
    train(2)
    assert [checkpoint.step for checkpoint in train(3).checkpoints()] == [3, 2], "the one resumed from is held"
    assert client(endpoint).get_object(**place)["Body"].read() == b"mine"


def test_damage_is_found(root, endpoint):
    """A bit that flipped in the bucket is found by loading and by verify."""
    saved = hf.save(f"{root}/first", {"w": torch.randn(100_000)})
    path = next(file.path for file in saved.manifest.files if file.path.endswith(".safetensors"))
    key = f"{saved.uri.removeprefix(f's3://{BUCKET}/')}/{path}"
    s3 = client(endpoint)
    body = bytearray(s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    body[len(body) // 2] ^= 1
    s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(body))
    with pytest.raises(CorruptCheckpointError, match="w"):
        hf.load(f"{root}/first")
    invoke("verify", f"{root}/first", code=1)


def _life(root: str, result: Path, pid_file: Path, pause: float) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(_SCRIPT), root, str(result), str(pid_file), str(pause)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_killed_and_resumed(root, tmp_path):
    """A run on s3:// that is killed, trainer and writer, ends with the same weights as one that was left alone."""
    calm = _life(f"{root}/calm", tmp_path / "calm", tmp_path / "calm.pid", 0.0)
    output, _ = calm.communicate(timeout=120)
    assert calm.returncode == 0, output
    resumed_at = []
    for life in range(3):
        pid_file = tmp_path / f"life{life}.pid"
        process = _life(f"{root}/killed", tmp_path / "killed", pid_file, 0.05)
        try:
            deadline = time.monotonic() + 90
            while len(_committed(f"{root}/killed")) < 2 or not pid_file.exists():
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            time.sleep(0.4)
            writer, step = pid_file.read_text().split()
            resumed_at.append(int(step))
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(writer), 9)
        finally:
            process.kill()
            process.communicate(timeout=30)
    last = _life(f"{root}/killed", tmp_path / "killed", tmp_path / "last.pid", 0.0)
    output, _ = last.communicate(timeout=120)
    assert last.returncode == 0, output
    resumed_at.append(int((tmp_path / "last.pid").read_text().split()[1]))
    assert resumed_at[0] == 0
    assert resumed_at[-1] > 0
    assert resumed_at == sorted(resumed_at)
    one, other = hf.load(tmp_path / "calm"), hf.load(tmp_path / "killed")
    assert one["ids"] == other["ids"]
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    # Keep(last=2), and what this life was resumed from.
    names = [path.split("/")[0] for path in _committed(f"{root}/killed")]
    assert names[-2:] == ["step_00000078", "step_00000080"]
    assert len(names) <= 3


def _committed(run: str) -> list[str]:
    return sorted(info.path for info in resolve(run).list() if info.path.endswith("/manifest.json"))


def test_command_line(root):
    """ls, show and verify take URIs of runs and of checkpoints."""
    with hf.Checkpointer(f"{root}/run", {"w": torch.ones(5)}, every=1) as ck:
        for _ in range(2):
            ck.step(loss=0.5)
    assert "step" in invoke("ls", f"{root}/run").output
    name = _committed(f"{root}/run")[-1].split("/")[0]
    for command in (["show", f"{root}/run/{name}"], ["verify", f"{root}/run/{name}"], ["verify", f"{root}/run"]):
        invoke(*command)
    assert "nothing at" in invoke("ls", f"{root}/nothing", code=2).output


def test_credentials_are_written_nowhere(root, endpoint, tmp_path, monkeypatch, caplog, capfd):
    """Neither objects, local files, logs, messages, pickles nor the arguments of the writer hold a credential."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    caplog.set_level(logging.DEBUG)
    by_hand = ObjectStorage(root, {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET})
    seen = [json.dumps(by_hand.describe()), repr(by_hand), pickle.dumps(by_hand).decode("latin-1")]
    saved = hf.save(hf.Checkpoint("single", by_hand), {"w": torch.ones(5)})
    seen += [repr(saved), pickle.dumps(saved).decode("latin-1")]
    with hf.Checkpointer(by_hand.child("run"), {"w": torch.ones(5)}, every=1) as ck:
        process = Path(f"/proc/{ck._session.client.process_id}")
        seen += [(process / "cmdline").read_text(), (process / "environ").read_text()]
        for _ in range(2):
            ck.step(loss=0.5)
    refused = ObjectStorage(
        f"s3://no-such-bucket-{os.getpid()}/x",
        {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET},
    )
    nobody = ObjectStorage(
        "s3://nobody/x",
        {"endpoint": "http://127.0.0.1:1", "access_key_id": KEY, "secret_access_key": SECRET, "max_retries": 0},
    )
    for place in (refused, nobody):
        with pytest.raises(OSError, match="cannot write") as caught:
            place.put("a", b"1")
        seen += [str(caught.value), repr(caught.value), repr(caught.getrepr(showlocals=False))]
    out, err = capfd.readouterr()
    seen += [out, err, caplog.text]
    s3 = client(endpoint)
    objects = s3.list_objects_v2(Bucket=BUCKET, Prefix=root.removeprefix(f"s3://{BUCKET}/"))["Contents"]
    assert len(objects) > 5
    for found in objects:
        answer = s3.get_object(Bucket=BUCKET, Key=found["Key"])
        seen += [answer["Body"].read().decode("latin-1"), json.dumps(answer["Metadata"]), found["Key"]]
    seen += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text[:300] for text in seen if SECRET in text or KEY in text]


def test_aborted_uploads_leave_no_parts(root, endpoint):
    """An upload that is given up half way takes its parts with it."""
    storage = resolve(root)
    writer = storage.create("big", 40 << 20)
    writer.write(memoryview(bytearray(24 << 20)))
    assert wait_until(lambda: client(endpoint).list_multipart_uploads(Bucket=BUCKET).get("Uploads"))
    writer.abort()
    assert not storage.exists("big")
    assert not client(endpoint).list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_unchanged_files_are_copied_by_the_server(root):
    """What did not change since the last checkpoint is not sent again, and each checkpoint has its own object."""
    frozen = torch.nn.Linear(500, 500).requires_grad_(False)
    head = torch.nn.Linear(500, 2)
    state = {"frozen": frozen, "head": head}
    with hf.Checkpointer(f"{root}/run", state, every=1) as ck:
        for _ in range(3):
            with torch.no_grad():
                head.weight += 1
            ck.step()
            ck.wait()
    newest = hf.Checkpoint(f"{root}/run/{_committed(f'{root}/run')[-1].split('/')[0]}")
    reused = [file for file in newest.manifest.files if file.reused_from]
    assert sum(file.size for file in reused) >= 1_000_000
    assert all(newest.storage.exists(f"{newest.directory}/{file.path}") for file in reused)


def test_directories_and_dictionaries(root, tmp_path):
    """A remote checkpoint can be had as a directory, and one made of a dictionary goes there."""
    saved = hf.save(f"{root}/one", {"w": torch.ones(5)})
    target = saved.to_directory(tmp_path / "copy")
    assert torch.equal(hf.load(target)["w"], torch.ones(5))
    with saved.as_directory() as folder:
        assert (Path(folder) / "manifest.json").exists()


_USER = """
import sys
from holdfast import Checkpoint
with Checkpoint(sys.argv[1]).as_directory() as path:
    print(path, flush=True)
    sys.stdin.readline()
"""


def test_a_machine_downloads_once(root, endpoint, tmp_path, monkeypatch):
    """Several processes that want the same checkpoint as a directory share one download, which goes with the last."""
    saved = hf.save(f"{root}/one", {"w": torch.randn(500_000)})
    (tmp_path / "tmp").mkdir()
    with FaultProxy(endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        command = [sys.executable, "-c", _USER, saved.uri]
        environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        users = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        paths = {user.stdout.readline().strip() for user in users}
        assert len(paths) == 1
        assert len(list((tmp_path / "tmp").glob("*/*/data"))) == 1
        received = sum(one.received_bytes for one in proxy.exchanges if ".safetensors" in one.path)
        assert torch.equal(hf.load(paths.pop())["w"], hf.load(saved.uri)["w"])
        for user in users:
            user.communicate("\n", timeout=60)
            assert user.returncode == 0
    assert 2_000_000 <= received < 3_000_000
    assert not list((tmp_path / "tmp").glob("*/*/data"))


def test_run_through_faults(tmp_path):
    """With a fifth of the requests going wrong every save of a run is committed, in the writer process, and loads."""
    chance = random.Random(51)
    with GoogleStub() as stub:
        thread = threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        faults = ("500", "503", "lost", "unanswered")
        stub.fault = lambda: chance.choice(faults) if chance.random() < 0.2 else ""
        storage = ObjectStorage("gs://bucket/runs", {"base_url": stub.url, "bearer_token": "secret-token"})
        state = {"w": torch.zeros(5_000_000)}
        with hf.Checkpointer(storage.child("run"), state, every=1, keep=hf.Keep(last=9)) as ck:
            assert ck._session.client.process_id is not None
            for _ in range(5):
                state["w"] += 1
                ck.step()
                ck.wait()
        assert stub.num_faults > 5
        names = sorted(info.path for info in storage.list() if info.path.endswith("/manifest.json"))
        assert len(names) == 5
        for number, name in enumerate(names, 1):
            found = hf.load(hf.Checkpoint.at(storage.child("run"), name.split("/")[1]))
            assert torch.equal(found["w"], torch.full((5_000_000,), float(number)))
        stub.shutdown()
        thread.join(10)


def test_an_endpoint_in_the_uri(endpoint, monkeypatch) -> None:
    """As pyarrow has it, for runs and for single checkpoints; workers get it too."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    place = f"?endpoint_override={endpoint.removeprefix('http://')}&scheme=http"
    hf.save(f"s3://{BUCKET}/by-uri/one{place}", {"step": 3})
    checkpoint = hf.Checkpoint(f"s3://{BUCKET}/by-uri/one{place}")
    assert (checkpoint.uri, checkpoint.load()) == (f"s3://{BUCKET}/by-uri/one", {"step": 3})
    assert resolve(f"s3://{BUCKET}/by-uri{place}").exists("one/manifest.json")
    with pytest.raises(ConfigError, match="ehdpoint is no setting"):
        resolve(f"s3://{BUCKET}/x?region=a&ehdpoint=b")
