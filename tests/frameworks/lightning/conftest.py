"""Lightning talks a lot; its own warnings are not our errors."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from object_kit import BUCKET, moto, s3_environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        importlib.import_module(name)  # what is imported is what our objects belong to, whichever test is the first
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a local S3 server, with endpoint and credentials in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with moto() as endpoint:
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}"
