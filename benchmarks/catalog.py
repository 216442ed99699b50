"""Runs with many checkpoints: open, latest, listing, one save with retention. The time should not grow."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

import holdfast as hf
from holdfast.format.manifest import Manifest
from holdfast.run.index import RunIndex
from holdfast.run.record import Sidecar, pack, record_from_manifest
from holdfast.storage.local.local_storage import LocalStorage

from .bench import Context, Goal, Outcome, remove, timed

__all__ = ["fabricate", "run"]


def run(context: Context) -> Outcome:
    """Measure runs of growing size."""
    outcome = Outcome()
    counts = (10, 100) if context.quick else (100, 1_000, 10_000)
    for count in counts:
        root = context.folder("runs")
        fabricate(root, count)
        method = f"{count} checkpoints"
        newest = hf.Checkpointer(root).latest()
        if newest is None or newest.step != count - 1:
            raise AssertionError(f"latest is {newest}")
        for turn in range(context.repeat + 1):
            outcome.add(
                method,
                first=not turn,
                latest_ms=1000 * timed(lambda root=root: hf.Checkpointer(root).latest()),  # type: ignore[misc]
                list_ms=1000 * timed(lambda root=root: hf.Checkpointer(root).checkpoints()),  # type: ignore[misc]
            )
        for turn in range(2):
            outcome.add(method, first=not turn, cli_ls_ms=1000 * timed(_ls, root))
        for turn in range(2 if context.quick else 3):
            _live(outcome, root, method, count, first=not turn)
        context.say(f"{method}: latest {outcome.median(method, 'latest_ms'):.1f} ms")
        remove(root)
    small, large = (f"{count} checkpoints" for count in (counts[0], counts[-1]))
    latest = outcome.median(large, "latest_ms")
    outcome.goals.append(Goal(what=f"open a run with {large} and ask latest", value=latest, unit="ms", at_most=50.0))
    for kind in ("list_ms", "cli_ls_ms", "enter_ms", "save_ms"):
        outcome.goals.append(Goal(what=f"{kind[:-3]}, {large}", value=outcome.median(large, kind), unit="ms"))
        outcome.ratios[f"{kind}: {large} / {small}"] = outcome.median(large, kind) / outcome.median(small, kind)
    outcome.ratios[f"latest_ms: {large} / {small}"] = latest / outcome.median(small, "latest_ms")
    return outcome


def fabricate(root: Path, count: int) -> None:
    """Write a run whose checkpoints have a valid manifest and no files."""
    root.mkdir(parents=True)
    storage = LocalStorage(root)
    index = RunIndex.load(storage)
    index.register_attempt("abcdef0123", host="bench", pid=1)
    for number in range(count):
        name = f"step_{number:08d}"
        manifest = Manifest(
            run_id=index.run_id,
            checkpoint_id=f"{number:016x}",
            attempt=1,
            step=number,
            epoch=number / 100,
            created="2026-01-01T00:00:00Z",
            metrics={"val_loss": 0.123456 * number, "accuracy": 0.5},
            total_bytes=10,
            files=(),
        )
        (root / name).mkdir()
        (root / name / "manifest.json").write_bytes(manifest.to_bytes())
        index.rows[name] = pack(record_from_manifest(name, manifest, Sidecar()))
    index.save()


def _ls(root: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli.main", "ls", str(root), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _live(outcome: Outcome, root: Path, method: str, count: int, *, first: bool) -> None:
    """Enter a training run, save one step with retention at work, leave."""
    start = time.perf_counter()
    keep = hf.Keep(last=count, best=2, metric="val_loss")
    with hf.Checkpointer(root, {"weight": torch.zeros(8)}, resume="never", every=None, keep=keep) as ck:
        entered = time.perf_counter() - start
        ck.step()
        start = time.perf_counter()
        ck.save()
        ck.wait()
        saved = time.perf_counter() - start
        start = time.perf_counter()
    left = time.perf_counter() - start
    outcome.add(method, first=first, enter_ms=entered * 1000, save_ms=saved * 1000, leave_ms=left * 1000)
