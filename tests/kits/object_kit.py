"""Servers on loopback that speak S3 or Azure, started by fixtures and ended by them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

KEY, SECRET = "AKIAHOLDFASTTEST0001", "recognisable+SECRET/of-the-object-tests=="
AZURE_ACCOUNT = "devstoreaccount1"
# The key that Azurite documents for its one account: public by design.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
BUCKET = "holdfast-tests"

# Where `make test-frameworks` installs s3rver and azurite; make test does not.
NODE_HOME = Path(os.environ.get("HOLDFAST_TEST_NODE", Path(__file__).parents[1] / "stores"))


_numbers = itertools.count()


def free_port() -> int:
    """Find a port outside of those that the system lends to clients: nobody takes it before the server does."""
    while True:
        port = 12_000 + (os.getpid() * 97 + next(_numbers)) % 18_000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def server(command: list[str], port: int, *, timeout_s: float = 60.0) -> Iterator[str]:
    """Run a server until the block ends; its own process is all that is ended."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start (exit status {process.poll()})")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def s3_environment(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "no_proxy": "127.0.0.1,localhost",
    }


# Servers that nobody uses now, each with its end: to import moto takes longer than most files of tests.
_idle: list[tuple[str, contextlib.ExitStack]] = []


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Give a moto (S3 in the memory of one process) that is empty but for the bucket; it is used again after that."""
    pytest.importorskip("moto", reason="moto is not installed")
    pytest.importorskip("obstore", reason="obstore is not installed")
    is_used = bool(_idle)
    endpoint, end = _idle.pop() if is_used else _start_moto()
    try:
        if is_used:  # now: a writer may have outlived the tests before
            empty = urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST", data=b"")
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(empty, timeout=60).close()
        make_bucket(endpoint)
        yield endpoint
    except BaseException:
        end.close()
        raise
    _idle.append((endpoint, end))


def _start_moto() -> tuple[str, contextlib.ExitStack]:
    end, port = contextlib.ExitStack(), free_port()
    return end.enter_context(
        server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    ), end


def end_servers() -> None:
    """End the servers that are idle, as the last thing of a process of tests (tests/conftest.py)."""
    while _idle:
        _idle.pop()[1].close()


@contextlib.contextmanager
def moto_bucket() -> Iterator[str]:
    """Run moto with endpoint and credentials in the environment; gives the URI of its bucket."""
    with moto() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(endpoint).items():
            patch.setenv(name, value)
        yield f"s3://{BUCKET}"


def client(endpoint: str, key: str = KEY, secret: str = SECRET):
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, proxies={}),
    )


def make_bucket(endpoint: str, name: str = BUCKET, key: str = KEY, secret: str = SECRET) -> None:
    client(endpoint, key, secret).create_bucket(Bucket=name)


def node_command(name: str) -> str:
    """Find a server of npm, or skip the test."""
    found = NODE_HOME / "node_modules" / ".bin" / name
    if shutil.which("node") is None or not found.exists():
        pytest.skip(f"{name} is not installed in {NODE_HOME}: make test-frameworks (or set HOLDFAST_TEST_NODE)")
    return str(found)


def make_container(endpoint: str, name: str) -> None:
    """Make a container of Azurite by one request signed with its account key."""
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate

    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    canonical = "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    kind = "application/octet-stream"
    text = f"PUT\n\n\n\n\n{kind}\n\n\n\n\n\n\n{canonical}/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256)).decode()
    headers["Content-Type"] = kind
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{signature}"
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers, data=b"")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(request, timeout=20).close()
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it exists
            raise
