"""Write an object, in multipart uploads with bounded memory."""

from __future__ import annotations

import uuid
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.errors import StorageError

from ..base import FileWriter, check_view
from .again import Errors, again_if_broken
from .client import BucketClient
from .conditions import MARK, landed

__all__ = ["NUM_PARALLEL", "PART_BYTES", "ObjectWriter", "part_bytes"]

PART_BYTES = 16 << 20
"""Every part costs the store about the same work, however large it is."""

NUM_PARALLEL = 6
"""Parts under way at once. A file being closed and the next file being written use 2 * 7 * 16 MiB at most."""

_MAX_PARTS = 9_000  # the stores allow 10,000
_CHUNK = 4 << 20


def part_bytes(size: int) -> int:
    """Return how large the parts of an object of ``size`` bytes are."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


class ObjectWriter(FileWriter):
    """Uploads an object in parts while it is written; one request if it is small. Nothing is visible before `close`."""

    def __init__(self, client: BucketClient, key: str, errors: Errors, path: str, size: int) -> None:
        self._client, self._key, self._errors, self._path, self._size = client, key, errors, path, size
        self._mark = uuid.uuid4().hex
        self._begun = bytearray()  # the bytes before the first part is complete, to be sent again if need be
        self._upload: Any = None
        self._offset = 0  # padding included
        self._ended = False

    def write(self, view: memoryview) -> None:
        """Hand a copy of the bytes to the client; blocks while all its parts are under way."""
        if self._ended:
            raise StorageError(f"cannot write {self._path}: the writer is closed")
        view = view.cast("B")
        check_view(self._path, size=self._size, offset=self._offset, nbytes=len(view))
        content = view[: max(0, self._size - self._offset)]
        self._offset += len(view)
        with self._errors("write"):
            if self._upload is None:
                room = part_bytes(self._size) - len(self._begun)
                self._begun += content[:room]
                content = content[room:]
                if self._size <= part_bytes(self._size) or len(self._begun) < part_bytes(self._size):
                    return
                self._upload = again_if_broken(self._begin)
                self._begun = bytearray()
            for begin in range(0, len(content), _CHUNK):
                # A copy: the client keeps the bytes until the part is sent, and the caller reuses its memory.
                self._upload.write(bytes(content[begin : begin + _CHUNK]))

    def _begin(self) -> Any:
        """Begin an upload in parts; with the first part the client asks the store for it."""
        upload = self._client.obs.open_writer(
            self._client.store,
            self._key,
            buffer_size=part_bytes(self._size),
            max_concurrency=NUM_PARALLEL,
            attributes={MARK: self._mark},
        )
        try:
            upload.write(self._begun)
        except BaseException:
            _abort(upload)  # it may have been begun: the next try begins another upload
            raise
        return upload

    def close(self) -> None:
        """Finish the upload: the object appears, whole."""
        if self._ended:
            return
        if min(self._offset, self._size) != self._size:
            self.abort()
            raise StorageError(f"cannot finish {self._path}: {self._offset} of {self._size} bytes were written")
        self._ended = True
        with self._errors("write"):
            if self._upload is None:
                data, self._begun = bytes(self._begun), bytearray()
                put = partial(self._client.obs.put, self._client.store, self._key, data, use_multipart=False)
                again_if_broken(put)
                return
            try:
                self._upload.close()
            except Exception as error:
                # The answer may have been lost, and the request repeated in vain, when all the bytes are there.
                if landed(self._client, self._key, self._mark, error, again=True) is None:
                    raise
            finally:
                self._upload = None

    def abort(self) -> None:
        """Give the upload up and let the store forget its parts."""
        if self._ended:
            return
        self._ended, self._begun = True, bytearray()
        upload, self._upload = self._upload, None
        if upload is not None:
            _abort(upload)


def _abort(upload: Any) -> None:
    # The client aborts when its block is left by an exception. A store that has gone away keeps the parts:
    # docs/storage.md has the lifecycle rule that removes them.
    with suppress(Exception):
        upload.__exit__(StorageError, StorageError("aborted"), None)
