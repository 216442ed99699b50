"""The engine suite on the local engine."""

from __future__ import annotations

import pytest
from engine_suite import EngineTests

from holdfast.trainers.function.engine import Engine
from holdfast.trainers.function.engines.process_engine import LocalEngine


@pytest.mark.usefixtures("all_forked")
class TestLocalEngine(EngineTests):
    @classmethod
    def make_engine(cls) -> Engine:
        return LocalEngine(entry="engine_peer:serve")
