"""The peers, each at its best documented settings for one CPU process, behind one small interface.

Everybody gets the same flat dict of tensors and is charged for fsync: what a peer does not make durable itself is
fsynced (files and directories) after it says that it is done.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .bench import fsync_tree

__all__ = ["Peer", "Pending", "make_peers", "saving", "versions"]

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Pending:
    """A save under way.

    Attributes:
        free: returns when the tensors may be changed again.
        wait: returns when the save is durable, fsync included.
    """

    free: Callable[[], None]
    wait: Callable[[], None]

    def drain(self) -> threading.Event:
        """Wait in the background; the event is set when the save is durable."""
        done = threading.Event()

        def run() -> None:
            self.wait()
            done.set()

        threading.Thread(target=run, daemon=True).start()
        return done


def _nothing() -> None:
    return None


class Peer:
    """One way to save and load a flat dict of tensors. ``save`` holds the caller as long as the peer does."""

    name = ""
    package = "torch"
    settings = ""

    def save(self, path: Path, tensors: Tensors) -> Pending:
        raise NotImplementedError

    def load(self, path: Path, into: Tensors) -> None:
        """Restore into live tensors, in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop helpers; idempotent."""


def _copy(into: Tensors, loaded: Tensors) -> None:
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(loaded[name])


class TorchSave(Peer):
    name, settings = "torch.save", "zip format; loads with weights_only=True"

    def save(self, path: Path, tensors: Tensors) -> Pending:
        torch.save(tensors, path)
        fsync_tree(path)
        return Pending(_nothing, _nothing)

    def load(self, path: Path, into: Tensors) -> None:
        _copy(into, torch.load(path, weights_only=True))


class TorchMmap(TorchSave):
    name, settings = "torch.load(mmap)", "torch.load(mmap=True), then copy_ into the live tensors"

    def load(self, path: Path, into: Tensors) -> None:
        _copy(into, torch.load(path, weights_only=True, mmap=True))


class Safetensors(Peer):
    name, package, settings = "safetensors", "safetensors", "save_file; load_file, then copy_ into the live tensors"

    def save(self, path: Path, tensors: Tensors) -> Pending:
        from safetensors.torch import save_file

        save_file(tensors, path)
        fsync_tree(path)
        return Pending(_nothing, _nothing)

    def load(self, path: Path, into: Tensors) -> None:
        from safetensors.torch import load_file

        _copy(into, load_file(path))


def _dcp_writer(path: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    return FileSystemWriter(path, thread_count=2, sync_files=True)


class DCP(Peer):
    name, settings = "DCP save", "FileSystemWriter(thread_count=2, sync_files=True), no_dist"

    def save(self, path: Path, tensors: Tensors) -> Pending:
        import torch.distributed.checkpoint as dcp

        dcp.save(tensors, storage_writer=_dcp_writer(path), no_dist=True)
        fsync_tree(path)
        return Pending(_nothing, _nothing)

    def load(self, path: Path, into: Tensors) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(into, checkpoint_id=path, no_dist=True)


class DCPAsync(DCP):
    name = "DCP async_save"
    settings = "thread; one DefaultStager kept for all saves, so that its buffers are warm from the second on"
    shared = False

    def __init__(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(StagingOptions(False, self.shared, False, False))

    def _kind(self) -> dict[str, Any]:
        return {"no_dist": True}

    def save(self, path: Path, tensors: Tensors) -> Pending:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(
            tensors, storage_writer=_dcp_writer(path), async_stager=self._stager, **self._kind()
        )
        future = getattr(future, "upload_completion", future)

        def wait() -> None:
            future.result()
            fsync_tree(path)

        return Pending(_nothing, wait)

    def close(self) -> None:
        self._stager.close()


class DCPProcess(DCPAsync):
    name = "DCP async_save (process)"
    settings = "process; shared-memory DefaultStager kept for all saves; gloo group of one"
    shared = True

    def __init__(self) -> None:
        import torch.distributed as dist

        super().__init__()
        self._joined = not dist.is_initialized()
        if self._joined:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
            dist.init_process_group("gloo")

    def _kind(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}

    def close(self) -> None:
        import torch.distributed as dist

        super().close()
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()
            for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        self._joined = False


class TorchCheckpointing(Peer):
    name, package = "torch_checkpointing", "torch_checkpointing"
    settings = (
        "async, shared-memory staging in the background (charged until lock() is free again), 2 write threads with "
        "one item per group; use_direct_io=False, because its O_DIRECT writes fail with EINVAL on ext4; mmap load"
    )

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager(
            CheckpointManager.Config(
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                save=AsyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=2)),
            )
        )

    @staticmethod
    def _items(tensors: Tensors) -> dict[str, Tensors]:
        items: dict[str, Tensors] = {}
        for name, tensor in tensors.items():
            items.setdefault(name.partition(".")[0] if "." in name else "all", {})[name] = tensor
        return items

    def save(self, path: Path, tensors: Tensors) -> Pending:
        future = self._manager.save(str(path), self._items(tensors))

        def free() -> None:
            with self._manager.lock():
                return

        def wait() -> None:
            assert future is not None
            future.result()
            fsync_tree(path)

        return Pending(free, wait)

    def load(self, path: Path, into: Tensors) -> None:
        self._manager.load(str(path), into=self._items(into))

    def close(self) -> None:
        self._manager.close()


class TorchSnapshot(Peer):
    name, package, settings = "torchsnapshot take", "torchsnapshot", "Snapshot.take; restore in place"

    def save(self, path: Path, tensors: Tensors) -> Pending:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(path), {"state": StateDict(**tensors)})
        fsync_tree(path)
        return Pending(_nothing, _nothing)

    def load(self, path: Path, into: Tensors) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot(str(path)).restore({"state": StateDict(**into)})


class TorchSnapshotAsync(TorchSnapshot):
    name, settings = "torchsnapshot async_take", "Snapshot.async_take"

    def save(self, path: Path, tensors: Tensors) -> Pending:
        from torchsnapshot import Snapshot, StateDict

        pending = Snapshot.async_take(str(path), {"state": StateDict(**tensors)})

        def wait() -> None:
            pending.wait()
            fsync_tree(path)

        return Pending(_nothing, wait)


_ALL = (
    TorchSave, TorchMmap, Safetensors, DCP, DCPAsync, DCPProcess, TorchCheckpointing, TorchSnapshot, TorchSnapshotAsync,
)  # fmt: skip
saving = tuple(peer.name for peer in _ALL if peer is not TorchMmap)


def make_peers(names: tuple[str, ...], notes: list[str]) -> list[Peer]:
    """Start the named peers; those that cannot be used here are left out and named in ``notes``."""
    warnings.filterwarnings("ignore", module=r"torch.*")
    peers: list[Peer] = []
    for kind in _ALL:
        if kind.name not in names:
            continue
        if importlib.util.find_spec(kind.package) is None:
            notes.append(f"{kind.name}: not installed, left out")
            continue
        try:
            peers.append(kind())
        except Exception as error:
            notes.append(f"{kind.name}: cannot be started here ({type(error).__name__}: {error})")
        else:
            notes.append(f"{kind.name}: {kind.settings}")
    return peers


def versions() -> dict[str, str | None]:
    """Return the versions of Holdfast, torch and every peer; None for what is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in ("holdfast", "torch", "numpy", "xxhash", "safetensors", "torch_checkpointing", "torchsnapshot"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
