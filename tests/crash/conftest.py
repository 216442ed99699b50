"""One fork server for each test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing import ForkServer

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server():
    with ForkServer(preload=("torch", "numpy", "holdfast.checkpointer", str(HERE / "crash_scenarios.py"))) as one:
        yield one
