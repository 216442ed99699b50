"""One server of ranks for each test process."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent

from ranks_kit import RankServer  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    with RankServer(preload=[str(HERE / "rank_cases.py"), str(HERE / "sharded_cases.py")], path=[HERE]) as server:
        yield server
