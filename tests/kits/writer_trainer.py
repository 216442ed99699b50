"""A trainer for the tests that kill one. Run as a script: mode, run directory."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from functools import cache
from pathlib import Path

import writer_kit as kit

from holdfast.storage import LocalStorage
from holdfast.writer.client import WriterClient


@cache
def contents() -> list[bytes]:
    """What is saved; not made by an import: a process of tests that holds much is slow to fork."""
    return [kit.noise(1, 48 * kit.MIB), kit.noise(2, 70_000)]


def say(*words: object) -> None:
    # One write, so that lines of a parent and its forked child do not mix.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(mode: str, root: str) -> None:
    storage = LocalStorage(root)
    client = WriterClient.start(storage)
    say("writer", client.process_id)
    opened = client.open_run(storage, owner={"start_id": f"{os.getpid():08x}"}).result(60)
    say("attempt", opened.attempt, "waited", opened.waited_s, "swept", len(opened.swept))
    start_id = f"{os.getpid():08x}"
    fields = {"run_id": opened.run_id, "attempt": opened.attempt}
    if mode in ("sealed", "fork"):
        arena = kit.fill(contents())
        arena.prefault()
        job = kit.make_job(contents(), start_id=start_id, run=True, manifest=fields)
        if mode == "fork" and os.fork() == 0:
            say("child", os.getpid(), *held())
            sys.stdin.readline()
            os._exit(0)
        client.submit(storage, job, [b"{}"], arena)
        say("submitted", job.directory)
    elif mode == "filling":
        arena = kit.fill(contents())
        job = kit.make_job(contents(), start_id=start_id, run=True, manifest=fields)
        future = client.submit(storage, job, [b"{}"], arena, filled=0)
        client.fill(future, 16 * kit.MIB)
        say("submitted", job.directory)
    elif mode == "unsealed":
        arena = kit.fill(contents())
        job = kit.make_job(contents(), start_id=start_id, run=True, windowed=True, manifest=fields)
        future = client.submit(storage, job, [b"{}"], arena)
        window = client.window(future, file_no=0, file_offset=0, arena_offset=0, nbytes=32 * kit.MIB)
        window.result(30)
        say("submitted", job.directory)
    elif mode == "intake":
        incoming = Path(root, f".incoming-{start_id}")
        files = {f"{rank}.bin": content for rank, content in enumerate(contents())}
        sources = {rank: kit.make_files(incoming / f"1-{rank}", files) for rank in (0, 1)}
        intake = kit.make_intake(sources, owned=True, start_id=start_id, run=True, **fields)
        client.ingest(storage, intake)
        say("submitted", intake.directory)
    elif mode == "part":
        arena = kit.fill(contents())
        job = kit.make_job(contents(), start_id=start_id, part=True, manifest=fields)
        client.submit(storage, job, [b"{}"], arena)
        say("submitted", job.save_id)
    time.sleep(60)


def held() -> list[str]:
    """What this process has open that belongs to the conversation with a writer."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in targets if target.startswith(("socket:", "/memfd:holdfast"))]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
