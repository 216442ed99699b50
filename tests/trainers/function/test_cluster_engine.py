"""The engine suite on two nodes, each an agent in a process of its own on this machine."""

from __future__ import annotations

import pytest
from engine_suite import EngineTests
from nodes_kit import FakeNodes

from holdfast.trainers.function.engine import Engine
from holdfast.trainers.function.engines.process_engine import ClusterEngine


@pytest.mark.slow  # the same behaviours as on one machine, which the local engine shows in the ordinary suite
class TestClusterEngine(EngineTests):
    prefix = r"\(rank 1, node [ab]\) "

    @classmethod
    def make_engine(cls) -> Engine:
        return ClusterEngine(FakeNodes(a=2, b=2), entry="engine_peer:serve")
