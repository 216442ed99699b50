"""Trainers on an object store whose credentials were given in Python: the workers get them, and nothing shows them."""

import json
import logging
import os
import pickle
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from object_kit import BUCKET, client, moto

import holdfast as hf
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.torch import TorchTrainer
from holdfast.trainers.function.transit import TravellingSecrets, learn_secrets, pack_secrets

KEY, SECRET = f"AKIA{uuid.uuid4().hex[:16].upper()}", f"given+by/hand-{uuid.uuid4().hex}=="


@pytest.fixture(scope="module")
def endpoint():
    with moto() as url:
        yield url


@pytest.fixture(autouse=True)
def no_other_keys(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "GCS_"))]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": tmp_path / "home", "TMPDIR": tmp_path / "tmp"}.items():
        value.mkdir()
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)


def by_hand(endpoint: str, kind: str):
    if kind == "pyarrow":
        fs = pytest.importorskip("pyarrow.fs", reason="pyarrow is not installed")
        host = endpoint.removeprefix("http://")
        return fs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=host, scheme="http"), BUCKET
    options = {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
    return ObjectStorage(f"s3://{BUCKET}", options), ""


def what_processes_show() -> list[str]:
    """Arguments and environments of all processes that can be seen."""
    shown = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                shown += [(process / name).read_bytes().decode("latin-1") for name in ("cmdline", "environ")]
            except OSError:
                continue
    return shown


def shown_of(parts: list[str]) -> int:
    """Count processes' texts with one of these (told backwards: the config that brings them is no leak)."""
    wanted = [part[::-1] for part in parts]
    return sum(part in text for text in what_processes_show() for part in wanted)


def train(config):
    """Report directories and states by turns, fail once after the second, go on from there."""
    checkpoint, step = hf.get_checkpoint(), 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            given = Path(folder, "step.json")
            step = json.loads(given.read_text()) if given.exists() else int(checkpoint.load()["step"])
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
    while step < config["first"] + 3:
        step += 1
        metrics = {"step": step, "shown": shown_of(config["parts"])}
        if step % 2:
            folder = Path(os.environ["TMPDIR"], f"report-{os.getpid()}")
            folder.mkdir(exist_ok=True)
            (folder / "step.json").write_text(json.dumps(step))
            hf.report(metrics, checkpoint=hf.Checkpoint.from_directory(folder), validation=True)
        else:
            hf.report(metrics, state={"w": torch.full((20_000,), float(step)), "step": step})
            newest = hf.get_checkpoint()
            print("step", step, "is", newest, len(hf.get_all_reported_checkpoints("committed")))
            if checkpoint is None or not checkpoint.name.startswith("checkpoint_"):
                raise RuntimeError(f"failed after {newest!r}")


def validate(checkpoint):
    """Read a checkpoint in a process of its own."""
    with checkpoint.as_directory() as folder:
        return {"seen": json.loads(Path(folder, "step.json").read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["object", "pyarrow"])
def test_given_by_hand(endpoint, tmp_path, capfd, caplog, kind):
    """Reports, states, validations and restarts work with keys that only the driver has; nothing shows them."""
    caplog.set_level(logging.DEBUG)
    filesystem, base = by_hand(endpoint, kind)
    prefix = f"runs-{kind}"
    trainer = TorchTrainer(
        train,
        train_loop_config={"first": 0, "parts": [KEY[::-1], SECRET[::-1]]},
        scaling_config=hf.ScalingConfig(num_workers=2),
        run_config=hf.RunConfig(
            name="run",
            storage_path=f"{base}/{prefix}".strip("/"),
            storage_filesystem=filesystem,
            failure_config=hf.FailureConfig(max_failures=1),
        ),
        validation=validate,
    )
    seen = [repr(trainer._options("run", trainer._root("run")))]
    result = trainer.fit()
    assert list(result.metrics_dataframe["step"]) == [1, 2, 3]
    assert list(result.metrics_dataframe["shown"]) == [0, 0, 0]
    assert len(result.attempts) == 2
    assert [metrics.get("seen") for _, metrics in result.best_checkpoints] == [1, None, 3]
    assert torch.equal(result.best_checkpoints[1][0].load()["w"], torch.full((20_000,), 2.0))
    seen += [repr(one) for one in (result, result.checkpoint, result.filesystem, result.attempts)]
    out, err = capfd.readouterr()
    seen += [out, err, caplog.text]
    s3 = client(endpoint, KEY, SECRET)
    objects = s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
    assert len(objects) > 8
    for found in objects:
        answer = s3.get_object(Bucket=BUCKET, Key=found["Key"])
        seen += [answer["Body"].read().decode("latin-1"), json.dumps(answer["Metadata"]), found["Key"]]
    seen += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text[:300] for text in seen if SECRET in text or KEY in text]
    # What the workers have printed is in the bucket too, and nowhere else.
    logs = {found["Key"]: found for found in objects if "/logs/" in found["Key"]}
    names = [f"attempt-{attempt:05d}/rank-{rank}.log" for attempt in (1, 2) for rank in (0, 1)]
    assert {f"{prefix}/run/logs/{name}" for name in names} <= set(logs)
    body = s3.get_object(Bucket=BUCKET, Key=f"{prefix}/run/logs/{names[0]}")["Body"].read().decode()
    assert "step 2 is" in body
    assert "failed after" in body
    assert not list((tmp_path / "tmp").glob("holdfast-logs-*"))


def test_starting_from_elsewhere(endpoint, tmp_path):
    """A run on a local disk starts from a checkpoint in a bucket whose keys only the driver has."""
    filesystem, _ = by_hand(endpoint, "object")
    saved = hf.save(hf.Checkpoint("elsewhere/best", filesystem), {"w": torch.ones(3), "step": 10})
    result = TorchTrainer(
        train,
        train_loop_config={"first": 8, "parts": []},
        run_config=hf.RunConfig(name="run", storage_path=tmp_path),
        resume_from_checkpoint=saved,
        validation=validate,
    ).fit()
    assert list(result.metrics_dataframe["step"]) == [11]


def test_the_search_finds_something():
    """What looks for credentials in processes finds those that are shown."""
    with subprocess.Popen([sys.executable, "-c", "input()", SECRET], stdin=subprocess.PIPE) as process:
        until = time.monotonic() + 20
        while not (shown := shown_of([SECRET[::-1]])) and time.monotonic() < until:
            time.sleep(0.01)  # Popen returns with the exec; the kernel shows the new arguments a moment later
        assert shown >= 1
        process.communicate(b"\n", timeout=30)


def test_packed_secrets(endpoint):
    """A process that has learnt the credentials can rebuild and unpickle the storages; one that has not cannot."""
    filesystem, _ = by_hand(endpoint, "object")
    storage = filesystem.child("packed")
    packed = pack_secrets(storage, hf.storage.resolve("memory://plain"))
    assert SECRET in packed.decode()
    assert pack_secrets(hf.storage.resolve("memory://plain")) == b""
    task = pickle.dumps((TravellingSecrets(packed), hf.Checkpoint.at(storage, "one")))
    script = """
import pickle, sys
from holdfast.storage import from_description
description, task = pickle.load(sys.stdin.buffer)
assert from_description(description).secrets() is None
_, checkpoint = pickle.loads(task)
print(from_description(description).secrets() == checkpoint.storage.secrets(), checkpoint.storage.secrets())
"""
    told = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps((storage.describe(), task)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout.decode()
    assert told.startswith("True ")
    assert SECRET in told
    learn_secrets(b"")
