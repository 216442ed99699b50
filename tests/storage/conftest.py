"""An S3 server for the tests of a module, and a proxy before it for each test."""

import pytest
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
