"""The saves of one saver, one after another: copy, hand over, and what its owner does right after the commit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from holdfast._log import get_logger
from holdfast.checkpointer.pending_saves import RunSave, failed
from holdfast.checkpointer.run_session import NamedSave
from holdfast.checkpointer.transient import TRANSIENT_ERRORS, LostSaves, state_of
from holdfast.errors import StorageFullError, UnsupportedStateError
from holdfast.model_files import ModelFiles
from holdfast.state.save.snapshot import Snapshotter

from ..training.ranks import TIMEOUT_S
from .files import FileImage
from .folder import SaveFolder
from .gather import gathered
from .schema import as_torch_file, expand

__all__ = ["AsyncSaver"]

_LOG = get_logger("trainers.loop")


class AsyncSaver:
    """Carries out saves of one kind into one folder, at most one under way.

    Args:
        folder: where to; opened.
        container: "directory", "torch" or "safetensors".
        claim: the name of its files that the folder has claimed; None for directories.
        parent: id of the checkpoint that training goes on from.
        make_room: deletes what the rules of retention do not keep; tells whether anything has gone.
        model_files: committed beside the tensors of a directory.
    """

    def __init__(
        self,
        folder: SaveFolder,
        container: str,
        *,
        claim: str | None,
        parent: str | None,
        make_room: Callable[[], bool],
        model_files: ModelFiles | None = None,
    ) -> None:
        self._folder, self._container, self._claim = folder, container, claim
        self._make_room = make_room
        self._ranks = folder.ranks
        self._snapshotter = Snapshotter(
            rank=self._ranks.rank, world_size=self._ranks.world_size, timeout_s=TIMEOUT_S,
            max_file_bytes=folder.storage.traits.max_file_bytes, model_files=model_files,
        )  # fmt: skip
        self._image = FileImage()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-saves")
        self._saves = folder.pending(claim)
        self._saves.parent = parent

    @property
    def parent(self) -> str | None:
        """Id of the checkpoint that the next save goes on from."""
        return self._saves.parent

    @property
    def lost(self) -> LostSaves:
        """The saves that the storage did not take."""
        return self._saves.lost

    def prepare(self, live: Mapping[str, Any]) -> None:
        """Get ready for a first save that is not due yet: memory for a directory is got meanwhile.

        Raises:
            UnsupportedStateError: something in the state cannot be saved; that would come out hours later.
        """
        with _in_our_words():
            if self._container == "directory":
                self._snapshotter.prepare(live, self._folder.session.client)
            elif self._container == "torch" and self._ranks.world_size == 1:  # with more of them it takes a meeting
                as_torch_file(gathered(expand(live), self._ranks) or {})

    def save(
        self, name: str, live: Mapping[str, Any], *, about: Mapping[str, Any], extra: Mapping[str, str],
        after: Callable[[bytes], object],
    ) -> None:  # fmt: skip
        """Start a save; waits for the one before. The caller may change the state when this returns.

        Args:
            name: path inside the folder; a checkpoint there is replaced when this one commits.
            live: the state in the anatomy of a checkpoint.
            about: step, epoch and metrics.
            extra: its content, "full" or "weights", and the training it belongs to.
            after: called on another thread once it is durable, with its manifest; b"" of a single file.

        Raises:
            HoldfastError: the save before, or this one, failed.
        """
        with _in_our_words():
            if self._container != "directory":
                self._save_file(name, live, about=about, extra=extra, after=after)
                return
            finish = partial(self._finish, name, about["step"], after)
            named = NamedSave(
                name=name, saves=self._saves, overwrite=True, extra=extra, lost=_say_lost,
                follow=lambda durable: self._thread.submit(finish, durable),
            )  # fmt: skip
            self._folder.session.save_state(lambda: live, self._snapshotter, **about, named=named)

    def _save_file(
        self, name: str, live: Mapping[str, Any], *, about: Mapping[str, Any], extra: Mapping[str, str],
        after: Callable[[bytes], object],
    ) -> None:  # fmt: skip
        """Copy the state into a file in memory, and let the writer of rank 0 store it."""
        self._saves.settle()
        begun = time.perf_counter()
        note = {
            "attempt": self._folder.attempt, "step": about["step"], "epoch": about["epoch"], "created": time.time(),
            "metrics": about["metrics"], "weights_only": extra["content"] == "weights", "training": extra["training"],
        }  # fmt: skip
        found = gathered(expand(live), self._ranks)
        if found is None:  # rank 0 stores it
            after(b"")
            return
        if self._container == "torch":
            self._image.take_torch(as_torch_file(found), note)
        else:
            model = found["state"]["model"]
            self._image.take_weights({key: value for key, value in model.items() if torch.is_tensor(value)}, note)
        future: Future[Any]
        try:
            future = self._submit(name)
        except TRANSIENT_ERRORS as error:
            future = failed(error)
        future = self._thread.submit(self._finish, name, about["step"], after, future)
        self._saves.add(
            RunSave(
                name=name, step=about["step"], checkpoint_id=None, future=future, begun=begun,
                committed=lambda save, result: None, lost=_say_lost,
            )
        )  # fmt: skip

    def _submit(self, name: str) -> Future[Any]:
        assert self._claim is not None
        return self._folder.claims.submit(self._claim, name, self._image)

    def _finish(self, name: str, step: int, after: Callable[[bytes], object], durable: Future[Any]) -> Any:
        """Wait for the commit, and do what comes after it. Runs on our thread."""
        try:
            result = durable.result()
        except StorageFullError:
            made = self._room_made()
            if self._container == "directory" or not made:  # the room is for the next one: the state has gone on
                raise
            result = self._submit(name).result()
        if self._claim is None and "/" in name:  # not of the run's index: nobody else asks whether it still is ours
            self._folder.confirm()
        try:
            after(result.manifest if self._container == "directory" else b"")
        except TRANSIENT_ERRORS as error:  # the save itself is not lost
            _LOG.warning(
                "the checkpoint of batch %d is saved, but its link, its upload or the deletion of older ones was not "
                "done, %s (%s): the next save does that", step, state_of(error), error,
            )  # fmt: skip
        return result

    def _room_made(self) -> bool:
        made = self._make_room()
        if made:
            _LOG.warning("%s is full: old checkpoints were removed by the rules of retention", self._folder.spelling)
        return made

    def glance(self) -> None:
        """Take in a save that has ended; costs nothing while none has. See `PendingSaves.glance`."""
        if self._saves.ended.is_set():
            self._saves.glance()

    def settle_ended(self) -> None:
        """Take in a save that has ended, well or not; all ranks call it at the same batch. Raises like `settle`."""
        self._saves.settle(leave=len(self._saves))

    def settle(self) -> None:
        """Wait for the save under way; raises what failed.

        A storage that is full or does not answer costs that save only, and is said.

        Raises:
            HoldfastError: it failed, or takes for ever.
            StorageError: it was the tenth in a row that the storage did not take.
        """
        self._saves.settle()

    def close(self) -> None:
        """Give memory and thread back; what is under way goes on."""
        self._thread.shutdown(wait=False)
        if not self._saves.busy:
            self._snapshotter.close()
            self._image.close()


def _say_lost(save: RunSave, error: BaseException) -> str:
    return f"a checkpoint was NOT saved, {state_of(error)} ({error}); older ones are untouched, training goes on"


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except UnsupportedStateError as error:
        text = str(error).replace("pass unsupported='drop' to leave it out", "leave it out by save_ignore_keys")
        raise UnsupportedStateError(text) from None
