"""Killed at any request to an object store: a fresh start finds the previous or the new checkpoint, and cleans up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
import remote_scenarios as scenarios
from object_kit import BUCKET, client, moto

from holdfast.run.fence import is_fence
from holdfast.testing import Fault, FaultProxy, ForkServer

HERE = Path(__file__).parent
FILE = str(HERE / "remote_scenarios.py")
CASES = list(scenarios.CASES)


@pytest.fixture(scope="module")
def server():
    with moto() as url:
        yield url


@pytest.fixture(scope="module")
def forks(server):
    preload = ("torch", "numpy", "holdfast.checkpointer", FILE)
    with ForkServer(preload=preload, path=[HERE]) as one:
        yield one


@pytest.fixture(scope="module")
def bucket(server):
    return Bucket(server)


@pytest.fixture
def proxy(server):
    with FaultProxy(server) as one:
        yield one


class Bucket:
    """The bucket as its owner sees it, with what there is before each case kept in memory."""

    def __init__(self, endpoint):
        self.s3, self._bases = client(endpoint), {}

    def read(self, prefix):
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [one["Key"] for page in pages for one in page.get("Contents", [])]
        return {key[len(prefix) :]: self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    def keys(self, prefix):
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {one["Key"][len(prefix) :] for page in pages for one in page.get("Contents", [])}

    def base(self, forks, server, case):
        home = scenarios.CASES[case][0].__name__
        if home not in self._bases:
            forks.run(f"{FILE}:prepare", case, server, f"s3://{BUCKET}/base/{home}").checked()
            self._bases[home] = self.read(f"base/{home}/")
        return self._bases[home]

    def fresh(self, prefix, objects):
        for key, data in objects.items():
            self.s3.put_object(Bucket=BUCKET, Key=f"{prefix}{key}", Body=data)

    def remove(self, prefix):
        for key in self.keys(prefix):
            self.s3.delete_object(Bucket=BUCKET, Key=f"{prefix}{key}")


class Killer:
    """Called by the proxy at each request: kills at the one of number ``at``, counted from `ARMED` on."""

    def __init__(self, pid_file, at, *, writer_too):
        self._pid_file, self._at, self._writer_too = pid_file, at, writer_too
        self.count, self._armed, self.struck = 0, False, threading.Event()

    def __call__(self, one):
        if one.path.endswith(f"/{scenarios.ARMED}"):
            self._armed = True
            return False
        number, self.count = self.count, self.count + self._armed
        if not self._armed or number != self._at:
            return self.struck.is_set() and self._writer_too  # nothing of the dead gets through
        trainer = int(Path(self._pid_file).read_text())
        children = Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split()
        for pid in [trainer, *(map(int, children) if self._writer_too else ())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.struck.set()
        return self._writer_too


def litter(keys, allowed):
    """What must not be there after a start. A probe is a byte that no listing shows; old ones go at a later start.

    Neither the lease of the last owner nor its fence, which holds until a higher one is drawn, is litter.
    """
    free = ("reports/", ".tmp-probe/", "lease.json")
    found = sorted(key for key in keys - set(allowed) if not key.startswith(free))
    fences = [key for key in found if is_fence(key)]
    return [key for key in found if key not in fences[-1:]]


def one_case(forks, server, bucket, proxy, tmp_path, case, at, *, writer_too):
    """Kill one life at one request, and look; give whether it was killed, the step found and the requests counted."""
    prefix = f"{case}-{at}-{writer_too}/"
    bucket.fresh(prefix, bucket.base(forks, server, case))
    killer = Killer(tmp_path / "pid", at, writer_too=writer_too)
    proxy.inject(Fault(kind="call", call=killer))
    uri = f"s3://{BUCKET}/{prefix[:-1]}"
    died = forks.run(f"{FILE}:life", case, proxy.url, uri, str(tmp_path / "pid"))
    assert died.status == (-9 if killer.struck.is_set() else 0), (case, at, died)
    looked = forks.run(f"{FILE}:check", case, server, uri, timeout_s=100.0)
    assert looked.status == 0, f"{case}: killed at request {at}: {looked.error}\n{looked.output}"
    step, allowed = looked.value
    left = litter(bucket.keys(prefix), allowed)
    assert not left, f"{case}: killed at request {at}: litter: {left}"
    bucket.remove(prefix)
    return killer.struck.is_set(), step, killer.count


def sweep(forks, server, bucket, proxy, tmp_path, case, *, writer_too, stride=1):
    _, last, count = one_case(forks, server, bucket, proxy, tmp_path, case, -1, writer_too=writer_too)
    found, deaths, numbers = {last}, 0, range(stride // 2, count, stride)
    for at in numbers:
        died, step, _ = one_case(forks, server, bucket, proxy, tmp_path, case, at, writer_too=writer_too)
        found.add(step)
        deaths += died
    # The last requests may differ from life to life: heartbeats, and what threads do side by side.
    assert deaths >= 0.9 * len(numbers) - 1
    return count, found


BOTH_SIDES = {"first": {0, 1}, "next": {3, 4}, "resume": {3}, "thin": {6, 7}, "overwrite": {1, 2}}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_some_requests(forks, server, bucket, proxy, tmp_path, case):
    """Trainer and writer killed together, at one in nineteen of the requests."""
    count, _ = sweep(forks, server, bucket, proxy, tmp_path, case, writer_too=True, stride=19)
    assert count >= 15


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_request(forks, server, bucket, proxy, tmp_path, case):
    """Trainer and writer killed together, at every request: exactly the previous or the new checkpoint, no litter."""
    _, found = sweep(forks, server, bucket, proxy, tmp_path, case, writer_too=True)
    assert found == BOTH_SIDES[case]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_alone(forks, server, bucket, proxy, tmp_path, case):
    """Only the trainer killed, at one in three of the requests: its writer finishes what is complete, and lets go."""
    _, found = sweep(forks, server, bucket, proxy, tmp_path, case, writer_too=False, stride=3)
    assert found <= BOTH_SIDES[case]
    assert max(found) == max(BOTH_SIDES[case])
