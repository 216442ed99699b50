"""S3 servers on this machine, the raw client at its best, and how others copy files to and from S3."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["BUCKET", "Peer", "RawClient", "Server", "make_peers", "run_server"]

BUCKET = "holdfast-bench"
_MIB = 1 << 20
# Where `make test-frameworks` installs servers of npm.
_NODE_HOME = Path(os.environ.get("HOLDFAST_TEST_NODE", Path(__file__).parents[1] / "tests" / "stores"))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: its name, its address, its keys."""

    name: str
    url: str
    key: str = "S3RVER"
    secret: str = "S3RVER"

    def environment(self) -> dict[str, str]:
        """What a user would set."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "no_proxy": str(urlsplit(self.url).hostname),
        }


@contextlib.contextmanager
def run_server(folder: Path, notes: list[str], *, quick: bool) -> Iterator[Server]:
    """Run s3rver (objects on disk, flat memory) or, without it, moto (objects in its memory, slow).

    With HOLDFAST_BENCH_S3, the URL of a server that runs already (the keys in AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY, a bucket "holdfast-bench" in it), that one is measured.
    """
    if not quick and (url := os.environ.get("HOLDFAST_BENCH_S3")):
        keys = (os.environ.get(f"AWS_{name}", "S3RVER") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        yield Server("a server of one's own", url, *keys)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    s3rver = _NODE_HOME / "node_modules" / ".bin" / "s3rver"
    if not quick and s3rver.exists() and shutil.which("node"):
        address = ["-a", "127.0.0.1", "-p", str(port)]
        command = [str(s3rver), "-d", str(folder), *address, "-s", "--configure-bucket", BUCKET]
        server = Server("s3rver", f"http://127.0.0.1:{port}")
    elif importlib.util.find_spec("moto") is not None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = Server("moto", f"http://127.0.0.1:{port}")
        if not quick:
            notes.append(
                "s3rver is not installed (make test-frameworks, or HOLDFAST_TEST_NODE): moto and a small state"
            )
    else:
        raise RuntimeError("no S3 server: pip install 'moto[server,s3]', or make test-frameworks")
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{server.name} did not start (exit status {process.poll()})")
            time.sleep(0.05)
        if server.name == "moto":
            _make_bucket(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _make_bucket(server: Server) -> None:
    """Make the bucket by one request; moto looks at no signature."""
    request = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT", data=b"")
    scope = f"Credential={server.key}/20260101/us-east-1/s3/aws4_request"
    request.add_header("Authorization", f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).close()


class RawClient:
    """The client that Holdfast uses, alone: no digests, no manifest, nothing that is not bytes.

    Args:
        server: where.
        sizes: of the objects to move.
    """

    def __init__(self, server: Server, sizes: Sequence[int]) -> None:
        import obstore
        from obstore.store import S3Store

        self._obs = obstore
        self.store = S3Store(
            BUCKET,
            config={
                "endpoint": server.url,
                "region": "us-east-1",
                "access_key_id": server.key,
                "secret_access_key": server.secret,
            },
            client_options={"allow_http": True, "timeout": "600s"},
        )
        self._sizes = sorted(sizes, reverse=True)
        self._memory = mmap.mmap(-1, self._sizes[0])
        for start in range(0, len(self._memory), _MIB):
            self._memory[start : start + 8] = start.to_bytes(8, "little")

    def upload(self, chunk: int, parallel: int) -> None:
        """Put all objects with multipart uploads; ``parallel`` parts under way in all."""

        async def put() -> None:
            at_once = min(len(self._sizes), 2)
            turns = asyncio.Semaphore(at_once)

            async def one(number: int, size: int) -> None:
                async with turns:
                    await self._obs.put_async(
                        self.store,
                        f"raw/{number}",
                        memoryview(self._memory)[:size],
                        chunk_size=chunk,
                        max_concurrency=max(1, parallel // at_once),
                    )

            await asyncio.gather(*(one(number, size) for number, size in enumerate(self._sizes)))

        asyncio.run(put())

    def download(self, chunk: int, parallel: int) -> None:
        """Get all bytes of all objects in ranges, ``parallel`` at once; they are dropped as they come."""
        ranges = [
            (f"raw/{number}", start, min(chunk, size - start))
            for number, size in enumerate(self._sizes)
            for start in range(0, size, chunk)
        ]

        def get(key: str, start: int, length: int) -> int:
            return len(self._obs.get_range(self.store, key, start=start, length=length))

        with ThreadPoolExecutor(parallel) as threads:
            moved = sum(threads.map(get, *zip(*ranges, strict=True)))
        assert moved == sum(self._sizes)

    def close(self) -> None:
        """Remove the objects."""
        self._obs.delete(self.store, [f"raw/{number}" for number in range(len(self._sizes))])
        self._memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How others copy a folder to a prefix of the bucket, and back."""

    name: str
    upload: Callable[[Path, str], object]
    download: Callable[[str, Path], object]


def make_peers(server: Server, notes: list[str]) -> list[Peer]:
    """Give those whose packages are there; the others are noted."""
    peers = []
    known = (("boto3 transfer", "boto3", _boto3), ("s3fs", "s3fs", _s3fs), ("pyarrow", "pyarrow", _pyarrow))
    for name, package, make in known:
        if importlib.util.find_spec(package) is None:
            notes.append(f"{name}: left out, {package} is not installed")
            continue
        try:
            peers.append(make(server))
        except Exception as error:
            notes.append(f"{name}: left out ({type(error).__name__}: {str(error)[:200]})")
    return peers


def _boto3(server: Server) -> Peer:
    """Its transfer manager: parts of 8 MiB as it has them, 16 threads (10 are the default)."""
    import boto3
    from boto3.s3.transfer import TransferConfig, create_transfer_manager
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=server.url,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=32, proxies={}),
    )
    config = TransferConfig(max_concurrency=16, preferred_transfer_client="classic")

    def upload(folder: Path, prefix: str) -> None:
        with create_transfer_manager(client, config) as manager:
            for path in folder.iterdir():
                manager.upload(str(path), BUCKET, f"{prefix}/{path.name}")

    def download(prefix: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]
        with create_transfer_manager(client, config) as manager:
            for one in found:
                manager.download(BUCKET, one["Key"], str(folder / one["Key"].rpartition("/")[2]))

    return Peer(name="boto3 transfer", upload=upload, download=download)


def _s3fs(server: Server) -> Peer:
    """As its documentation has it for many big files: asynchronous inside, parts of 50 MiB, 10 at once."""
    import s3fs

    fs: Any = s3fs.S3FileSystem(
        key=server.key,
        secret=server.secret,
        client_kwargs={"endpoint_url": server.url, "region_name": "us-east-1"},
        use_listings_cache=False,
        skip_instance_cache=True,
    )

    def upload(folder: Path, prefix: str) -> None:
        fs.put(f"{folder}/", f"{BUCKET}/{prefix}/", recursive=True)

    def download(prefix: str, folder: Path) -> None:
        fs.get(f"{BUCKET}/{prefix}/", f"{folder}/", recursive=True)

    return Peer(name="s3fs", upload=upload, download=download)


def _pyarrow(server: Server) -> Peer:
    """As Ray Train uses it: copy_files with threads; chunks of 8 MiB instead of 1 MiB."""
    from pyarrow import fs

    remote = fs.S3FileSystem(
        access_key=server.key,
        secret_key=server.secret,
        endpoint_override=server.url.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=False,
    )
    local = fs.LocalFileSystem()

    def copy(source: str, target: str, source_fs: Any, target_fs: Any) -> None:
        fs.copy_files(source, target, source_fs, target_fs, chunk_size=8 * _MIB, use_threads=True)

    def upload(folder: Path, prefix: str) -> None:
        copy(str(folder), f"{BUCKET}/{prefix}", local, remote)

    def download(prefix: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        copy(f"{BUCKET}/{prefix}", str(folder), remote, local)

    return Peer(name="pyarrow", upload=upload, download=download)
