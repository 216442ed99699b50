"""`ShardCheckpoints`: what all ranks write together, in a loop of the user's own, becomes the checkpoints of a run."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from holdfast.checkpointer.meeting import Meeting
from holdfast.checkpointer.rendezvous import Rendezvous
from holdfast.errors import ConfigError
from holdfast.trainers.function.handoff import HandoffArea

from .directory_checkpoints import DirectoryCheckpoints, LostCheckpoint
from .places import claim
from .reporting import TOPICS, written_together

__all__ = ["ShardCheckpoints"]

_Keeper = TypeVar("_Keeper", bound="ShardCheckpoints")
_NEW = "new"


class ShardCheckpoints(DirectoryCheckpoints):
    """Keeps checkpoints to which every rank adds its files. A context manager: its end waits until all is durable.

    Every rank makes one and makes the same calls. For a loop that torchrun or another launcher has started: a worker of
    the function trainer uses `reporting`.

    Args:
        path: root of the run: a path or a URI.
        folder: where the files are written before they are committed; all ranks must see it. Default: the run itself,
            where that is a directory, else the temporary directory, which will do on one machine.
        **options: those of `DirectoryCheckpoints`.
    """

    def __init__(self, path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None, **options: Any):
        super().__init__(path, **options)
        self._folder = None if folder is None else os.path.abspath(folder)
        self._home: str | None = None
        self._claimed: str | None = None
        self._count = 0
        self._before: Meeting | None = None  # of the save before

    def __enter__(self: _Keeper) -> _Keeper:
        try:
            meeting = self._meet("home")
        except ConfigError:  # no process group yet: the first call that needs one finds it
            return self
        try:
            self._find_home(meeting)
        except BaseException:
            self.close()
            raise
        return self

    def latest(self) -> str | None:
        """As `DirectoryCheckpoints.latest`; a rank that does not see where the others will write is named now.

        Raises:
            ConfigError: a rank does not see the place.
            CorruptCheckpointError: there are checkpoints and none of them is good.
        """
        self._find_home()
        return super().latest()

    @contextlib.contextmanager
    def newest(self) -> Iterator[str | None]:
        """Give what `latest` gives, for a block: what had to be downloaded is removed at its end."""
        self._find_home()
        with contextlib.ExitStack() as downloads:
            yield self._newest(downloads)

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
        home = self._find_home()
        meeting = self._meet("keep", "train with one process")
        directory = meeting.agree(_NEW, lambda: self._new_directory(home) if meeting.rank == 0 else None)
        _forget(self._before)  # all have come here, so nobody reads it any more
        self._before = meeting

        def take() -> None:
            self.add(directory, step=step, epoch=epoch, metrics=metrics, move=True)

        with written_together(meeting, directory, take, work_s=self.timeout_s):  # add waits for earlier ones
            yield directory

    # -- inside

    def _let_go(self) -> LostCheckpoint | None:
        under_way = self._session is not None and len(self._session.saves) > 0
        lost = super()._let_go()
        claimed, self._claimed, self._home = self._claimed, None, None
        # What the writer still reads, or a lost checkpoint that was not moved, is left to the sweep of a later process.
        if claimed is not None and not under_way and (lost is None or not f"{lost.left}/".startswith(f"{claimed}/")):
            shutil.rmtree(claimed, ignore_errors=True)
        return lost

    def _find_home(self, meeting: Meeting | None = None) -> str:
        """Agree on where all write, once in each life of the run, before anything is trained."""
        if self._home is None:
            meeting = meeting or self._meet("home")
            home = meeting.agree(
                "home", lambda: self._make_home() if meeting.rank == 0 else None, work_s=self.timeout_s
            )
            try:
                meeting.agree("seen", lambda: _check_seen(home))
            finally:
                if meeting.rank == 0 and self._claimed is None:
                    with contextlib.suppress(OSError):
                        os.rmdir(home)
            self._home = home
        return self._home

    def _make_home(self) -> str:
        place = HandoffArea(root=self.storage, uri=self.storage.uri, start_id=self._run().start_id, rank=0)
        home = os.path.dirname(place.new("new"))
        if self._folder is not None:
            home = os.path.join(self._folder, os.path.basename(home))
        if self._folder is not None or self.storage.local_root is None:
            claim(home)
            self._claimed = home
        os.makedirs(home, exist_ok=True)
        return home

    def _new_directory(self, home: str) -> str:
        self._count += 1
        directory = os.path.join(home, f"new-{self._count:x}")
        os.makedirs(directory)
        return directory


def _check_seen(directory: str) -> None:
    if not os.path.isdir(directory):  # the name is unique to this run: no other machine has it by chance
        raise ConfigError(
            f"{directory} is not on the machine of this rank: with several machines give a folder=... on a file system "
            "that all of them share"
        )


def _forget(meeting: Meeting | None) -> None:
    if isinstance(meeting, Rendezvous):
        for topic in (_NEW, *TOPICS):
            meeting.forget(topic)
