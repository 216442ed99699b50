"""One S3 server for a module of tests, and runs that nothing disturbs, to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from filelock import FileLock
from hf_kit import result, run_script
from object_kit import moto, s3_environment


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server, with endpoint and credentials in the environment."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "GCS_"))]:
        monkeypatch.delenv(name)
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of the tiny GPT-2, trained by one process without Holdfast."""
    trainer = tiny.make(tmp_path_factory.mktemp("undisturbed"), [])
    trainer.train()
    return tiny.weights(trainer)


@pytest.fixture(scope="session")
def undisturbed_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same, trained by two ranks; once for all test processes."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    found = Path(shared, "ranks.json")
    with FileLock(f"{found}.lock"):
        if not found.exists():
            run_script("tiny.py", {"folder": str(Path(shared, "ranks")), "result": str(found)}, ranks=2)
    return result(found)["weights"]
