"""`follow`: the checkpoints of a run as they are committed, for another process than the trainer, anywhere.

It reads what is there (run.json, names, manifests) and asks the trainer nothing, so it costs the trainer nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

from holdfast._log import get_logger
from holdfast._units import Interval, IntervalLike, format_duration, parse_interval
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    RunBusyError,
    StorageError,
    StoragePermissionError,
)
from holdfast.run.catalog import Catalog, upkeep
from holdfast.run.index import CHANGES_FILE, RUN_FILE
from holdfast.run.record import Record
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve

from .handle import Checkpoint
from .verify import verify

Start = Literal["newest", "first", "next"] | int
_AnswerT = TypeVar("_AnswerT")

_LOCAL_S, _REMOTE_S = 0.5, 5.0
_LOOK_AGAIN = 12  # every so many polls, list everything whatever run.json says
_GIVE_UP_S = 1800.0  # of a storage that does not answer
_log = get_logger("follow")


def follow(
    run: str | os.PathLike[str],
    every: IntervalLike | None = None,
    start: Start = "newest",
    *,
    only_newest: bool = False,
    verify: bool = False,
    hold_s: float | None = None,
    poll_s: float | None = None,
    timeout_s: float | None = None,
    filesystem: Any = None,
) -> Iterator[Checkpoint]:
    """Yield the committed checkpoints of a run as they come, from any process or machine that reaches its storage.

    Ends when the run has finished. Goes on through kills and restarts of the run: what a later attempt saves comes as
    it is saved, also where it repeats steps. The run need not have begun. Quarantined checkpoints are left out, as are
    those that hold a bad step which the guard of the run has found by then, and those that retention has deleted
    before their turn, and those whose manifest is damaged. A storage that does not answer is asked again, and nothing
    is left out for that.

    Args:
        run: path or URI of the run.
        every: only the first checkpoint at or after each multiple of it: 1000 or "1000ba" steps, "2ep", "1h". Times are
            those of the trainer; after one that runs back the next multiple counts.
        start: "newest": begin with the newest there is; "first": with the oldest; "next": with the next to come; a
            number: with those after this step.
        only_newest: if several have come since the last look, yield the newest alone: for a server of weights.
        verify: read every byte before, and leave out what is damaged.
        hold_s: keep retention away from the yielded checkpoint until the next is asked for, at most for these seconds
            (see `Checkpoint.hold`).
        poll_s: seconds between looks; default 0.5 on a local disk and 5 elsewhere.
        timeout_s: raise TimeoutError when nothing has come for so long.
        filesystem: a file system, as in `Checkpoint`.

    Raises:
        TimeoutError: nothing came for ``timeout_s``.
        ConfigError: an argument has none of these values.
        StorageError: the storage has not answered for half an hour, or refuses.

    Example:
        >>> import tempfile, holdfast
        >>> folder = tempfile.mkdtemp()
        >>> with holdfast.Checkpointer(folder, {"a": [1]}, every=1, resume="never") as ck:
        ...     for _ in range(3):
        ...         ck.step()
        >>> for checkpoint in holdfast.follow(folder, start="first"):
        ...     with checkpoint.hold():
        ...         checkpoint.report(loss=1 / checkpoint.step)
        >>> [round(saved.metrics["loss"], 2) for saved in reversed(ck.checkpoints())]
        [1.0, 0.5, 0.33]
    """
    if isinstance(start, bool) or not (isinstance(start, int) or start in ("newest", "first", "next")):
        raise ConfigError(f"follow(start={start!r}): use 'newest', 'first', 'next' or the number of a step")
    interval = None if every is None else parse_interval(every)
    if interval is not None and interval.unit not in ("ba", "ep", "sec"):
        raise ConfigError(f"follow(every={every!r}): give steps ('1000ba'), epochs ('5ep') or a time ('1h')")
    for name, value in (("poll_s", poll_s), ("timeout_s", timeout_s), ("hold_s", hold_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"follow({name}={value!r}): give a positive number of seconds")
    storage = resolve(run, filesystem)
    if poll_s is None:
        poll_s = _LOCAL_S if storage.local_root is not None else _REMOTE_S
    feed = _Feed(_FollowedRun(storage), interval, start, only_newest=only_newest)
    return _follow(feed, verify=verify, hold_s=hold_s, poll_s=poll_s, timeout_s=timeout_s)


def _follow(
    feed: _Feed, *, verify: bool, hold_s: float | None, poll_s: float, timeout_s: float | None
) -> Iterator[Checkpoint]:
    storage, last = feed.watched.storage, time.monotonic()

    def pause() -> None:
        if timeout_s is not None and time.monotonic() - last > timeout_s:
            raise TimeoutError(
                f"no new checkpoint in {storage.uri} for {format_duration(timeout_s)}, and the run has not finished: "
                "look whether it still trains (`holdfast ls`)"
            )
        time.sleep(poll_s)

    while True:
        for record in feed.look():
            checkpoint = Checkpoint.at(storage, record.name)
            with contextlib.ExitStack() as stack:
                ask = partial(_is_good, checkpoint, verify=verify, hold_s=hold_s, stack=stack)
                while (is_good := feed.watched.ask(ask)) is None:
                    pause()
                if not is_good:
                    continue
                yield checkpoint
            last = time.monotonic()
        if feed.is_over:
            feed.watched.settle()
            return
        pause()


def _is_good(checkpoint: Checkpoint, *, verify: bool, hold_s: float | None, stack: contextlib.ExitStack) -> bool:
    """Tell whether a checkpoint is there and, as far as that is asked for, sound; hold it until ``stack`` ends.

    Raises:
        StorageError: there is no telling now.
    """
    with contextlib.ExitStack() as held:
        try:
            if hold_s is not None:
                held.enter_context(checkpoint.hold(at_most_s=hold_s))
            problem = _damage(checkpoint) if verify else None
            if problem is None and checkpoint.manifest is None:
                return False
        except (CheckpointNotFoundError, IncompleteCheckpointError, FileNotFoundError) as error:
            if IncompleteCheckpointError in (type(error), type(error.__cause__)):
                _log.warning("%s is left out: its manifest is gone, or it is being deleted", checkpoint.uri)
            else:
                _log.info("%s was deleted before its turn", checkpoint.uri)
            return False
        except (CorruptCheckpointError, FormatVersionError) as error:
            problem = str(error)
        if problem is not None:
            _log.warning("%s is damaged and left out: %s", checkpoint.uri, problem)
            return False
        stack.push(held.pop_all())
    return True


def _damage(checkpoint: Checkpoint) -> str | None:
    """Read a whole checkpoint; return what is wrong with it.

    Raises:
        CheckpointNotFoundError: it was deleted.
        IncompleteCheckpointError: its manifest is gone.
        StorageError: it could not be read.
    """
    found = verify(checkpoint.storage, checkpoint.directory, deep=True, beside=False)
    problem = "; ".join(found.problems[:3])
    if found.state == "unreadable":
        raise StorageError(f"{checkpoint.uri} {problem}")
    if found.state == "incomplete":
        raise IncompleteCheckpointError(problem)
    if found.state in ("missing", "foreign"):
        raise CheckpointNotFoundError(problem)
    return None if found.ok else problem


class _FollowedRun:
    """A run seen from outside: reads it again when something has changed, and outlasts a storage that is away."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._catalog: Catalog | None = None
        self._etag: tuple[str | None, ...] = ()
        self._has_changes = False  # of many checkpoints, a save may replace the file of changes alone
        self._names: int | None = None
        self._looks = 0
        self._since: float | None = None  # when the storage was first found away

    def look(self) -> Catalog | None:
        """Return what there is if it may have changed, else None; raises as `ask`."""
        return self.ask(self._look)

    def ask(self, question: Callable[[], _AnswerT]) -> _AnswerT | None:
        """Return what ``question`` answers; None if the storage is away.

        Raises:
            StorageError: it refuses, or has been away for too long.
        """
        try:
            answer = question()
        except StoragePermissionError:
            raise
        except StorageError as error:
            now = time.monotonic()
            self._since = now if self._since is None else self._since
            if now - self._since > _GIVE_UP_S:
                raise
            _log.warning("%s does not answer, looking again: %s", self.storage.uri, error)
            return None
        self._since = None
        return answer

    def _look(self) -> Catalog | None:
        try:
            etag: tuple[str | None, ...] = (self.storage.stat(RUN_FILE).etag,)
        except FileNotFoundError:
            return None  # not begun
        if self._has_changes:
            with contextlib.suppress(FileNotFoundError):
                etag += (self.storage.stat(CHANGES_FILE).etag,)
        root = self.storage.local_root
        with contextlib.suppress(OSError):  # the index is a cache: a commit may be there before it
            names = None if root is None else root.stat().st_mtime_ns
            same = None not in etag and (etag, names) == (self._etag, self._names)
            self._looks += 1
            if same and self._looks % _LOOK_AGAIN:
                return None
            self._names = names
        catalog = Catalog(self.storage)
        if self._has_changes == catalog.index.may_change_beside:
            self._etag = etag
        self._has_changes = catalog.index.may_change_beside
        return catalog

    def settle(self) -> None:
        """Bring what followers have reported into the index of a finished run, unless another process does it now."""
        with contextlib.suppress(RunBusyError, StorageError):
            if self.storage.exists(RUN_FILE):
                with upkeep(self.storage, wait_s=0) as catalog:
                    catalog.settle()


class _Feed:
    """Decides which checkpoints of a run come next. `is_over`: the run has finished, and nothing else comes."""

    def __init__(self, watched: _FollowedRun, every: Interval | None, start: Start, *, only_newest: bool) -> None:
        self.watched = watched
        self.is_over = False
        self._every, self._only_newest = every, only_newest
        self._start: Start | None = start
        self._seen: set[tuple[str, str]] = set()
        self._multiple: tuple[int, int] | None = None  # of `every`: the attempt and the last multiple with a checkpoint

    def look(self) -> Iterator[Record]:
        """Yield the new ones, oldest first."""
        catalog = self.watched.look()
        if catalog is None:
            return
        self.is_over = catalog.index.has_finished
        records = catalog.records()[::-1]
        ids = {(record.name, record.checkpoint_id) for record in records}
        bad = catalog.bad_steps()
        new = [
            record
            for record in records
            if (record.name, record.checkpoint_id) not in self._seen and record.name not in bad
        ]
        self._seen = ids  # those that went are forgotten: a name and an id never come back together
        if self._start is not None and (records or self._start == "next"):
            new, self._start = self._begin(new, self._start), None
        new = [record for record in new if self._is_due(record)]
        yield from new[-1:] if self._only_newest else new

    def _begin(self, records: list[Record], start: Start) -> list[Record]:
        if start == "first":
            return records
        if start == "newest":
            return records[-1:]
        if start == "next":
            return []
        return [record for record in records if record.step > start]

    def _is_due(self, record: Record) -> bool:
        if self._every is None:
            return True
        place = {"ba": record.step, "ep": record.epoch, "sec": record.created}[self._every.unit]
        if place is None:
            return False
        multiple = (0 if self._every.unit == "sec" else record.attempt, int(place // self._every.value))
        if self._every.unit != "sec" and multiple[1] < 1:
            return False  # multiple 0 is the start of the run
        if self._multiple is not None and multiple <= self._multiple:
            if self._every.unit == "sec":
                self._multiple = multiple  # lower where the clock was set right: it must not hold back all that follow
            return False
        self._multiple = multiple
        return True
