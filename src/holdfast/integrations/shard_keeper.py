"""`ShardKeeper`: what all ranks write together, in a loop of the user's own, becomes the checkpoints of a run."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from .._ranks import current_ranks
from ..checkpointer.rendezvous import meet
from ..errors import ConfigError
from ..runtime.worker.takeover import Place
from .keeper import DirectoryKeeper
from .places import claim
from .together import written_together

__all__ = ["ShardKeeper"]


class ShardKeeper(DirectoryKeeper):
    """Keeps checkpoints to which every rank adds its files. A context manager: its end waits until all is durable.

    Every rank makes one and makes the same calls. For a loop that torchrun or another launcher has started: a worker of
    the function trainer uses `reporting`.

    Args:
        path: root of the run: a path or a URI.
        folder: where the files are written before they are committed; all ranks must see it. Default: the run itself,
            where that is a directory, else the temporary directory, which will do on one machine.
        **options: those of `DirectoryKeeper`.
    """

    def __init__(self, path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None, **options: Any):
        super().__init__(path, **options)
        self._folder = None if folder is None else os.path.abspath(folder)
        self._claimed: str | None = None
        self._count = 0

    @contextlib.contextmanager
    def writing(
        self, *, step: int, epoch: int | None = None, metrics: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """Give every rank the same empty directory to write into; when all have left the block, it is kept.

        Goes on when the directory is taken over, not when it is durable. If the block raises, nothing is kept.

        Args:
            step: training step.
            epoch: current epoch.
            metrics: those of rank 0 are kept.

        Raises:
            ConfigError: a rank does not see the directory.
            HoldfastError: a rank failed or did not come, or what was kept before could not be committed; on all ranks.
        """
        meeting = meet(current_ranks(), name="keep", timeout_s=self.timeout_s, otherwise="train with one process")
        directory = meeting.agree("place", lambda: self._new_place() if current_ranks().rank == 0 else None)
        meeting.agree("seen", lambda: _check_seen(directory))

        def take() -> None:
            try:
                self.add(directory, step=step, epoch=epoch, metrics=metrics, move=True)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise

        with written_together(meeting, directory, take, work_s=self.timeout_s):  # add waits for earlier ones
            yield directory

    def close(self) -> None:
        """Wait until everything is durable, and give the run back; idempotent."""
        try:
            super().close()
        finally:
            if self._claimed is not None:
                shutil.rmtree(self._claimed, ignore_errors=True)

    def _new_place(self) -> str:
        self._count += 1
        _, opened = self._run()
        name = f"new-{self._count:x}"
        found = Place(root=self.storage, uri=self.storage.uri, start_id=opened.start_id, rank=0).new(name)
        home = os.path.dirname(found)
        if self._folder is not None:
            home = os.path.join(self._folder, os.path.basename(home))
        if self._folder is not None or self.storage.local_root is None:
            claim(home)
            self._claimed = home
        directory = os.path.join(home, name)
        os.makedirs(directory)
        return directory


def _check_seen(directory: str) -> None:
    if not os.path.isdir(directory):  # its name is of this run alone: no other machine has one by chance
        raise ConfigError(
            f"{directory} is not on the machine of this rank: with several machines give a folder=... on a file system "
            "that all of them share"
        )
