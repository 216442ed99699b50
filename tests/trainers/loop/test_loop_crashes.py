"""A trainer with two savers that dies before any one of its disk operations leaves complete checkpoints only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.testing import CRASH_EXIT_CODE, ForkServer

FILE = Path(__file__).with_name("loop_crashes.py")


@pytest.fixture(scope="module")
def server() -> Any:
    with ForkServer(preload=("torch", "numpy", "holdfast.core", str(FILE))) as one:
        yield one


class Base(NamedTuple):
    root: Path
    remote: bool


@pytest.fixture(scope="module", params=[False, True], ids=["local", "remote"])
def base(request: pytest.FixtureRequest, server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Two saved batches, on a disk and on what behaves like a storage elsewhere."""
    root: Path = tmp_path_factory.mktemp("base") / "run"
    root.mkdir()
    server.run(f"{FILE}:prepare", str(root), remote=request.param).checked()
    return Base(root, request.param)


def killed(server: ForkServer, base: Base, tmp_path: Path, at: int) -> bool:
    """Kill at one operation and look; True if there was such an operation."""
    root = tmp_path / f"at-{at}"
    shutil.copytree(base.root, root, symlinks=True)
    died = server.run(f"{FILE}:third_batch", str(root), at, remote=base.remote)
    assert died.status in (CRASH_EXIT_CODE, 0), (at, died)
    looked = server.run(f"{FILE}:look", str(root), remote=base.remote)
    assert looked.status == 0, f"killed at operation {at}: {looked.error}\n{looked.output}"
    shutil.rmtree(root)
    return died.status == CRASH_EXIT_CODE


@pytest.mark.slow
def test_some_operations(server: ForkServer, base: Base, tmp_path: Path) -> None:
    """Killed at a few operations: each link leads to a complete checkpoint, and nothing is left behind."""
    root = tmp_path / "whole"
    shutil.copytree(base.root, root, symlinks=True)
    total = server.run(f"{FILE}:third_batch", str(root), None, remote=base.remote).checked()
    assert total > 20
    for at in range(5, total, total // 3):
        killed(server, base, tmp_path, at)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(4))
def test_every_operation(server: ForkServer, base: Base, tmp_path: Path, first: int) -> None:
    """Killed at every operation of a save with two savers, their links and their retention."""
    at = first
    while killed(server, base, tmp_path, at):
        at += 4
    assert at > 20
