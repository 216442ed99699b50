"""An owner that was taken over while it stood still wakes up: nothing it does then counts, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
from object_kit import BUCKET, client, moto
from test_crash_sweep import copy_tree

from holdfast.testing import Fault, FaultProxy

HERE = Path(__file__).parent
FILE = str(HERE / "sleeper_scenarios.py")
BASES = str(HERE / "crash_scenarios.py")


@pytest.fixture(scope="module")
def forks(ranks):
    return ranks


@pytest.fixture(scope="module")
def bases(forks, tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    for prepare in ("prepare_run", "prepare_one"):
        forks.run(f"{BASES}:{prepare}", str(root / prepare)).checked()
    return root


LOCAL = {"run_case": "prepare_run", "overwrite_case": "prepare_one"}


def one_case(forks, bases, tmp_path, case, at, *, after):
    root, diary = tmp_path / f"{case}-{at}-{after}", tmp_path / f"{case}-{at}-{after}.diary"
    copy_tree(bases / LOCAL[case], root)
    outcome = forks.run(f"{FILE}:{case}", str(root), str(diary), at, after, timeout_s=90.0)
    assert outcome.status == 0, f"{case}: stopped at operation {at} ({after=}): {outcome.error}\n{outcome.output}"
    shutil.rmtree(root)
    return outcome.value


def sweep(forks, bases, tmp_path, case, *, stride=1, first=None):
    count = one_case(forks, bases, tmp_path, case, None, after=False)["count"]
    cases = [(at, after) for at in range(count) for after in (False, True)]
    cases = cases[stride // 2 if first is None else first :: stride]
    told = [one_case(forks, bases, tmp_path, case, at, after=after) for at, after in cases]
    assert sum(one["stopped"] for one in told) >= 0.9 * len(told) - 1
    return told


@pytest.mark.parametrize("case", LOCAL)
def test_some_moments(forks, bases, tmp_path, case):
    """On a disk: stopped before and after some of the operations."""
    sweep(forks, bases, tmp_path, case, stride=113 if case == "run_case" else 23)


@pytest.mark.long
@pytest.mark.parametrize("first", range(6))
def test_every_moment_of_a_run(forks, bases, tmp_path, first):
    """On a disk: stopped before and after every operation of two saves, retention, late metrics and the end."""
    told = [one for one in sweep(forks, bases, tmp_path, "run_case", stride=6, first=first) if one["stopped"]]
    assert {one["start"] for one in told} >= {3, 4, 5}
    assert any("lost to" in one["error"] for one in told)
    assert sum(one["refused"] for one in told) <= 4, "the moments of a swap, and no others"


@pytest.mark.slow
def test_every_moment_of_an_overwrite(forks, bases, tmp_path):
    """On a disk: stopped before and after every operation while another process overwrites the same checkpoint."""
    assert sweep(forks, bases, tmp_path, "overwrite_case")


# ---- object stores


@pytest.fixture(scope="module")
def server():
    with moto() as url:
        yield url


@pytest.fixture
def proxy(server):
    with FaultProxy(server) as one:
        yield one


class Bucket:
    """The run that every case begins with, kept in memory."""

    def __init__(self, forks, server):
        self._s3 = client(server)
        forks.run(f"{FILE}:prepare_bucket", server, f"s3://{BUCKET}/base").checked()
        self._base = self._read("base/")

    def fresh(self, prefix):
        for key, data in self._base.items():
            self._s3.put_object(Bucket=BUCKET, Key=f"{prefix}{key}", Body=data)

    def remove(self, prefix):
        for key in self._keys(prefix):
            self._s3.delete_object(Bucket=BUCKET, Key=key)

    def _keys(self, prefix):
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def _read(self, prefix):
        keys = self._keys(prefix)
        return {key[len(prefix) :]: self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


@pytest.fixture(scope="module")
def bucket(forks, server):
    return Bucket(forks, server)


class Stopper:
    """Called by the proxy at each request: stops the first owner at the one of number ``at``, counted once it is armed.

    Args:
        armed: file that says which process, from when on.
        at: which request.
        proxy: that calls.
        carried_out: the server does its work first, and the answer is lost.
        lost: the connection breaks, and who wakes up has to ask again.
    """

    def __init__(self, armed, at, proxy, *, carried_out, lost):
        self._armed, self._at, self._proxy, self._carried_out, self._lost = armed, at, proxy, carried_out, lost
        self.count = 0

    def __call__(self, one):
        if not self._armed.exists() or not (pid := self._armed.read_text()):
            return False
        number, self.count = self.count, self.count + 1
        if self._carried_out and number + 1 == self._at:
            stop = Fault(kind="call", call=lambda _: os.kill(int(pid), signal.SIGSTOP), carried_out=True, times=1)
            self._proxy.inject(stop)  # instead of this one: the next request
        if self._carried_out or number != self._at:
            return False
        os.kill(int(pid), signal.SIGSTOP)
        return self._lost


# Whether the request is carried out, and whether its answer is lost.
WAYS = [(False, False), (False, True), (True, True)]


def remote_case(forks, server, bucket, proxy, tmp_path, at, way, *, mirrored):
    prefix = f"at-{at}-{WAYS.index(way)}-{mirrored}/"
    bucket.fresh(prefix)
    diary = tmp_path / prefix[:-1]
    carried_out, lost = way
    stopper = Stopper(Path(f"{diary}.armed"), at, proxy, carried_out=carried_out, lost=lost)
    proxy.inject(Fault(kind="call", call=stopper))
    args = (proxy.url, server, f"s3://{BUCKET}/{prefix[:-1]}", str(diary), mirrored)
    outcome = forks.run(f"{FILE}:remote_case", *args, timeout_s=150.0)
    assert outcome.status == 0, f"stopped at request {at} {way}: {outcome.error}\n{outcome.output}"
    bucket.remove(prefix)
    for who in "ab":
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(f"{diary}-{who}")
    return outcome.value, stopper.count


def remote_sweep(forks, server, bucket, proxy, tmp_path, *, mirrored, stride, first=None):
    _, count = remote_case(forks, server, bucket, proxy, tmp_path, -1, WAYS[0], mirrored=mirrored)
    cases = [(at, way) for at in range(count) for way in WAYS]
    cases = cases[stride // 2 if first is None else first :: stride]
    told = [remote_case(forks, server, bucket, proxy, tmp_path, at, way, mirrored=mirrored)[0] for at, way in cases]
    assert sum(one["stopped"] for one in told) >= 0.8 * len(told) - 1
    return told


def test_one_request(forks, server, bucket, proxy, tmp_path):
    """On S3: stopped right when a manifest is sent; the request is lost, and sent again after the takeover."""
    armed = tmp_path / "manifest.armed"
    bucket.fresh("manifest/")
    stopped = []

    def stop(one):
        if stopped or not armed.exists():
            return False
        stopped.append(one.path)
        os.kill(int(armed.read_text()), signal.SIGSTOP)
        return True

    proxy.inject(Fault(kind="call", call=stop, method="PUT", path="step_0.*/manifest.json"))
    uri = f"s3://{BUCKET}/manifest"
    args = (proxy.url, server, uri, str(tmp_path / "manifest"), False)
    told = forks.run(f"{FILE}:remote_case", *args, timeout_s=100.0).checked()
    assert told["stopped"]
    assert len(stopped) == 1
    assert told["acked"] == 0, "it was not told that step 4 is durable"
    assert told["start"] == 3
    assert "lost to" in told["error"]


@pytest.mark.slow
@pytest.mark.parametrize("mirrored", [False, True])
def test_some_requests(forks, server, bucket, proxy, tmp_path, mirrored):
    """On S3, and with a local disk in front: stopped at one in six requests, each way in turn."""
    remote_sweep(forks, server, bucket, proxy, tmp_path, mirrored=mirrored, stride=17)


@pytest.mark.long
@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("mirrored", [False, True])
def test_every_request(forks, server, bucket, proxy, tmp_path, mirrored, first):
    """On S3, and with a local disk in front: stopped at every request, carried out or not, answered or not."""
    remote_sweep(forks, server, bucket, proxy, tmp_path, mirrored=mirrored, stride=7, first=first)
