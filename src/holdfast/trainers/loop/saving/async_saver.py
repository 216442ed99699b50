"""The saves of one saver, one after another: copy, write, and what comes after the commit."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast.checkpointer.identity import manifest_fields
from holdfast.checkpointer.rank_group import ANSWER_MARGIN_S
from holdfast.checkpointer.transient import TRANSIENT_ERRORS, LostSaves, state_of
from holdfast.errors import HoldfastError, StorageError, StorageFullError, UnsupportedStateError
from holdfast.state.save.snapshot import SaveRequest, Snapshotter
from holdfast.writer.messages import SaveResult

from ..training.ranks import TIMEOUT_S
from .files import FileImage
from .folder import SaveFolder
from .gather import gathered
from .schema import as_torch_file, expand

__all__ = ["AsyncSaver"]

_LOG = get_logger("trainer")


class AsyncSaver:
    """Carries out saves of one kind into one folder, at most one under way.

    Args:
        folder: where to; opened.
        container: "directory", "torch" or "safetensors".
        claim: the name of its files that the folder has claimed; None for directories.
        parent: id of the checkpoint that training goes on from.
        make_room: deletes what the rules of retention do not keep; tells whether anything has gone.
    """

    def __init__(
        self,
        folder: SaveFolder,
        container: str,
        *,
        claim: str | None,
        parent: str | None,
        make_room: Callable[[], bool],
    ) -> None:
        self._folder, self._container, self._claim = folder, container, claim
        self._make_room = make_room
        self._ranks = folder.ranks
        self._snapshotter = Snapshotter(
            rank=self._ranks.rank, world_size=self._ranks.world_size, timeout_s=TIMEOUT_S,
            max_file_bytes=folder.storage.max_file_bytes,
        )  # fmt: skip
        self._image = FileImage()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-saves")
        self._pending: Future[None] | None = None
        self._parent = parent  # the newest checkpoint of this training that is durable
        self._next_parent: str | None = None  # the one under way
        self.lost = LostSaves()
        self._held_s = 0.0  # by the save under way

    def glance(self) -> None:
        """Take in a save that has ended; costs nothing while none has.

        With several ranks a failure is left to `settle`, which all of them do at the same batch.
        """
        pending = self._pending
        if pending is not None and pending.done() and (self._ranks.world_size == 1 or pending.exception() is None):
            self.settle()

    @property
    def ended(self) -> bool:
        """True when the save under way has ended, so that `settle` returns at once."""
        return self._pending is not None and self._pending.done()

    def prepare(self, live: Mapping[str, Any]) -> None:
        """Get ready for a first save that is not due yet: memory for a directory is got meanwhile.

        Raises:
            UnsupportedStateError: something in the state cannot be saved; that would come out hours later.
        """
        with _in_our_words():
            if self._container == "directory":
                assert self._folder.client is not None
                self._snapshotter.prepare(live, self._folder.client)
            elif self._container == "torch" and self._ranks.world_size == 1:  # with more of them it takes a meeting
                as_torch_file(gathered(expand(live), self._ranks) or {})

    def save(
        self, name: str, live: Mapping[str, Any], *, about: Mapping[str, Any], extra: Mapping[str, str],
        after: Callable[[], object],
    ) -> None:  # fmt: skip
        """Start a save; waits for the one before. The caller may change the state when this returns.

        Args:
            name: path inside the folder; a checkpoint there is replaced when this one commits.
            live: the state in the anatomy of a checkpoint.
            about: step, epoch and metrics.
            extra: its content, "full" or "weights", and the training it belongs to.
            after: called on another thread once it is durable.

        Raises:
            HoldfastError: the save before, or this one, failed.
        """
        self.settle()
        begun = time.perf_counter()
        try:
            with _in_our_words():
                durable = self._hand_over(name, live, about, extra)
        except TRANSIENT_ERRORS as error:
            self._leave_out(error)
            return
        self._held_s = time.perf_counter() - begun
        if durable is None:
            after()
            return
        if self._claim is None and "/" in name:  # not of the run's index: nobody else asks whether it still is ours
            durable = self._thread.submit(self._confirm, durable)
        self._pending = self._thread.submit(self._follow, durable, begun, about["step"], after)

    def _hand_over(
        self, name: str, live: Mapping[str, Any], about: Mapping[str, Any], extra: Mapping[str, str]
    ) -> Future[Any] | None:
        """Copy the state; None where another rank stores it."""
        if self._container != "directory":
            return self._hand_over_file(name, live, about, extra)
        folder = self._folder
        assert folder.client is not None
        checkpoint_id, save_id = uuid.uuid4().hex, folder.next_save_id()
        joint = folder.team is not None
        fields = manifest_fields(
            run_id=folder.run_id, checkpoint_id=checkpoint_id, parent=self._parent, attempt=folder.attempt,
            world_size=self._ranks.world_size, **about,
        )  # fmt: skip
        self._next_parent = checkpoint_id
        in_run = "/" not in name  # the index of a run knows what lies directly in it
        with contextlib.nullcontext() if folder.team is None else folder.team.broadcast_errors(save_id):
            request = SaveRequest(
                storage=folder.storage, directory=name, save_id=save_id, manifest={**fields, "extra": dict(extra)},
                overwrite=True, reuse=in_run, run=in_run and self._ranks.leads, part=joint, joint=joint,
            )  # fmt: skip
            return self._snapshotter.submit(live, folder.client, request).future

    def _hand_over_file(
        self, name: str, live: Mapping[str, Any], about: Mapping[str, Any], extra: Mapping[str, str]
    ) -> Future[Any] | None:
        folder = self._folder
        note = {
            "attempt": folder.attempt, "step": about["step"], "epoch": about["epoch"], "created": time.time(),
            "metrics": about["metrics"], "weights_only": extra["content"] == "weights", "training": extra["training"],
        }  # fmt: skip
        found = gathered(expand(live), self._ranks)
        if found is None:
            return None
        if self._container == "torch":
            self._image.take_torch(as_torch_file(found), note)
        else:
            model = found["state"]["model"]
            self._image.take_weights({key: one for key, one in model.items() if torch.is_tensor(one)}, note)
        return self._thread.submit(self._stored, name, self._submit(name))

    def _submit(self, name: str) -> Future[Any]:
        assert self._claim is not None
        return self._folder.claims.submit(self._claim, name, self._image)

    def _confirm(self, durable: Future[Any]) -> None:
        durable.result()
        self._folder.confirm()

    def _stored(self, name: str, durable: Future[Any]) -> None:
        """Wait until a file is there; where there was no space for it, it is stored once more after making room."""
        try:
            durable.result()
        except StorageFullError:
            if not self._room_made():
                raise
            self._submit(name).result()

    def _room_made(self) -> bool:
        made = self._make_room()
        if made:
            _LOG.warning("%s is full: old checkpoints were removed by the rules of retention", self._folder.spelling)
        return made

    def _follow(self, durable: Future[Any], begun: float, step: int, after: Callable[[], object]) -> None:
        held_s = self._held_s
        try:
            result = durable.result()
        except StorageFullError:
            if self._container == "directory":
                self._room_made()  # for the next one: the state has gone on
            raise
        self._parent = self._next_parent
        if isinstance(result, SaveResult):
            self._folder.journal_cost(result.name, step, held_s=held_s, durable_s=time.perf_counter() - begun)
        try:
            after()
        except TRANSIENT_ERRORS as error:  # the save itself is not lost
            _LOG.warning(
                "the checkpoint of batch %d is saved, but its link, its upload or the deletion of older ones was not "
                "done, %s (%s): the next save does that", step, state_of(error), error,
            )  # fmt: skip

    def settle(self) -> None:
        """Wait for the save under way; raises what failed.

        A storage that is full or does not answer costs that save only, and is said.

        Raises:
            HoldfastError: it failed, or takes for ever.
            StorageError: it was the tenth in a row that the storage did not take.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        wait([pending], timeout=TIMEOUT_S if self._ranks.world_size == 1 else TIMEOUT_S + ANSWER_MARGIN_S)
        if not pending.done():
            self._pending = pending
            raise HoldfastError(
                f"a save is not durable after {TIMEOUT_S:.0f} s: {self._folder.storage.uri} is stuck or very slow; "
                "training cannot count on it"
            )
        try:
            pending.result()
            self.lost.durable()
        except TRANSIENT_ERRORS as error:
            self._leave_out(error)

    def _leave_out(self, error: StorageError) -> None:
        self.lost.add(error)
        if self._ranks.leads:
            _LOG.warning(
                "a checkpoint was NOT saved, %s (%s); older ones are untouched, training goes on (save %d in a row)",
                state_of(error), error, self.lost.in_a_row,
            )  # fmt: skip

    def close(self) -> None:
        """Give memory and thread back; what is under way goes on."""
        self._thread.shutdown(wait=False)
        if self._pending is None or self._pending.done():
            self._snapshotter.close()
            self._image.close()


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except UnsupportedStateError as error:
        text = str(error).replace("pass unsupported='drop' to leave it out", "leave it out by save_ignore_keys")
        raise UnsupportedStateError(text) from None
