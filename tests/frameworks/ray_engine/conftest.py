"""One Ray cluster of several raylets on this machine; tests add nodes to it and take them away."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
_OTHERS = [str(_HERE.parents[1] / name) for name in ("trainers", "trainers/function")]
sys.path[:0] = [str(_HERE), *_OTHERS]

from cluster_kit import Nodes, start_head  # noqa: E402 - found by the line above


@pytest.fixture(scope="session")
def head() -> Iterator[Nodes]:
    """The head node, which the driver is on and no worker."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(_HERE), *_OTHERS, os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        patch.setenv("OMP_NUM_THREADS", "1")
        nodes = start_head()
        try:
            yield nodes
        finally:
            nodes.shutdown()


@pytest.fixture
def nodes(head: Nodes) -> Iterator[Nodes]:
    """The cluster; it has the nodes that a test adds to it, and no others once it has added one."""
    yield head
    head.release()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: a run that is left over calls Ray after its end, and Ray ends this process for that."""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)
