"""What rank 0's writer does for many ranks on a local disk: commit their parts, and remove such a checkpoint.

The ranks are simulated: their files are put there without a wait for the disk, four for each rank and its part file
with the samples of 64 tensors. Each sample is a process of its own, so that its peak of memory is that of one commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.format.commit import PartSummary, remove
from holdfast.format.division import Division
from holdfast.format.manifest import FileEntry
from holdfast.format.parts import part_name
from holdfast.format.strict_json import dumps
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.messages import PartsJob
from holdfast.writer.save import commit_parts

from . import bench
from .bench import Context, Goal, Outcome

__all__ = ["run"]

_ROOT = Path(__file__).resolve().parents[1]
_SAVE, _DIRECTORY = "aaaaaaaa-7", "step_00000001"
_DIGEST = "xxh3:43311fb92344635876f36522222dd63b"
_SAMPLES = {f"model/layers.{number}.self_attn.q_proj.weight": _DIGEST for number in range(64)}


def run(context: Context) -> Outcome:
    """Measure numbers of ranks in powers of ten."""
    outcome = Outcome()
    counts = (4, 40) if context.quick else (100, 1_000, 10_000)
    for count in counts:
        for turn in range(context.repeat + 1):
            root = context.folder("many")
            _store(root, count)
            os.sync()
            found = _measure(root)
            bench.remove(root)
            outcome.add(f"{count} ranks", first=not turn, **found)
            context.say(f"{count} ranks: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    most = f"{counts[-1]} ranks"
    for kind, unit, bound in (
        ("commit_s", "s", 1.5),
        ("commit_cpu_s", "s", None),
        ("remove_s", "s", 5.0),
        ("remove_cpu_s", "s", None),
        ("peak_mib", "MiB", 256.0),
    ):
        outcome.goals.append(Goal(what=f"{kind}, {most}", value=outcome.median(most, kind), unit=unit, at_most=bound))
    for kind in ("commit_cpu_s", "remove_cpu_s"):
        outcome.ratios[f"{kind}: {most} / {counts[0]} ranks"] = outcome.median(most, kind) / outcome.median(
            f"{counts[0]} ranks", kind
        )
    return outcome


def _files(rank: int) -> Iterator[FileEntry]:
    tail = f"{rank:05d}-{_SAVE}"
    table = f"digests-{tail}.bin"
    yield FileEntry(
        path=f"model-{tail}.safetensors", size=4120, digest=_DIGEST, role="tensors", writer=rank, chunks=(table, 0)
    )
    small = ((table, "digests", 8), (f"index-{tail}.json", "index", 169), (f"rank-{tail}.json", "rank", 30))
    for path, role, size in small:
        yield FileEntry(path=path, size=size, digest=_DIGEST, role=role, writer=rank)


def _store(root: Path, count: int) -> None:
    """Put there what the writers of all ranks have stored."""
    home = root / _DIRECTORY
    home.mkdir(parents=True)
    division = Division(num_ranks=count, structure="one", samples=_SAMPLES)
    for rank in range(count):
        files = tuple(_files(rank))
        for entry in files:
            (home / entry.path).write_bytes(bytes(entry.size))
        part = PartSummary(writer=rank, files=files, division=division)
        (home / part_name(rank, _SAVE)).write_bytes(dumps(part.to_json()))


def _measure(root: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.many", str(root)]
    ran = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def _work(root: str) -> dict[str, float]:
    storage = LocalStorage(root)
    count = sum(1 for name in os.listdir(Path(root, _DIRECTORY)) if name.startswith("part-"))
    before = _peak_mib()
    job = PartsJob(
        directory=_DIRECTORY,
        save_id=_SAVE,
        writers=tuple(range(count)),
        manifest={"run_id": "run", "checkpoint_id": "one", "attempt": 1, "step": 1, "world_size": count},
        wait_s=3.0,
        run=False,
        stored=True,
    )
    found = _timed("commit", lambda: commit_parts(storage, job, None, again=False))
    found |= _timed("remove", lambda: remove(storage, _DIRECTORY))
    return {**found, "peak_mib": _peak_mib() - before}


def _timed(name: str, work: Any) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {f"{name}_s": time.perf_counter() - wall, f"{name}_cpu_s": time.process_time() - cpu}


def _peak_mib() -> float:
    # Not `ru_maxrss`, which a new program inherits from the process that started it.
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    print(json.dumps(_work(sys.argv[1])))
