"""The single files of a folder: the writer that stores them, and the leases of their names that it holds.

A folder of directories is a run, with one lease. Trainers of several runs may share a folder by the names of their
files: so each name has a lease of its own, held by the writer of rank 0, which stores the files of all ranks.
"""

from __future__ import annotations

import secrets

import xxhash

from holdfast.checkpointer.run_session import answer
from holdfast.errors import HoldfastError
from holdfast.storage.base import Storage
from holdfast.writer.client import SaveFuture, SharedWriter, WriterClient
from holdfast.writer.messages import SaveJob

from ..training.ranks import TIMEOUT_S, Ranks
from .files import FileImage

__all__ = ["LEASE_S", "FileLeases"]

LEASE_S = 60.0
"""How long to wait for a lease whose owner may be dead, or may still finish its last file."""


class FileLeases:
    """The names in one folder that only this trainer gives to files.

    Args:
        storage: the folder.
        ranks: the processes that train; all of them make the same calls, apart from `submit` and `confirm`, which are
            for rank 0.
        writer: of the trainer; default: one for these names alone.
    """

    def __init__(self, storage: Storage, ranks: Ranks, writer: SharedWriter | None = None) -> None:
        self._storage, self._ranks = storage, ranks
        self._writer = SharedWriter() if writer is None else writer
        self._held: set[str] = set()
        self._client: WriterClient | None = None  # of rank 0, while a name is held

    def take(self, shape: str) -> None:
        """Be the only one who writes files of this name; idempotent.

        Args:
            shape: the name, its counters left open.

        Raises:
            RunBusyError: another live process does.
        """
        if shape in self._held:
            return
        self._held.add(shape)
        try:
            self._ranks.lead("claim", lambda: self._take(shape), work_s=LEASE_S + TIMEOUT_S)
        except BaseException:
            self._give_back(shape)  # the name would be nobody's, and yet taken
            raise

    def _take(self, shape: str) -> None:
        if self._client is None:
            self._client = self._writer.client(self._storage)
        taken = self._client.take_name(self._storage, _of(shape), start_id=secrets.token_hex(4), wait_s=LEASE_S)
        answer(taken, self._storage, LEASE_S + TIMEOUT_S, bound="")

    def _give_back(self, shape: str) -> None:
        self._held.discard(shape)
        if self._client is None:
            return
        if not self._held:
            self.release(patient=True)
        elif not self._client.closed:
            answer(self._client.give_back_name(self._storage, _of(shape)), self._storage, TIMEOUT_S, bound="")

    def submit(self, shape: str, name: str, image: FileImage) -> SaveFuture:
        """Let the writer store a file: from now on it is completed even if this process is killed.

        Args:
            shape: a name that is held.
            name: path of the file; one that is there is replaced.
            image: the file; must not change before the future is done.

        Raises:
            HoldfastError: the names have been given back.
        """
        job = SaveJob(directory=name, save_id="", container=image.container(lease=_of(shape)))
        return self._writer_of(shape).submit(self._storage, job, arena=image.arena)

    def confirm(self, shape: str) -> None:
        """Make sure, by one request, that nobody has taken a name from us up to now.

        Raises:
            RunBusyError: somebody has: files of this name are not ours to write or delete any more.
            HoldfastError: the names have been given back.
            StorageError: nobody can say just now.
        """
        answer(self._writer_of(shape).verify_name(self._storage, _of(shape)), self._storage, TIMEOUT_S, bound="")

    def _writer_of(self, shape: str) -> WriterClient:
        client = self._client
        if shape not in self._held or client is None:
            raise HoldfastError(f"{self._storage.uri} was closed: nothing can be saved there any more")
        return client

    def holds(self, shape: str) -> bool:
        """Tell whether a name is held."""
        return shape in self._held

    def release(self, *, patient: bool) -> None:
        """Let others have the names, after what is being written; idempotent. A lease that cannot go goes stale.

        Args:
            patient: wait for that; else the writer does it by itself.
        """
        self._held.clear()
        client, self._client = self._client, None
        if client is not None:  # in a forked child this ends nothing
            client.close(TIMEOUT_S if patient else 0.0)


def _of(shape: str) -> str:
    """Return what stands for a name in those of its lease's files."""
    return xxhash.xxh3_64_hexdigest(shape.encode())[:8]
