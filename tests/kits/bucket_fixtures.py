"""An S3 server for the tests of a module, and a proxy before it for each test."""

from pathlib import Path

import pytest
from mirror_kit import bucket
from object_kit import moto

from holdfast.testing import FaultProxy


@pytest.fixture(scope="module")
def server():
    with moto() as url:
        yield url


@pytest.fixture
def proxy(server):
    with FaultProxy(server) as one:
        yield one


@pytest.fixture
def remote(proxy, request):
    return bucket(proxy, request.node.name)


@pytest.fixture
def local(tmp_path) -> Path:
    return tmp_path / "scratch"
