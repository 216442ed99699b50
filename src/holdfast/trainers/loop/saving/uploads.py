"""`RemoteUploaderDownloader`: a copy of every checkpoint somewhere else, made while training goes on.

What an upload is called, and what a failure costs, is decided here; the writer process of the trainer sends
(`writer.uploads.files`), so that what was handed over arrives although the trainer is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from holdfast._log import get_logger
from holdfast._meant import removed
from holdfast.checkpointer.pending_saves import MAX_LOST, TRANSIENT_ERRORS, state_of
from holdfast.copying.transfer import copy_file
from holdfast.errors import CheckpointExistsError, ConfigError, StorageError
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.resolve import resolve, split_uri
from holdfast.writer.client import SharedWriter, WriterClient
from holdfast.writer.uploads.files import UploadJob, UploadPointer, remove_copy

from ..arguments import OF_UPLOADER, check_path
from ..callbacks import Logger, LoggerDestination
from ..state import State
from .finder import FolderEntry
from .folder import storage_prefix

_LOG = get_logger("trainers.loop")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Upload:
    """One upload that was handed over.

    Attributes:
        source: holds what is sent.
        job: what the writer does.
        after: called once it is there, on a thread of ours.
        ended: done when that has returned, or with why it is not there.
    """

    source: Storage
    job: UploadJob
    after: Callable[[], object]
    ended: Future[None] = field(default_factory=Future)


def _nothing() -> None:
    pass


@removed(**OF_UPLOADER)
class RemoteUploaderDownloader(LoggerDestination):
    """Among the loggers: uploads every checkpoint that a saver has committed locally.

    Args:
        bucket_uri: where to: "s3://bucket", "gs://bucket", "libcloud://provider/container", a folder.
        backend_kwargs: arguments of `LibcloudObjectStore` for "libcloud://" (provider, container, provider_kwargs).
        file_path_format_string: path of an upload; ``{remote_file_name}`` and ``{run_name}`` are filled in.
        num_concurrent_uploads: checkpoints sent at once.
        num_attempts: how often an upload is tried.

    Attributes:
        storage: where to.
        writer: sends them; that of the trainer whose checkpoints they are.
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
        self._num_workers = num_concurrent_uploads
        self.writer = SharedWriter()
        self._client: WriterClient | None = None
        self._thread: ThreadPoolExecutor | None = None  # for what follows an upload
        self._lock = threading.Lock()
        self._sent: list[_Upload] = []
        self._left: list[_Upload] = []  # to be tried again: the storage was full or did not answer
        self._pointed: dict[str, tuple[int, int, str]] = {}  # what each pointer means that was sent
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
        path = self.path_of(remote)
        job = UploadJob(
            path=path, name=saved.name, kind="checkpoint" if saved.container == "directory" else "file",
            pointer=self._pointer(saved, path, latest), num_attempts=self.num_attempts,
        )  # fmt: skip
        self._submit(_Upload(source=source, job=job, after=after))

    def point(self, saved: FolderEntry, remote: str, latest: str | None) -> None:
        """Send the pointer to a checkpoint that is uploaded already; returns at once."""
        pointer = self._pointer(saved, path := self.path_of(remote), latest)
        if pointer is not None:
            job = UploadJob(path=path, pointer=pointer, num_attempts=1)
            self._submit(_Upload(source=self.storage, job=job, after=_nothing))

    def _pointer(self, saved: FolderEntry, path: str, latest: str | None) -> UploadPointer | None:
        if latest is None:
            return None
        text = f"{storage_prefix(self.storage)}{path}"
        return UploadPointer(path=f"{self.path_of(latest)}.symlink", text=text, order=saved.order)

    def upload_file(
        self, state: State, remote_file_name: str, file_path: str | os.PathLike[str], *, overwrite: bool = False
    ) -> None:
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
        above, name = os.path.split(folder)
        try:
            shutil.copyfile(file_path, os.path.join(folder, "file"))
            job = UploadJob(path=remote, name=f"{name}/file", kind="copy", num_attempts=self.num_attempts)
            self._submit(_Upload(source=LocalStorage(above), job=job, after=_nothing))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

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

    def _submit(self, upload: _Upload) -> None:
        with self._lock:
            if self._client is None or self._client.closed:
                self._client = self.writer.client(upload.source, remote=self.storage)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-uploads")
            sent = self._client.upload(upload.source, self.storage, upload.job, num_workers=self._num_workers)
            self._sent.append(upload)
        sent.add_done_callback(lambda done: self._ended(upload, done.exception()))

    def _ended(self, upload: _Upload, error: BaseException | None) -> None:
        """Take an answer, on the thread that hears the writer, where nobody may wait."""
        thread = self._thread
        pointer = upload.job.pointer
        if error is not None and (self._abandoned or not isinstance(error, TRANSIENT_ERRORS)):
            remove_copy(upload.source, upload.job)  # nobody tries it again
        if error is None and pointer is not None:
            self._pointed[pointer.path] = max(pointer.order, self._pointed.get(pointer.path, pointer.order))
        if error is None and upload.after is not _nothing and thread is not None:
            try:
                thread.submit(self._follow, upload)
            except RuntimeError:  # the interpreter is ending
                _settle(upload, None)
        else:
            _settle(upload, error)

    def _follow(self, upload: _Upload) -> None:
        try:
            upload.after()
        except BaseException as error:  # noqa: BLE001 - a thread edge: raised in the next step
            _settle(upload, error)
        else:
            _settle(upload, None)

    def _try_again(self) -> bool:
        """Submit what is left; False if nothing is."""
        with self._lock:
            left, self._left = self._left, []
        for number, upload in enumerate(left):
            try:
                self._submit(
                    _Upload(source=upload.source, job=self._without_old_pointer(upload.job), after=upload.after)
                )
            except BaseException:
                with self._lock:
                    self._left = [*left[number:], *self._left]
                raise
        return bool(left)

    def _without_old_pointer(self, job: UploadJob) -> UploadJob:
        """Leave the pointer out if it was set to something newer since."""
        pointer = job.pointer
        if pointer is None or job.name is None or pointer.order >= self._pointed.get(pointer.path, pointer.order):
            return job
        return replace(job, pointer=None)

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
            done = [upload for upload in self._sent if upload.ended.done()]
            self._sent = [upload for upload in self._sent if upload not in done]
        passing: StorageError | None = None
        lasting: BaseException | None = None
        for upload in done:
            error = upload.ended.exception()
            if isinstance(error, TRANSIENT_ERRORS):
                passing = error
                with self._lock:
                    self._left.append(upload)
                _LOG.warning("NOT uploaded to %s, %s (%s): tried again later", self.storage.uri, state_of(error), error)
            elif lasting is None:
                lasting = error
            elif error is not None:  # the first error is raised
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
        if passing is None:
            self._rest()
        else:
            copies = [
                f"{upload.source.local_root}/{upload.job.name}" for upload in self._left if upload.job.kind == "copy"
            ]
            kept = f"; of files given to upload_file there are copies: {', '.join(copies)}" if copies else ""
            raise type(passing)(
                f"{len(self._left)} upload(s) to {self.storage.uri} are missing, {state_of(passing)} ({passing}); the "
                "checkpoints are in their local folder: when it takes them again, copy them there (holdfast push)"
                + kept
            )

    def _rest(self) -> None:
        """Leave the writer of the trainer, if nothing was handed over meanwhile: the next upload takes it again."""
        with self._lock:
            client = None if self._sent or self._left else self._client
            if client is not None:
                self._client = None
        if client is not None:
            client.close()

    def _settle_all(self) -> tuple[StorageError | None, BaseException | None]:
        with self._lock:
            under_way = [upload.ended for upload in self._sent]
        wait(under_way)
        return self._settle()

    def abandon(self) -> None:
        """Let `close` wait for nothing: what is under way goes on, and what failed is not tried again."""
        self._abandoned = True

    def close(self, state: State, logger: Logger) -> None:
        """Finish what is being uploaded."""
        try:
            if not self._abandoned:
                self.wait()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """End writer and thread; what was abandoned goes on, and keeps the interpreter from ending before it."""
        (client, self._client), (thread, self._thread) = (self._client, None), (self._thread, None)
        if client is not None and self._abandoned:
            with contextlib.suppress(RuntimeError):  # the interpreter is ending, and waits for all writers anyway
                threading.Thread(target=client.close, name="holdfast-uploads-end").start()
        elif client is not None:
            client.close()
        if thread is not None:
            thread.shutdown(wait=not self._abandoned)


def _settle(upload: _Upload, error: BaseException | None) -> None:
    if error is None:
        upload.ended.set_result(None)
    else:
        upload.ended.set_exception(error)


def _check_format(text: str) -> None:
    """Refuse a path that cannot be filled in, or that all uploads would share."""
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


@runtime_checkable
class Locator(Protocol):
    """Finds checkpoints by names of its own, such as those of artifacts."""

    def locate(self, path: str) -> tuple[Storage, str]:
        """Return the storage that holds what ``path`` names, and its name there."""
