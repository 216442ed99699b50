"""Cases are forked from the one process that has torch."""

from __future__ import annotations

import pytest
from ranks_kit import RankServer


@pytest.fixture(scope="session")
def server(ranks: RankServer) -> RankServer:
    return ranks
