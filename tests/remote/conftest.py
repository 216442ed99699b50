"""An S3 server for the tests of a module and a proxy before it for each test; one server of ranks for each process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_fixtures import local, proxy, remote, server
from ranks_kit import RankServer

__all__ = ["local", "proxy", "ranks", "remote", "server"]

TESTS = Path(__file__).parents[1]
CASES = (TESTS / "ranks" / "joint_cases.py", TESTS / "remote" / "staged_rank_cases.py")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    with RankServer(preload=[str(path) for path in CASES]) as one:
        yield one
