"""What the tests of mirrored runs share: a bucket behind a proxy that counts and breaks requests, and small runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from object_kit import BUCKET, KEY, SECRET

import holdfast as hf
from holdfast.format.commit import read_manifest
from holdfast.run.catalog import Catalog
from holdfast.storage import Storage
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.testing import Fault, FaultProxy

DOWN = Fault(kind="reset")


def bucket(proxy: FaultProxy, name: str) -> ObjectStorage:
    """A place in the bucket, seen through the proxy by a client that gives up soon."""
    return ObjectStorage(
        f"s3://{BUCKET}/{name}",
        {
            "endpoint": proxy.url,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
            "max_retries": 1,
            "deadline_s": 5,
        },
    )


def make_state(**more: Any) -> dict[str, Any]:
    return {"w": torch.zeros(50_000), **more}


def train(
    remote: Any, local: Path | hf.Mirror | None, steps: int, state: dict[str, Any] | None = None, **options: Any
) -> hf.Checkpointer:
    """Count up to ``steps`` in all, saving each one; the state is a function of the step."""
    with running(remote, local, state, **options) as (ck, state):
        step_to(ck, state, steps)
    return ck


@contextlib.contextmanager
def running(
    remote: Any, local: Path | hf.Mirror | None, state: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[hf.Checkpointer, dict[str, Any]]]:
    if isinstance(local, Path):
        local = hf.Mirror(local, max_behind=9)
    state = make_state() if state is None else state
    options = {"every": 1, "keep": None, "timeout_s": 60, **options}
    with hf.Checkpointer(remote, state, local_dir=local, **options) as ck:
        assert torch.equal(state["w"], torch.full_like(state["w"], float(ck.global_step)))
        yield ck, state


def step_to(ck: hf.Checkpointer, state: dict[str, Any], steps: int) -> None:
    while ck.global_step < steps:
        state["w"] += 1
        ck.step(loss=0.5)
        ck.wait()


def steps(storage: Storage) -> list[int]:
    """Steps of the committed checkpoints of a run whose files are all there, with the content that they say."""
    found = []
    for record in Catalog(storage).records():
        manifest = read_manifest(storage, record.name, check_sizes=True)
        loaded = hf.load(hf.Checkpoint.at(storage, record.name), only="w")["w"]
        assert torch.equal(loaded, torch.full_like(loaded, float(record.step)))
        assert manifest.step == record.step
        found.append(record.step)
    return sorted(found)


def puts(proxy: FaultProxy, word: str = "") -> list[str]:
    """Names of the files of checkpoints that were sent through the proxy, parts of large ones included."""
    return [
        one.path.rsplit("/", 1)[-1]
        for one in proxy.exchanges
        if one.method == "PUT" and "/step_" in one.path and word in one.path and one.status == 200
    ]


def be_impatient(ck: hf.Checkpointer, timeout_s: float) -> None:
    """Bound every wait from now on: not the start, which a busy machine may need longer for."""
    ck.options = dataclasses.replace(ck.options, timeout_s=timeout_s)
    ck._boundary._options = ck.options
    ck._session.timeout_s = ck._session.saves.timeout_s = timeout_s
