"""What the tests of the writer share: jobs made of plain bytes, and waiting for the end of a process."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import holdfast
from holdfast.format.commit import read_manifest
from holdfast.writer.arena import Arena
from holdfast.writer.messages import BlobPlan, FilePlan, IngestJob, IngestSource, SaveJob

SOURCES = Path(holdfast.__file__).parents[1]  # those under test, which may be a copy with a mistake (`make mutants`)
MIB = 1 << 20
_COUNTER = itertools.count(1)


def pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def noise(seed: int, nbytes: int) -> bytes:
    """Bytes that differ in every chunk and for every seed."""
    return random.Random(seed).randbytes(nbytes)


def fill(contents: list[bytes]) -> Arena:
    """An arena with these files one after another, each padded to whole pages."""
    arena = Arena.create(max(4096, sum(pages(len(item)) for item in contents)))
    offset = 0
    for item in contents:
        arena.view[offset : offset + len(item)] = item
        offset += pages(len(item))
    return arena


def make_job(contents: list[bytes], *, step: int = 1, start_id: str = "aaaaaaaa", **fields: Any) -> SaveJob:
    save_id = f"{start_id}-{next(_COUNTER):x}"
    stable = fields.pop("stable", ())
    directory = fields.pop("directory", f"step_{step:08d}")
    files, offset = [], 0
    for number, item in enumerate(contents):
        path = f"item{number}-00000-{save_id}.safetensors"
        files.append(FilePlan(path=path, size=len(item), arena_offset=offset, stable=number in stable))
        offset += pages(len(item))
    manifest = {"run_id": "run", "checkpoint_id": f"id-{save_id}", "attempt": 1, "step": step}
    manifest.update(fields.pop("manifest", {}))
    return SaveJob(
        directory=directory,
        save_id=save_id,
        files=tuple(files),
        blobs=(BlobPlan(path=f"state-{save_id}.json", role="state"),),
        manifest=manifest,
        **fields,
    )


def stored(storage: Any, directory: str) -> dict[str, bytes]:
    """Every file that the manifest of a checkpoint lists."""
    manifest = read_manifest(storage, directory)
    return {entry.path: storage.read(f"{directory}/{entry.path}") for entry in manifest.files}


def start_trainer(mode: str, root: Path) -> subprocess.Popen[str]:
    """A trainer of its own, leader of a process group, that prints what it did line by line."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("writer_trainer.py")), mode, str(root)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        **({"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}),
    )


def wait_line(trainer: subprocess.Popen[str], word: str) -> str:
    """Read the trainer's output up to the line that starts with ``word``; the rest of that line."""
    assert trainer.stdout is not None
    for line in trainer.stdout:
        if line.startswith(word):
            return line[len(word) :].strip()
    raise AssertionError(f"the trainer ended without saying {word!r}")


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory; names of empty directories end with "/"."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            if not any(path.iterdir()):
                found[f"{name}/"] = b""
        else:
            found[name] = path.read_bytes()
    return found


def make_files(root: Path, files: dict[str, bytes]) -> Path:
    """Write files below a directory, which is made in any case."""
    root.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def make_intake(
    sources: dict[int, Path], *, owned: bool = False, directory: str = "checkpoint_000001", **fields: Any
) -> IngestJob:
    """A job that takes one directory of each rank; ``fields`` go to the manifest."""
    save_id = f"{fields.pop('start_id', 'aaaaaaaa')}-{next(_COUNTER):x}"
    run = fields.pop("run", False)
    return IngestJob(
        directory=directory,
        save_id=save_id,
        sources=tuple(IngestSource(rank=rank, path=str(path), owned=owned) for rank, path in sources.items()),
        manifest={"run_id": "run", "checkpoint_id": f"id-{save_id}", "attempt": 1, "step": 1, **fields},
        run=run,
    )
