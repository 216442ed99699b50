"""Our part of saves that are staged on this machine's own disk: brought to the remote when rank 0 asks for it.

A staged save is no checkpoint, and no disk alone ever holds one: the ranks' machines share none. See `staged_run` for
rank 0's side.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast._log import get_logger
from holdfast.copying.transfer import REPEATED_FROM, send_entries
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.format.commit import PartSummary
from holdfast.format.names import join, save_id_of
from holdfast.format.parts import part_name, read_part, remove_part
from holdfast.storage.base import Storage

from ..messages import error_to_json
from ..pipeline import MAX_REUSES
from ..ranks.link import Message

__all__ = ["StagedParts", "files_in_front"]

_LOG = get_logger("writer")


class StagedParts:
    """One thread that carries out rank 0's orders, one after another.

    Args:
        local: the disk of this machine.
        remote: where the run is.
        rank: ours.
        start_id: of this life; what an earlier writer of it has staged is kept, too.
        say: tells rank 0's writer.
    """

    def __init__(
        self, local: Storage, remote: Storage, rank: int, start_id: str, say: Callable[[Message], None]
    ) -> None:
        self._local, self._remote, self._rank, self._say = local, remote, rank, say
        self._changed = threading.Condition()
        # What we have brought last, by digest and size: where it is, and how often in a row the remote has repeated it.
        self._brought: dict[tuple[str, int], tuple[str, int]] = {}
        own = part_name(rank, start_id).removesuffix(".json")
        self._held: set[str] = set()
        try:
            names = [name for _, name in files_in_front(local)]
            self._held = {save for name in names if name.startswith(own) and (save := save_id_of(name)) is not None}
        except HoldfastError as error:  # they are only waited for at the end
            _LOG.warning("what an earlier writer has staged may have to wait for the next start: %s", error)
        self._closing = 0  # orders that end something and are not carried out yet
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="holdfast-staged", daemon=True).start()

    def hold(self, save: str, directory: str) -> dict[str, Any]:
        """Keep our part, which is durable, until rank 0 says that it is not needed any more.

        Returns:
            What rank 0 has to know of it.

        Raises:
            HoldfastError: it is not there.
        """
        part = self._read(save, directory).to_json()
        with self._changed:
            self._held.add(save)
        return part

    def let_go(self, save: str) -> None:
        """Our part is not needed any more."""
        with self._changed:
            self._held.discard(save)
            self._changed.notify_all()

    def take(self, order: Message) -> None:
        """Take an order: "upload"; "clear": our part is to be removed; "keep": it is left to the next start."""
        if order["do"] != "upload":
            with self._changed:
                self._closing += 1
        self._orders.put(order)

    def await_end(self, until: float, is_over: Callable[[], bool]) -> None:
        """Wait until nothing is needed any more, or ``is_over`` says that nobody will ask for it.

        What rank 0 has asked for before it left is done first.
        """
        with self._changed:
            while (self._closing or (self._held and not is_over())) and time.monotonic() < until:
                self._changed.wait(0.2)

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            save, directory = order["save"], order["directory"]
            if order["do"] != "upload":
                if order["do"] == "clear":
                    self._clear(save, directory)
                with self._changed:
                    self._closing -= 1
                self.let_go(save)
                continue
            error = None
            try:
                self._bring(directory, self._read(save, directory))
            except Exception as problem:  # noqa: BLE001 - a thread edge: rank 0 hears of it, and may ask again
                error = error_to_json(problem)
            self._say({"do": "uploaded", "save": save, "error": error})

    def _bring(self, directory: str, part: PartSummary) -> None:
        """Bring our files; those that are in the save before as well the remote repeats by itself, if it is a store."""
        before, stores = self._brought, self._remote.local_root is None
        twins = {key: path for key, (path, times) in before.items() if stores and times < MAX_REUSES}
        sent, repeated = send_entries(self._local, self._remote, directory, part.files, twins=twins)
        self._brought = {}
        for entry in part.files:
            if entry.size >= REPEATED_FROM:
                key, path = (entry.digest, entry.size), join(directory, entry.path)
                known, times = before.get(key, ("", 0))
                if entry.path in repeated:
                    times += 1
                elif entry.path in sent:
                    times = 0
                elif known != path:  # an earlier writer of this save brought it, who knows how
                    times = MAX_REUSES
                self._brought[key] = path, times

    def _read(self, save: str, directory: str) -> PartSummary:
        part = read_part(self._local, directory, save, self._rank)
        if part is None:
            raise CheckpointError(f"{join(self._local.uri, directory)}: the part of rank {self._rank} is gone")
        return part

    def _clear(self, save: str, directory: str) -> None:
        try:
            remove_part(self._local, directory, save, self._rank)
        except HoldfastError as error:
            _LOG.warning("what is not needed any more of %s stays on the local disk for now: %s", directory, error)


def files_in_front(local: Storage) -> Iterator[tuple[str, str]]:
    """Iterate over what lies on a disk in front of the remote: checkpoint's directory, name of the file.

    Nothing else is looked at: the directory may be the user's own, with much in it, or with what we may not read.
    """
    for child in local.list("", recursive=False):
        directory = child.path.rstrip("/")
        if directory.startswith("step_"):
            for info in local.list(directory, recursive=False):
                yield directory, info.path.rpartition("/")[2]
