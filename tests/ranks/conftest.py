"""One server of ranks for each test process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "kits"))

from ranks_kit import RankServer  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    preload = [str(HERE / f"{name}_cases.py") for name in ("joint", "fault", "rescue")]
    with RankServer(preload=preload) as server:
        yield server
