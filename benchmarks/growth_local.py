"""What grows on a local disk: checkpoints in one run, files in one directory. Sizes in powers of ten.

A slope of 0 is flat, of 1 linear.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import holdfast as hf
from holdfast.format.manifest import MANIFEST_NAME, Manifest
from holdfast.run.catalog import Catalog
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import IngestJob, IngestSource

from .bench import Context, Goal, Outcome, remove, timed
from .catalog import fabricate

__all__ = ["run"]


def run(context: Context) -> Outcome:
    """Measure each thing that grows."""
    outcome = Outcome()
    _many_checkpoints(context, outcome)
    _many_files(context, outcome)
    return outcome


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent by which a value grows with the size: 0 is flat, 1 is linear."""
    return math.log(values[-1] / values[0]) / math.log(sizes[-1] / sizes[0])


class _Counting(LocalStorage):
    """Counts the bytes of the index."""

    index_bytes = 0

    def put(  # type: ignore[no-untyped-def]  # as the storage has it
        self, path, data, **conditions
    ):
        if path.startswith("run"):
            self.index_bytes += len(data)
        return super().put(path, data, **conditions)


def _many_checkpoints(context: Context, outcome: Outcome) -> None:
    """Runs of growing size: enter, save, list; and what the index and retention alone take of a save."""
    sizes = (10, 100) if context.quick else (100, 1_000, 10_000)
    saves = 3 if context.quick else 20
    for count in sizes:
        method = f"{count} checkpoints"
        root = context.folder("runs")
        fabricate(root, count)
        for turn in range(context.repeat + 1):
            keep = hf.Keep(last=count, best=2, metric="val_loss")
            start = time.perf_counter()
            with hf.Checkpointer(root, {"w": torch.zeros(8)}, resume="never", every=None, keep=keep) as ck:
                entered = time.perf_counter() - start
                seconds = []
                for _ in range(saves):
                    ck.step()
                    start = time.perf_counter()
                    ck.save(val_loss=0.5)
                    ck.wait()
                    seconds.append(time.perf_counter() - start)
            listed = timed(lambda root=root: hf.Checkpointer(root).checkpoints())  # type: ignore[misc]
            outcome.add(
                method, first=not turn, enter_ms=1000 * entered, save_ms=1000 * min(seconds), list_ms=1000 * listed
            )
        for name, rules in (
            ("last", hf.Keep(last=count)),
            ("best", hf.Keep(best=count, metric="val_loss")),
        ):
            outcome.add(method, **_decide(root, rules, 10 * saves, name))
        remove(root)
        context.say(f"{method}: entered in {outcome.median(method, 'enter_ms'):.0f} ms")
    large = f"{sizes[-1]} checkpoints"
    outcome.goals.append(
        Goal(what=f"enter a run of {large}", value=outcome.median(large, "enter_ms"), unit="ms", at_most=300.0)
    )
    for kind in ("save_ms", "last_cpu_ms", "best_cpu_ms", "last_bytes", "list_ms", "enter_ms"):
        values = [outcome.median(f"{size} checkpoints", kind) for size in sizes]
        flat = None if kind in ("list_ms", "enter_ms", "last_bytes") else 0.15
        outcome.goals.append(
            Goal(what=f"{kind}: slope over {sizes[0]} to {sizes[-1]} checkpoints", value=slope(sizes, values), unit="",
                 at_most=flat, note=" ".join(f"{value:.3g}" for value in values))
        )  # fmt: skip


def _decide(root: Path, keep: hf.Keep, saves: int, name: str) -> dict[str, float]:
    """Enter checkpoints as the writer does; what one of them takes, without its files: CPU time and index bytes."""
    storage = _Counting(root)
    catalog = Catalog(storage)
    step = max(row[2] for row in catalog.index.rows.values())

    def enter() -> None:
        nonlocal step
        step += 1
        directory = f"{name}_{step:08d}"
        manifest = Manifest(
            run_id=catalog.index.run_id,
            checkpoint_id=f"{step:016x}",
            attempt=catalog.index.attempts[-1].attempt,
            step=step,
            created="2026-01-01T00:00:00Z",
            metrics={"val_loss": 0.5},
            files=(),
        )
        (root / directory).mkdir()
        (root / directory / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        catalog.add(directory, manifest)

    enter()
    while True:  # what the rules before had kept
        catalog.prune(keep)
        if not catalog.num_behind:
            break
    cpu = 0.0
    storage.index_bytes = 0
    for _ in range(saves):
        enter()
        start = time.process_time()
        catalog.prune(keep)
        cpu += time.process_time() - start
    return {f"{name}_cpu_ms": 1000 * cpu / saves, f"{name}_bytes": storage.index_bytes / saves}


def _many_files(context: Context, outcome: Outcome) -> None:
    """A directory of small files: reported (SYNC, left where it is), and copied out again, beside copytree and sync."""
    sizes = (10, 100) if context.quick else (1_000, 10_000, 100_000)
    for count in sizes:
        method = f"{count} small files"
        source = context.folder("source")
        for number in range(count):
            home = source / f"{number % -(-count // 100):04d}"
            home.mkdir(parents=True, exist_ok=True)
            (home / f"{number}.bin").write_bytes(os.urandom(1000 + number % 3000))
        os.sync()
        for turn in range(context.repeat + 1 if count < 100_000 else 2):
            root = context.folder("files")
            root.mkdir()
            seconds = {"copytree_s": timed(_copytree, source, root / "copytree")}
            seconds["report_s"] = timed(_report, source, LocalStorage(root))
            seconds["out_s"] = timed(hf.Checkpoint(root / "ck").to_directory, root / "out")
            outcome.add(method, first=not turn, **seconds)
            remove(root)
        remove(source)
        context.say(f"{method}: reported in {outcome.median(method, 'report_s'):.2f} s")
    large = f"{sizes[-1]} small files"
    for kind, what, bound in (("report_s", "report, SYNC", 2.0), ("out_s", "to_directory", 1.5)):
        ratio = outcome.median(large, kind) / outcome.median(large, "copytree_s")
        outcome.goals.append(Goal(what=f"{what} / copytree and sync, {large}", value=ratio, at_most=bound))
        values = [outcome.median(f"{size} small files", kind) for size in sizes]
        outcome.ratios[f"{kind}: slope"] = slope(sizes, values)


def _report(source: Path, storage: LocalStorage) -> None:
    """Do what a report does in the writer, and start one: some milliseconds of it."""
    job = IngestJob(
        directory="ck",
        save_id="aaaaaaaa-1",
        sources=(IngestSource(rank=0, path=str(source)),),
        manifest={"checkpoint_id": "aaaaaaaa-1", "attempt": 1, "step": 1},
        run=False,
    )
    with WriterClient.start() as client:
        client.ingest(storage, job).result(600)


def _copytree(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    os.sync()
