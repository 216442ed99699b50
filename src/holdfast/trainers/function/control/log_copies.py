"""Logs of a run whose storage is no local disk: written to a temporary folder, copied to the storage now and then."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

from holdfast._log import get_logger
from holdfast.storage.base import Storage

__all__ = ["LogCopies"]

_LOG = get_logger("trainers.function")
_EVERY_S = 60.0
_LAST_S = 30.0
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 7 << 20


class LogCopies:
    """Copies the files in a folder to ``logs/`` of a storage: those that have grown, each minute and at the end.

    A file of more than 8 MiB is cut in its middle there. A storage that fails is logged once and tried again; it never
    delays training.

    Args:
        storage: root of the run.
        every_s: pause between two rounds.

    Attributes:
        folder: where the logs are written.
    """

    def __init__(self, storage: Storage, *, every_s: float = _EVERY_S) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-logs-"))
        self._storage, self._every_s = storage, every_s
        self._copied: dict[str, int] = {}
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="holdfast-logs", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = _LAST_S) -> None:
        """Copy what is new and remove the folder; idempotent. What cannot be copied in time stays in the folder."""
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive() or self._failed:
            _LOG.warning("the last output of the workers could not be stored: it is in %s", self.folder)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            self._round()
        self._round()

    def _round(self) -> None:
        try:
            for path in sorted(self.folder.rglob("*.log")):
                name, size = f"logs/{path.relative_to(self.folder).as_posix()}", path.stat().st_size
                if self._copied.get(name) != size:
                    self._storage.put(name, _read(path))
                    self._copied[name] = size
            self._failed = False
        except Exception as error:  # noqa: BLE001 - a thread edge: the folder must stay if the thread cannot go on
            if not self._failed:
                _LOG.warning("the output of the workers could not be stored, trying again: %s", error)
            self._failed = True


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        if size <= _HEAD_BYTES + _TAIL_BYTES:
            return file.read()
        head = file.read(_HEAD_BYTES)
        file.seek(size - _TAIL_BYTES)
        cut = size - _HEAD_BYTES - _TAIL_BYTES
        return head + f"\n[... {cut} bytes are left out here ...]\n".encode() + file.read(_TAIL_BYTES)
