"""Checked by mypy (strict), never run: the public surface has the types its users rely on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from typing_extensions import assert_type

import holdfast as hf


def functions(model: torch.nn.Module) -> None:
    """`save`, `save_async` and `load`."""
    checkpoint = hf.save("a", {"model": model}, step=1, metrics={"loss": 0.5})
    assert_type(checkpoint, hf.Checkpoint)
    handle = hf.save_async("b", {"model": model})
    assert_type(handle, hf.SaveHandle)
    assert_type(handle.result(timeout_s=1.0), hf.Checkpoint)
    assert_type(handle.done(), bool)
    assert_type(handle.exception(), BaseException | None)
    hf.load(checkpoint, {"model": model}, only="model", dtype=torch.float32)


def checkpointer(model: torch.nn.Module, loader: Any) -> None:
    """`Checkpointer` and what it hands out."""
    keep = hf.Keep(last=1, best=2, metric="loss", mode="max", every=timedelta(hours=1))
    with hf.Checkpointer("run", {"model": model, "rng": hf.RNG}, every=["10ba", "2ep"], keep=keep) as ck:
        for epoch in ck.epochs(2):
            assert_type(epoch, int)
            for _ in ck.batches(loader):
                ck.step(loss=1.0)
        assert_type(ck.latest(), hf.Checkpoint | None)
        assert_type(ck.resumed_from, hf.Checkpoint | None)
        assert_type(ck.checkpoints(), list[hf.Checkpoint])
        assert_type(ck.stats.last_durable_step, int)
        assert_type(ck.should_stop, bool)
    mirror = hf.Mirror("/scratch/run", keep=keep, max_behind=2, when_behind="wait", warn_after="1h")
    with hf.Checkpointer("s3://bucket/run", {"model": model}, local_dir=mirror) as ck:
        ck.wait(remote=True)
        assert_type(ck.stats.last_remote_step, int)
        assert_type(ck.stats.seconds_since_remote, float | None)


def errors() -> None:
    """Errors are also the builtins people catch."""
    error: ValueError = hf.ConfigError("x")
    other: FileNotFoundError = hf.CheckpointNotFoundError("x")
    print(error, other)


def other_formats(checkpoint: hf.Checkpoint) -> None:
    """`export` and `import_checkpoint`."""
    exported = hf.export(checkpoint, "x.pt", to="torch", only=["model"], dtype=torch.bfloat16)
    assert_type(exported, hf.Exported)
    assert_type(exported.left_out, tuple[tuple[str, str], ...])
    imported = hf.import_checkpoint("x.pt", "y", format="torch")
    assert_type(imported.checkpoint, hf.Checkpoint)
