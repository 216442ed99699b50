"""A real radosgw behind TLS, with an authority of its own: conformance, a killed run, certificates."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_kit import BUCKET, KEY, SECRET, make_bucket, s3_environment
from radosgw_kit import Radosgw, why_not

import holdfast as hf
from holdfast.errors import StorageUnavailableError
from holdfast.storage import Storage
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.testing import StorageTests

pytest.importorskip("obstore", reason="obstore is not installed")
_reason = why_not()
pytestmark = [pytest.mark.frameworks, pytest.mark.skipif(_reason is not None, reason=str(_reason))]
_names = itertools.count()

TRAINER = """
import sys, torch, holdfast as hf
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
with hf.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, every=1, keep=hf.Keep(last=2)) as ck:
    print("from", ck.global_step, flush=True)
    while ck.global_step < int(sys.argv[2]):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        ck.step()
        ck.wait()
        print("step", ck.global_step, flush=True)
    print("end", float(model.weight.double().sum()), flush=True)
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Radosgw]:
    with (
        tempfile.TemporaryDirectory(prefix="hf-ceph-", dir="/tmp") as folder,
        Radosgw(Path(folder), KEY, SECRET) as one,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_CA_BUNDLE", str(one.authority))  # for boto3, which makes the bucket
        patch.setenv("SSL_CERT_FILE", str(one.authority))
        for name, value in s3_environment(one.endpoint).items():
            patch.setenv(name, value)
        make_bucket(one.endpoint)
        yield one


class TestRadosgw(StorageTests):
    @pytest.fixture
    def storage(self, gateway: Radosgw) -> Storage:
        return ObjectStorage(f"s3://{BUCKET}/conformance-{next(_names)}")


def test_a_run_that_is_killed(gateway: Radosgw) -> None:
    """Kill -9 in the middle: the next life goes on from a saved step, to the end of a run that nobody killed."""

    def start(name: str, steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TRAINER, f"s3://{BUCKET}/{name}", str(steps)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))

    killed = start("run", 10**6)
    assert killed.stdout is not None
    until = time.monotonic() + 120
    while "step 4" not in (line := killed.stdout.readline()):
        assert line, "it ended"
        assert time.monotonic() < until
    killed.kill()
    killed.wait()
    killed.stdout.close()
    ends = []
    for name in ("run", "twin"):
        told, _ = start(name, 9).communicate(timeout=200)
        begun = int(told.split("from ")[1].split()[0])
        assert (begun >= 4) == (name == "run")
        ends.append(told.split("end ")[1])
    assert ends[0] == ends[1]
    assert len(hf.Checkpointer(f"s3://{BUCKET}/run").checkpoints()) <= 3


def test_a_wrong_certificate(gateway: Radosgw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its authority, and by a name that it was not made out for, it is refused in words, at once."""
    limits = {"max_retries": 0, "deadline_s": 60, "timeout_s": 30}
    told = {"access_key_id": KEY, "secret_access_key": SECRET, **limits}

    def put(endpoint: str) -> None:
        ObjectStorage(f"s3://{BUCKET}/certificates", {"endpoint": endpoint, **told}).put("a", b"1")

    put(gateway.endpoint)
    with pytest.raises(StorageUnavailableError, match="made out for another name"):
        put(gateway.endpoint.replace("localhost", "127.0.0.1"))
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StorageUnavailableError, match=r"certificate is refused \(UnknownIssuer\).*SSL_CERT_FILE"):
        put(gateway.endpoint)
