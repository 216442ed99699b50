"""Keepers: directories that a framework writes become the checkpoints of a run, in the background.

`DirectoryCheckpoints` keeps those of a framework's own trainer; `ShardCheckpoints` those that all ranks write together,
in a loop of the user's own. What a framework reads again is checked here first, since it checks nothing:
`verified_directory`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast._ranks import current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import verify
from holdfast.checkpointer.meeting import Alone, Meeting, meet
from holdfast.checkpointer.options import check_root
from holdfast.checkpointer.pending_saves import TRANSIENT_ERRORS, RunSave, passing_error, state_of
from holdfast.checkpointer.rendezvous import Rendezvous
from holdfast.checkpointer.resume import Quarantine, first_good
from holdfast.checkpointer.run_session import RunSession
from holdfast.config import Keep, check_timeout, ranking_of
from holdfast.copying.local import clone_or_link_tree
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    HoldfastError,
    IncompleteCheckpointError,
)
from holdfast.run.catalog import Catalog
from holdfast.run.names import INCOMING
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve
from holdfast.trainers.function.handoff import HandoffArea
from holdfast.writer.messages import IngestSource, SaveResult

from .reporting import STAGED, TOPICS, claim, scalars, sweep_staged, unused, written_together

if TYPE_CHECKING:
    from typing_extensions import Self

_ASIDE = "_holdfast-lost-"

_LOG = get_logger("frameworks")
_MAX_PENDING = 2  # directories on their way; their files may be the only copies left, on the framework's disk
_TIMEOUT_S = 600.0
_WORK_S = 24 * 3600.0
"""How long ranks wait for a rank that downloads a checkpoint or reads its bytes, which takes as long as it takes."""


class DirectoryCheckpoints:
    """Keeps directories that a framework writes as the checkpoints of a run.

    Every rank makes this object and makes the same calls; rank 0 does the work, and on the other ranks `add`, `report`
    and `wait` do nothing. The first call that needs the run opens it: it takes the lease, and with it a new attempt.
    If the process dies, what was added is committed all the same.

    Args:
        path: root of the run: a path or a URI.
        keep: which checkpoints stay; None keeps all. The framework's own directories are never touched.
        on_full: when the storage is full or does not answer: "skip" (say so and train on; the tenth time in a row
            raises, and so do `wait` and `close` without the newest) or "raise".
        timeout_s: bound of every wait.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> written = folder / "checkpoint-7"
        >>> written.mkdir(); _ = (written / "weights.bin").write_bytes(b"1234")
        >>> keeper = DirectoryCheckpoints(folder / "run")
        >>> keeper.add(written, step=7, metrics={"loss": 0.5})
        >>> keeper.wait()
        >>> os.path.basename(keeper.latest())
        'step_00000007'
        >>> keeper.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Keep | None = Keep(last=3),  # noqa: B008 - Keep is frozen
        on_full: str = "skip",
        timeout_s: float = 600.0,
    ) -> None:
        if keep is not None and not isinstance(keep, Keep):
            raise ConfigError(f"keep={keep!r}: give a holdfast.Keep, as in Keep(last=3), or None to keep everything")
        if on_full not in ("skip", "raise"):
            raise ConfigError(f"on_full={on_full!r}: use 'skip' or 'raise'")
        check_timeout(timeout_s)
        self.storage = resolve(path)
        self.keep, self.on_full, self.timeout_s = keep, on_full, timeout_s
        check_root(self.storage)
        self._session: RunSession | None = None
        self._has_added = False  # in this attempt
        self._start: Checkpoint | None = None  # what `latest` gave last
        self._of_step: dict[int, str] = {}
        self._lost: LostCheckpoint | None = None  # the newest of which the outcome is known, if it was
        self._downloads = contextlib.ExitStack()
        self._swept: set[str] = set()

    # -- where to go on from

    def latest(self) -> str | None:
        """Return a local directory with the newest checkpoint that is sound; None if there is none at all.

        Every byte has been checked against its digest. To be read only. Of a remote run it is downloaded once per
        machine and stays until `close`. A damaged checkpoint is set aside and the next older one taken. All ranks get
        the same checkpoint; with several ranks, all of them call this.

        Raises:
            CorruptCheckpointError: there are checkpoints and none of them is good.
            RunBusyError: another live process holds the run.
        """
        return self._newest(self._downloads)

    def directory_of(self, step: int, *, wanted: bool = True) -> str | None:
        """Return a local directory with the checkpoint of a step, like `latest`; None if there is no sound one.

        Args:
            step: which.
            wanted: on this rank; if no rank wants it, nothing is done.
        """
        meeting = self._meet("step")
        if not meeting.agree("wanted", lambda: wanted, any):
            return None
        try:
            found = self._sound(meeting, self._downloads, step)
        except CorruptCheckpointError as error:
            _LOG.warning("%s", error)
            return None
        return None if found is None else found[1]

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints of the run, newest first."""
        return [Checkpoint.at(self.storage, name) for name in Catalog(self.storage).names()]

    def best(self, metric: str | None = None, *, mode: str | None = None) -> Checkpoint | None:
        """Return the best checkpoint by ``metric`` (default: the one ``keep`` ranks by), None if none has a value.

        Without ``mode``: that of ``keep`` if it ranks by this metric, else "min".
        """
        record = Catalog(self.storage).best(*ranking_of(self.keep, metric, mode, what="best()"))
        return None if record is None else Checkpoint.at(self.storage, record.name)

    # -- what to keep

    def add(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        epoch: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        move: bool = False,
    ) -> None:
        """Keep a directory (or one file) that is written completely. Returns at once; it may be deleted from now on.

        It must not be written to until it is committed: a new checkpoint goes into new files. Only where the file
        system can neither share blocks nor link files does this wait until it is copied.

        Args:
            directory: on this machine.
            step: training step.
            epoch: current epoch.
            metrics: what the retention ranks by; what is no number or string is left out.
            move: take it away, which on the disk of the run is a rename.

        Raises:
            CheckpointNotFoundError: there is nothing.
            HoldfastError: a directory added before could not be committed; this one is handed over all the same.
        """
        if current_ranks().rank != 0:
            return
        source = os.path.abspath(directory)
        if not os.path.exists(source):
            raise CheckpointNotFoundError(f"there is no {source} to keep: it was never written, or is deleted already")
        session = self._run()
        try:
            session.settle(leave=_MAX_PENDING - 1)
        finally:  # this directory is complete, whatever became of earlier ones
            save_id = session.next_save_id()
            staged, owned = (source, True) if move else self._stage(source, session, save_id)
            lost = partial(self._lose, source, staged)
            save = RunSave(
                step=step, epoch=epoch, metrics=scalars(metrics), committed=partial(self._committed, staged), lost=lost,
            )  # fmt: skip
            sources = [IngestSource(rank=0, path=staged or source, owned=owned)]
            session.save_directory(sources, save, save_id=save_id, world_size=current_ranks().world_size)
            self._of_step[step], self._has_added = save.name, True
        if staged is None:
            session.settle()

    def begin(self, *, step: int = 0) -> None:
        """Begin another training in this process: a new attempt, if anything was added before, whose steps are older.

        Args:
            step: where it begins; that of what `latest` gave, if it goes on from there.
        """
        self._settle()
        start = self._start
        if self._has_added:
            self._end("another training began")
            if start is not None and start.step == step:
                self._resumed(start)

    def report(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Bind late metrics, of an evaluation say, to the checkpoint of a step; nothing if it has none in this life."""
        name, session = self._of_step.get(step), self._session
        if name is None or session is None:
            return
        what = f"metrics of step {step} were not bound"
        session.note("metrics", about=name, what=what, name=name, metrics=scalars(metrics))
        session.wait_for_notes()

    def wait(self) -> None:
        """Wait until everything added is committed.

        Raises:
            HoldfastError: the newest is not, and why; or it takes longer than ``timeout_s``.
        """
        self._settle()
        if self._lost is not None:
            raise self._lost.final

    def close(self) -> None:
        """Wait like `wait`, give the run back and remove downloads; idempotent. The next call opens the run anew.

        Raises:
            HoldfastError: as `wait`; what was not kept is not removed, and the message says where it is.
        """
        try:
            self._settle()
        finally:
            lost = self._let_go()
        if lost is not None:
            raise lost.final

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except HoldfastError as lost:
            if error is None:
                raise
            _LOG.error("%s", lost)  # what ended the block is raised

    # -- inside

    def _run(self) -> RunSession:
        """Open the run, once."""
        if self._session is None:
            session = RunSession(self.storage, on_full=self.on_full, timeout_s=self.timeout_s)
            try:
                session.open(keep=self.keep)
            except BaseException:
                session.close("did not start", timeout_s=0.0)
                raise
            self._session = session
        return self._session

    def _settle(self) -> None:
        if self._session is not None:
            self._session.settle()

    def _let_go(self) -> LostCheckpoint | None:
        """Give the run back and remove downloads; returns the newest if it was lost."""
        lost = self._end("finished")
        self._downloads.close()
        return lost

    def _end(self, reason: str) -> LostCheckpoint | None:
        """End the attempt; returns its newest if it was lost."""
        session, self._session = self._session, None  # the writer goes on with what it has; nobody hears of it
        lost, self._lost = self._lost and self._lost.aside(), None
        self._of_step.clear()
        self._has_added, self._start = False, None
        if session is not None:
            with contextlib.suppress(HoldfastError):
                session.end(reason)
            session.close(reason)
        return lost

    def _meet(self, name: str, otherwise: str = "give a path yourself") -> Meeting:
        return meet(current_ranks(), name=name, timeout_s=self.timeout_s, otherwise=otherwise)

    def _newest(self, downloads: contextlib.ExitStack) -> str | None:
        meeting = self._meet("latest")
        if (found := self._sound(meeting, downloads)) is not None:
            meeting.agree("resumed", lambda: self._resumed(found[0]))
        return None if found is None else found[1]

    def _sound(
        self, meeting: Meeting, downloads: contextlib.ExitStack, step: int | None = None
    ) -> tuple[Checkpoint, str] | None:
        names, quarantined = meeting.agree("candidates", lambda: self._candidates(step))
        return newest_sound(
            self.storage, candidates=names, quarantined=quarantined,
            quarantine=lambda name, reason: self._run().quarantine(name, reason),  # on rank 0 alone
            meeting=meeting, downloads=downloads, what_else="point this to another place",
        )  # fmt: skip

    def _candidates(self, step: int | None) -> tuple[list[str], dict[str, str]]:
        if current_ranks().rank != 0:
            return [], {}
        session = self._run()
        session.settle()
        names = [record.name for record in Catalog(self.storage).records() if step in (None, record.step)]
        known = dict(session.quarantined)
        return names, known if step is None else {name: known[name] for name in names if name in known}

    def _resumed(self, checkpoint: Checkpoint) -> None:
        if current_ranks().rank == 0:
            session, manifest = self._run(), checkpoint.manifest
            self._start = checkpoint
            step = (manifest.step if manifest is not None else None) or 0
            session.saves.parent = None if manifest is None else manifest.checkpoint_id
            session.ask("resumed", name=checkpoint.name, step=step)

    def _committed(self, staged: str | None, save: RunSave, result: SaveResult) -> None:
        self._drop_lost()
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        for warning in result.warnings:
            _LOG.warning("%s: %s", save.name, warning)

    def _lose(self, source: str, staged: str | None, save: RunSave, error: BaseException) -> str:
        self._drop_lost()
        self._lost = LostCheckpoint.of(source, staged, name=save.name, step=save.step, error=error)
        self._of_step = {step: name for step, name in self._of_step.items() if name != save.name}
        return self._lost.what

    def _drop_lost(self) -> None:
        """Remove what is left of a lost checkpoint: a newer one has taken its place."""
        lost, self._lost = self._lost, None
        if lost is not None:
            lost.drop()

    def _stage(self, source: str, session: RunSession, save_id: str) -> tuple[str | None, bool]:
        """Make sure of the files; returns where they are (None: where they were) and whether they may be moved."""
        parent, run_id = os.path.dirname(source), session.opened.run_id
        if parent not in self._swept:
            sweep_staged(parent, run_id, session.start_id)
            self._swept.add(parent)
        staged = os.path.join(parent, f"{STAGED}{run_id[:8]}-{save_id}")
        owned = clone_or_link_tree(source, staged)
        return (None, False) if owned is None else (staged, owned)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCheckpoint:
    """A checkpoint that is not in the run.

    Attributes:
        name: it would have had.
        step: of it.
        error: why.
        left: where its files still are; None if nowhere.
        ours: nobody else uses these files.
    """

    name: str
    step: int
    error: BaseException
    left: str | None
    ours: bool

    @classmethod
    def of(cls, source: str, staged: str | None, *, name: str, step: int, error: BaseException) -> LostCheckpoint:
        """Describe the loss of ``source``, whose files are in ``staged`` too, or alone; a second copy is removed."""
        if staged not in (None, source) and os.path.exists(source):
            shutil.rmtree(staged or "", ignore_errors=True)
            staged = None
        left = staged or source
        exists = os.path.exists(left)
        return cls(name=name, step=step, error=error, left=left if exists else None, ours=staged is not None)

    @property
    def what(self) -> str:
        """Say what was lost, why, and where the files are."""
        why = f"{state_of(self.error)} ({self.error})" if isinstance(self.error, TRANSIENT_ERRORS) else str(self.error)
        return f"the checkpoint of step {self.step} was NOT kept, {why}; " + (
            "its files are gone" if self.left is None else f"its files are in {self.left}"
        )

    @property
    def final(self) -> BaseException:
        """The error for an end without this checkpoint, which was to be the newest."""
        return passing_error(self.error, self.what) if isinstance(self.error, TRANSIENT_ERRORS) else self.error

    def drop(self) -> None:
        """Remove what is left: there is a newer checkpoint."""
        if self.ours and self.left is not None:
            shutil.rmtree(self.left, ignore_errors=True)

    def aside(self) -> LostCheckpoint:
        """Bring what is left to where neither the end of the run nor its next start removes it."""
        if self.left is None or not self.ours:
            return self
        home, name = os.path.split(self.left)
        if os.path.basename(home).startswith(INCOMING):
            home = os.path.dirname(home)
        elif not name.startswith(STAGED):
            return self
        target = unused(os.path.join(home, _ASIDE + self.name))
        try:
            os.rename(self.left, target)
        except OSError as error:
            _LOG.warning("%s: they cannot be moved to %s: %s", self.what, target, error)
            return self
        moved = replace(self, left=target)
        _LOG.warning("%s", moved.what)
        return moved


@contextlib.contextmanager
def verified_directory(
    checkpoint: str | os.PathLike[str] | Checkpoint, *, timeout_s: float = _TIMEOUT_S
) -> Iterator[str]:
    """Give a local directory with the files of a checkpoint, every byte checked against its digest; to be read only.

    One rank of each machine checks. With several ranks all of them call this, and it fails on all or on none.

    Args:
        checkpoint: path, URI or handle. A foreign checkpoint has no digests, and is given as it is.
        timeout_s: how long ranks wait for one another before the checking begins.

    Raises:
        CorruptCheckpointError: a file is damaged or missing; names all.
        CheckpointNotFoundError: there is nothing.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    meeting = meet(current_ranks(), name="verified", timeout_s=timeout_s, otherwise="read it on one rank alone")
    with contextlib.ExitStack() as stack:
        found: list[str] = []
        meeting.agree("come", lambda: None)

        def check() -> None:
            found.append(stack.enter_context(source.as_directory()))
            if source.manifest is not None and (problem := _problem(source, meeting)):
                raise CorruptCheckpointError(f"{source.uri} is damaged: {problem}")

        meeting.agree("checked", check, work_s=_WORK_S)
        yield found[0]


def newest_sound(
    storage: Storage,
    *,
    candidates: Sequence[str],
    quarantined: Mapping[str, str],
    quarantine: Quarantine,
    meeting: Meeting,
    downloads: contextlib.ExitStack,
    what_else: str,
) -> tuple[Checkpoint, str] | None:
    """Return the first candidate of which every byte is sound for all ranks, and its local path; None if there is none.

    Args:
        storage: holds the candidates.
        candidates: names of committed checkpoints, newest first.
        quarantined: names known to be damaged, with reasons.
        quarantine: records a damaged checkpoint.
        meeting: of the ranks, all of which call this.
        downloads: a remote checkpoint stays on this machine until this is closed.
        what_else: the user may do if none is sound, for the error.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is sound.
    """
    found: list[str] = []

    def attempt(checkpoint: Checkpoint) -> str | None:
        try:
            found.append(downloads.enter_context(checkpoint.as_directory()))
            return _problem(checkpoint, meeting)
        except (CorruptCheckpointError, IncompleteCheckpointError, CheckpointNotFoundError) as error:
            return str(error)

    checkpoint = first_good(
        storage, candidates=candidates, quarantined=quarantined, quarantine=quarantine, meeting=meeting,
        attempt=attempt, what_else=what_else, work_s=_WORK_S,
    )  # fmt: skip
    return None if checkpoint is None else (checkpoint, found[-1])


def _problem(checkpoint: Checkpoint, meeting: Meeting) -> str | None:
    """Say what is wrong with the bytes on a disk: one rank of each machine reads them all. A download is checked.

    Where ranks cannot tell each other, each reads for itself: all find the same.
    """
    others_hear = not isinstance(meeting, Alone)
    if checkpoint.storage.local_root is None or (others_hear and current_ranks().local_rank != 0):
        return None
    checked = verify(checkpoint.storage, checkpoint.directory, deep=True, beside=False)
    return None if checked.ok else "; ".join(checked.problems)


# ---- of all ranks


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

    def __enter__(self) -> Self:
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
