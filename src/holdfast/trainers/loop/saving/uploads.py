"""`RemoteUploaderDownloader`: a copy of every checkpoint somewhere else, made while training goes on."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast._log import get_logger
from holdfast.checkpointer.transient import MAX_LOST, TRANSIENT_ERRORS, state_of
from holdfast.config import _removed
from holdfast.copying.transfer import copy_checkpoint, copy_file
from holdfast.errors import CheckpointExistsError, ConfigError, StorageError, StoragePermissionError
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.resolve import resolve, split_uri

from ..arguments import OF_UPLOADER, check_path
from ..loggers import Logger, LoggerDestination
from .finder import FolderEntry
from .folder import storage_prefix
from .load import Locator

if TYPE_CHECKING:
    from ..state import State

__all__ = ["RemoteUploaderDownloader"]

_LOG = get_logger("trainer")


class _Job(NamedTuple):
    future: Future[None]
    work: Callable[..., None]
    arguments: tuple[Any, ...]


@_removed(**OF_UPLOADER)
class RemoteUploaderDownloader(LoggerDestination):
    """Among the loggers: uploads every checkpoint that a saver has committed locally.

    Args:
        bucket_uri: where to: "s3://bucket", "gs://bucket", "libcloud://provider/container", a folder.
        backend_kwargs: arguments of `LibcloudObjectStore` for "libcloud://" (provider, container, provider_kwargs).
        file_path_format_string: path of an upload; ``{remote_file_name}`` and ``{run_name}`` are filled in.
        num_concurrent_uploads: checkpoints sent at once.
        num_attempts: how often one is tried.
    """

    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: Mapping[str, Any] | None = None,
        file_path_format_string: str = "{remote_file_name}",
        num_concurrent_uploads: int = 1,
        *,
        num_attempts: int = 3,
    ) -> None:
        for name, number in (("num_concurrent_uploads", num_concurrent_uploads), ("num_attempts", num_attempts)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"RemoteUploaderDownloader({name}={number!r}): give a whole number of at least 1")
        _check_format(file_path_format_string)
        self.storage = _storage(check_path(bucket_uri, "bucket_uri"), backend_kwargs)
        self.file_path_format_string, self.num_attempts = file_path_format_string, num_attempts
        self._workers = num_concurrent_uploads
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._sent: list[_Job] = []
        self._left: list[_Job] = []  # to be tried again: the storage was full or did not answer
        self._pointing = threading.Lock()
        self._pointed: dict[str, tuple[int, int, str]] = {}
        self._run_name = ""
        self._abandoned = False

    def init(self, state: State, logger: Logger) -> None:
        """Learn the name of the run."""
        self._run_name, self._abandoned = state.run_name, False

    def path_of(self, remote_file_name: str) -> str:
        """Return where an upload of this name goes, inside the bucket."""
        return self.file_path_format_string.format(remote_file_name=remote_file_name, run_name=self._run_name).strip(
            "/"
        )

    def upload(
        self, source: Storage, saved: FolderEntry, remote: str, latest: str | None, *, after: Callable[[], object]
    ) -> None:
        """Send a checkpoint, then the pointer to it, and call ``after``; returns at once.

        What could not be sent before is tried again first.
        """
        self._try_again()
        self._submit(self._send, source, saved, self.path_of(remote), latest, after)

    def upload_file(self, remote_file_name: str, file_path: str, *, overwrite: bool = False) -> None:
        """Send a copy of a file; returns when the copy is made.

        Raises:
            CheckpointExistsError: something has this name, and ``overwrite`` is False.
        """
        remote = self.path_of(remote_file_name)
        if not overwrite and self.storage.exists(remote):
            raise CheckpointExistsError(
                f"upload_file({remote_file_name!r}): {self.storage.uri}/{remote} is there already: pass overwrite=True "
                "to replace it, or use another name"
            )
        folder = tempfile.mkdtemp(prefix="holdfast-")
        copied = shutil.copyfile(file_path, os.path.join(folder, "file"))
        self._submit(self._send_file, copied, remote)

    def _send_file(self, copied: str, remote: str) -> None:
        folder, name = os.path.split(copied)
        self._tried(lambda: copy_file(LocalStorage(folder), name, self.storage, remote), remote)
        shutil.rmtree(folder, ignore_errors=True)

    def download_file(
        self, remote_file_name: str, destination: str | os.PathLike[str], *, overwrite: bool = False
    ) -> None:
        """Copy a file from there.

        Raises:
            FileExistsError: ``destination`` is there, and ``overwrite`` is False.
            StorageNotFoundError: there is no such file.
        """
        if not overwrite and os.path.exists(destination):
            raise FileExistsError(f"{os.fspath(destination)} is there already: pass overwrite=True to replace it")
        folder, name = os.path.split(os.path.abspath(destination))
        copy_file(self.storage, self.path_of(remote_file_name), LocalStorage(folder), name)

    def point(self, saved: FolderEntry, remote: str, latest: str | None) -> None:
        """Send the pointer to a checkpoint that is uploaded already; returns at once."""
        if latest is not None:
            self._submit(self._point, saved, self.path_of(remote), latest)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="holdfast-uploads")
            self._sent.append(_Job(self._pool.submit(work, *arguments), work, arguments))

    def _try_again(self) -> bool:
        """Submit what is left; False if nothing is."""
        with self._lock:
            left, self._left = self._left, []
        for job in left:
            self._submit(job.work, *job.arguments)
        return bool(left)

    def _send(
        self, source: Storage, saved: FolderEntry, path: str, latest: str | None, after: Callable[[], object]
    ) -> None:
        self._tried(lambda: self._copy(source, saved, path, latest), saved.name)
        after()

    def _tried(self, send: Callable[[], object], name: str) -> None:
        for attempt in range(1, self.num_attempts + 1):
            try:
                send()
                return
            except StorageError as error:
                if attempt == self.num_attempts or isinstance(error, StoragePermissionError):
                    raise
                pause = 2.0 ** (attempt - 1)
                _LOG.warning("upload of %s failed (%s): trying again in %.0f s", name, error, pause)
                time.sleep(pause)

    def _copy(self, source: Storage, saved: FolderEntry, path: str, latest: str | None) -> None:
        if saved.container == "directory":
            copy_checkpoint(source, saved.name, self.storage, path, overwrite=True)
        else:
            copy_file(source, saved.name, self.storage, path)
        if latest is not None:
            self._point(saved, path, latest)

    def _point(self, saved: FolderEntry, path: str, latest: str) -> None:
        pointer = f"{self.path_of(latest)}.symlink"
        with self._pointing:  # with several uploads at once an older one may end last
            if saved.order >= self._pointed.get(pointer, saved.order):
                self.storage.put(pointer, f"{storage_prefix(self.storage)}{path}".encode())
                self._pointed[pointer] = saved.order

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Raise what failed meanwhile."""
        passing, lasting = self._settle()
        if lasting is not None:
            raise lasting
        if passing is not None and len(self._left) >= MAX_LOST:
            raise passing

    def _settle(self) -> tuple[StorageError | None, BaseException | None]:
        """Take in all that has ended; returns why something is left to be tried again, and what no trial will mend."""
        with self._lock:
            done = [one for one in self._sent if one.future.done()]
            self._sent = [one for one in self._sent if one not in done]
        passing: StorageError | None = None
        lasting: BaseException | None = None
        for job in done:
            error = job.future.exception()
            if isinstance(error, TRANSIENT_ERRORS):
                passing = error
                with self._lock:
                    self._left.append(job)
                _LOG.warning("NOT uploaded to %s, %s (%s): tried again later", self.storage.uri, state_of(error), error)
            elif lasting is None:
                lasting = error
            elif error is not None:  # the first one is raised
                _LOG.error("NOT uploaded to %s: %s", self.storage.uri, error)
        return passing, lasting

    def wait(self) -> None:
        """Wait until everything is uploaded; what failed before is tried once more.

        Raises:
            HoldfastError: an upload failed.
        """
        passing, lasting = self._settle_all()
        if self._try_again():
            passing, late = self._settle_all()
            lasting = lasting or late
        if lasting is not None:
            if passing is not None:
                _LOG.error("%d more upload(s) to %s are missing: %s", len(self._left), self.storage.uri, passing)
            raise lasting
        if passing is not None:
            raise type(passing)(
                f"{len(self._left)} upload(s) to {self.storage.uri} are missing, {state_of(passing)} ({passing}); the "
                "checkpoints are in their local folder: when it takes them again, copy them there (holdfast push)"
            )

    def _settle_all(self) -> tuple[StorageError | None, BaseException | None]:
        with self._lock:
            under_way = [one.future for one in self._sent]
        wait(under_way)
        return self._settle()

    def abandon(self) -> None:
        """Let `close` wait for nothing: what is under way goes on, and what failed is not tried again."""
        self._abandoned = True

    def close(self, state: State, logger: Logger) -> None:
        """Finish what is being uploaded."""
        if self._abandoned:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
            return
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


def _check_format(text: str) -> None:
    """Refuse a path of which nobody could be told what is to be filled in, or that all uploads would have."""
    try:
        filled = text.format(remote_file_name="\0", run_name="")
    except (AttributeError, ValueError, KeyError, IndexError):
        filled = ""
    if "\0" not in filled:
        raise ConfigError(
            f"file_path_format_string={text!r}: give a path with {{remote_file_name}} in it; {{run_name}} is known, too"
        )


def _storage(uri: str, arguments: Mapping[str, Any] | None) -> Storage:
    scheme, _ = split_uri(uri)
    if scheme != "libcloud" or not arguments:
        if arguments:
            raise ConfigError(
                f"RemoteUploaderDownloader({uri!r}, backend_kwargs=...): only 'libcloud://' takes them; {scheme}:// "
                "reads its settings from the environment (S3_ENDPOINT_URL, AWS_..., GCS_KEY, ...)"
            )
        return resolve(uri)
    from holdfast.storage.adapters.libcloud import LibcloudObjectStore

    return LibcloudObjectStore(**dict(arguments))


def as_object_store(given: Any) -> Storage | Locator:
    """Return the storage that ``load_object_store`` means, or what finds it from a ``load_path``.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(given, RemoteUploaderDownloader):
        return given.storage
    if isinstance(given, (Storage, Locator)):
        return given
    raise ConfigError(
        f"load_object_store is a {type(given).__name__}: give a holdfast.storage.LibcloudObjectStore, a "
        "RemoteUploaderDownloader, a holdfast.trackers.WandbArtifacts or what holdfast.storage.resolve('s3://bucket') "
        "returns; or none, and the whole URI as load_path"
    )
