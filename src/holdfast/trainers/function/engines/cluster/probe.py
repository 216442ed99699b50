"""Whether the nodes share the run's storage: the driver leaves a file there, and each agent looks for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from holdfast._log import get_logger
from holdfast.errors import HoldfastError
from holdfast.run.remains import PROBE
from holdfast.storage.base import Storage
from holdfast.trainers.function.engine import node_name

from .links import AgentLink

__all__ = ["StorageProbe"]

_LOG = get_logger("trainers.function")
_WORDS = b"Written by the driver; nodes look whether they see it.\n"
_CLEAN_S = 5.0
_AGAIN_S = 2.0
_TRIALS = 4  # an agent looks for 10 s


class StorageProbe:
    """Leaves a file for each agent and removes it afterwards, in threads: a storage may be slow.

    Args:
        storage: root of the run.
        ident: of this driver among all that probe the same run.
    """

    def __init__(self, storage: Storage, ident: str) -> None:
        self._storage, self._ident = storage, ident
        self._markers: set[str] = set()
        self._cleaning: list[threading.Thread] = []

    @property
    def uri(self) -> str:
        """URI of the storage, for people."""
        return self._storage.uri

    def ask(self, link: AgentLink, untried: Callable[[], None]) -> None:
        """Have an agent look for the file; it answers by itself. ``untried`` is called if it was not written."""
        thread = threading.Thread(target=self._ask, args=(link, untried), name="holdfast-probe", daemon=True)
        thread.start()

    def _ask(self, link: AgentLink, untried: Callable[[], None]) -> None:
        marker = self._marker(link)
        self._markers.add(marker)
        try:
            self._storage.put(marker, _WORDS)
        except Exception as error:  # noqa: BLE001 - a thread edge; a storage that takes nothing fails by itself soon
            _LOG.warning("the storage was not tried from %s: %s", node_name(link.node), error)
            untried()
            return
        where = {"storage": self._storage.describe(), "secrets": self._storage.secrets()}
        link.tell({"do": "probe", **where, "marker": marker, "node": link.node})
        for _ in range(
            _TRIALS
        ):  # an attempt that begins now sweeps remains of earlier attempts, and this file with them
            time.sleep(_AGAIN_S)
            if marker not in self._markers:
                return
            with contextlib.suppress(HoldfastError):
                self._storage.put(marker, _WORDS)
            if marker not in self._markers:  # answered meanwhile
                self._delete(marker)
                return

    def answered(self, link: AgentLink) -> None:
        """Remove the file of an agent that has answered."""
        self._remove(self._marker(link))

    def close(self) -> None:
        """Remove the files that are left. Bounded."""
        deadline = time.monotonic() + _CLEAN_S
        for marker in list(self._markers):
            self._remove(marker)
        for thread in self._cleaning:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _remove(self, marker: str) -> None:
        if marker in self._markers:
            self._markers.discard(marker)
            thread = threading.Thread(target=self._delete, args=(marker,), name="holdfast-probe", daemon=True)
            thread.start()
            self._cleaning.append(thread)

    def _delete(self, marker: str) -> None:
        try:
            self._storage.delete(marker)
            self._storage.tidy(marker.rpartition("/")[0])
        except Exception as error:  # noqa: BLE001 - a thread edge: it is small, and the next start removes nothing of others
            _LOG.debug("the marker of a probe is left: %s", error)

    def _marker(self, link: AgentLink) -> str:
        return f"{PROBE}{self._ident}/{link.number}"
