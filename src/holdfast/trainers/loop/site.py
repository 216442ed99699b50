"""What the savers of one trainer share: the folders, the uploads, and how a training ends for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..._ranks import RankInfo
from ...errors import ConfigError
from ...storage.resolve import resolve
from .anatomy import as_torch_file, expand
from .files import FileImage
from .finder import container_of
from .folder import Folder
from .naming import NameTemplate, run_variables
from .state import State
from .uploads import RemoteUploaderDownloader

if TYPE_CHECKING:
    from .saver import CheckpointSaver

__all__ = ["Site"]

_LOG = logging.getLogger("holdfast.trainer")


class Site:
    """Holds the folders of all savers of a trainer.

    Attributes:
        state: of the trainer.
        variables: of the run, for names.
        savers: in their order; the first that saves everything is what autoresume goes by.
        resumed: training goes on from a checkpoint of this very run, with everything that was in it.
        resumed_at: the folder that checkpoint lies in, if it is one of ours.
    """

    def __init__(
        self, state: State, ranks: RankInfo, savers: Sequence[CheckpointSaver], destinations: Sequence[Any]
    ) -> None:
        self.state, self.savers = state, tuple(savers)
        self.variables = run_variables(state.run_name, ranks)
        self.uploaders = [one for one in destinations if isinstance(one, RemoteUploaderDownloader)]
        self._destinations = tuple(destinations)
        self.resumed = False
        self.resumed_at: Folder | None = None
        self._folders: dict[str, Folder] = {}
        self._open = False
        for saver in self.savers:
            spelling = saver.folder.format(self.variables)
            folder = Folder(spelling)
            saver.attach(self, self._folders.setdefault(folder.storage.uri, folder))
        self._check_names()

    def _check_names(self) -> None:
        """Refuse two savers that would write over each other."""
        seen = set()
        for saver in self.savers:
            keys = [(saver.place.storage.uri, saver.filename.text)]
            if saver.remote_file_name is not None and self.uploads_of(saver):
                keys.append(("the uploads", saver.remote_file_name.text))
            for where, name in keys:
                if (where, name) in seen:
                    raise ConfigError(
                        f"two savers save to {where} under the same name {name!r}: give them different names or folders"
                    )
            seen.update(keys)

    def uploads_of(self, saver: CheckpointSaver) -> list[RemoteUploaderDownloader]:
        """Return where the checkpoints of a saver are uploaded to; nowhere if they are remote already."""
        return [] if saver.remote_file_name is None or saver.place.is_remote else self.uploaders

    def flush_logs(self) -> None:
        """Let loggers write what they keep: no checkpoint is ahead of its metrics."""
        for one in self._destinations:
            if callable(flush := getattr(one, "flush", None)):
                flush()

    def resumed_from(self, folder: Folder) -> bool:
        """Tell whether training goes on from a checkpoint in ``folder``."""
        return self.resumed_at is folder

    # -- life

    def open(self) -> None:
        """Take the folders and refuse what must not be overwritten; idempotent.

        Raises:
            RunBusyError: another live process saves to one of them.
            CheckpointExistsError: see `CheckpointSaver.check_overwrite`.
        """
        if self._open:
            return
        for saver in self.savers:
            saver.check_interval()
            saver.place.open(directories=saver.container == "directory", nested=saver.nested)
        try:
            for saver in self.savers:
                saver.check_overwrite(self.state.timestamp)
        except BaseException:
            self.abandon()
            raise
        for saver in self.savers:
            saver.open()
        self._open = True

    def save_all(self) -> None:
        """Save with every saver that saves everything: this process is asked to go."""
        for saver in self.savers:
            if saver.is_full:
                saver.save_now()

    def finish(self, reason: str) -> None:
        """Wait until everything is durable and uploaded, and give the folders back; raises what failed."""
        waits = [*(saver.settle for saver in self.savers), *(one.wait for one in self.uploaders)]
        self._close(reason, [*waits, *(saver.check_lost for saver in self.savers)])

    def end_after(self, error: BaseException, *, patient: bool) -> None:
        """End after an error: what is under way finishes; the error is the one to see."""
        waits: list[Callable[[], object]] = []
        if patient:
            waits = [*(saver.settle for saver in self.savers), *(one.wait for one in self.uploaders)]
        try:
            self._close(f"{type(error).__name__}: {error}", waits, patient=patient)
        except Exception as late:  # noqa: BLE001 - recorded: raising would hide the error of training
            _LOG.error("while training was ending with an error, a save failed too: %s", late)

    def _close(self, reason: str, waits: Sequence[Callable[[], object]], *, patient: bool = True) -> None:
        problem: Exception | None = None
        closes = [lambda folder=folder: folder.close(reason, patient=patient) for folder in self._folders.values()]
        for act in (*waits, self.flush_logs, *(saver.release for saver in self.savers), *closes):
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised below, after everything else has been given back
                problem = problem or error
        self._open = False
        if problem is not None:
            raise problem

    def abandon(self) -> None:
        """Give everything back without waiting: what writers were given they still commit."""
        for saver in self.savers:
            saver.release()
        for folder in self._folders.values():
            folder.close("abandoned", patient=False)
        self._open = False

    # -- one checkpoint somewhere else

    def save_at(self, name: str, *, weights_only: bool) -> str:
        """Save once at any path; durable on return."""
        from ...checkpointer.functions import save
        from .metrics import metrics_of

        state = self.state
        path = NameTemplate(os.fspath(name), what="name").format(self.variables, state.timestamp)
        container, live = container_of(path, what="name"), state.live(weights_only=weights_only)
        step = state.timestamp.count("batch")
        if container == "directory":
            save(path, live, step=step, metrics=metrics_of(state), overwrite=True, ranks="this")
            return path
        head, _, tail = path.rpartition("/")
        image = FileImage()
        note = {"step": step, "weights_only": weights_only, "metrics": metrics_of(state)}
        try:
            if container == "torch":
                image.take_torch(as_torch_file(expand(live)), note)
            else:
                model = expand(live)["state"]["model"]
                weights = {key: one for key, one in model.items() if torch.is_tensor(one)}
                image.take_weights(weights, {**note, "weights_only": True})
            image.store(resolve(head or ("/" if path.startswith("/") else ".")), tail)
        finally:
            image.close()
        return path
