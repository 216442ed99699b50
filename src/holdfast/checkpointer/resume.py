"""Find the checkpoint a run goes on from, and load it: newest first, bad ones set aside, never silently from zero."""

from __future__ import annotations

import errno
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast._log import get_logger
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    HoldfastError,
    IncompleteCheckpointError,
    StorageError,
)
from holdfast.run.candidates import newest_good
from holdfast.state.load.selection import Fit
from holdfast.state.tree.objects import leaves
from holdfast.storage.base import Storage
from holdfast.writer.messages import RunOpened

from .console import load_bar
from .meeting import Alone, Meeting
from .progress import RESERVED, Progress

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.run.rollbacks import Rollback
    from holdfast.state.load.restore import Loaded, PutBack

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")
_Made = dict[str, dict[str, Any]]

BEGAN = "began"
"""Name of the note of a run that began at a checkpoint that ``resume=`` named.

Its values: ``uri``, what was named; ``id`` of the checkpoint that was taken there; ``attempt``, the life that did so:
what it and later ones have saved follows from there. ``{}``: the run goes on from something else.
"""

Quarantine = Callable[..., object]
_LOG = get_logger("checkpointer")
_UNREADABLE = "the disk cannot read it; later starts try it again"


@dataclass(slots=True)
class ResumeResult:
    """What a run begins with: the outcome of looking for a checkpoint, and what a start has found out beside.

    Attributes:
        checkpoint: what was loaded, None for a fresh start.
        loaded: what it brought back.
        skipped: (name, reason) of newer checkpoints that were set aside now.
        lacks_progress: the checkpoint was not saved by a run: it holds no step, epoch and data position.
        put_back: what became of its plain values; None before they are put back.
        is_named: it is the one that ``resume=`` names.
        is_own: it is one of this run.
        finished_epochs: epochs an earlier, finished life did in all; None if none finished at this step.
        rollbacks: what the run remembers of bad steps.
        before: step and name of the sound checkpoint of this run before the one that was resumed.
    """

    checkpoint: Checkpoint | None = None
    loaded: Loaded | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    lacks_progress: bool = False
    put_back: PutBack | None = None
    is_named: bool = False
    is_own: bool = False
    finished_epochs: int | None = None
    rollbacks: Sequence[Rollback] = ()
    before: tuple[int, str] | None = None

    @property
    def has_generators(self) -> bool:
        """Whether the random generators were restored."""
        return self.loaded is not None and f"{RESERVED}/rng" in self.loaded.restored


def resume_run(
    storage: Storage,
    state: Mapping[Any, Any],
    mode: str | os.PathLike[str] | Checkpoint,
    *,
    candidates: Sequence[str],
    quarantined: Mapping[str, str],
    quarantine: Quarantine,
    meeting: Meeting | None = None,
    sides: Callable[[str], Sequence[Storage]] | None = None,
    fit: Fit = Fit(),  # noqa: B008 - frozen
    since: Sequence[str] = (),
) -> ResumeResult:
    """Load what ``mode`` asks for into ``state``.

    Args:
        storage: root of the run.
        state: live state.
        mode: "auto", "must", "never", or the checkpoint to use.
        candidates: names of committed checkpoints, newest first.
        quarantined: names set aside by earlier starts, with reasons.
        quarantine: records a bad checkpoint.
        meeting: of the ranks, which all load the same; a candidate that is bad for one rank is bad for all.
        sides: the storages in which a candidate is complete, in the order to try them; default: ``storage`` alone.
        fit: how the checkpoint has to fit the state.
        since: what the run has saved since it began at the checkpoint that ``mode`` names, see `saved_since`: the first
            good one of these goes before it.

    Raises:
        CheckpointNotFoundError: "must" (or an explicit checkpoint) and there is none.
        CorruptCheckpointError: there are checkpoints and none of them is good.
        StateMismatchError: the checkpoint does not fit the state.
    """
    meeting = meeting or Alone()
    is_named = mode not in ("auto", "must", "never")
    if is_named and not since:
        return _explicit(mode, state, meeting, fit)
    if mode == "never":
        return ResumeResult()
    outcome = ResumeResult()

    def attempt(checkpoint: Checkpoint) -> str | None:
        home = checkpoint.storage.child(checkpoint.directory)
        return _try(home, state, meeting, outcome, fit)

    try:
        outcome.checkpoint = first_good(
            storage,
            candidates=since if is_named else candidates,
            quarantined=quarantined,
            quarantine=quarantine,
            meeting=meeting,
            attempt=attempt,
            what_else="name one with resume=<path>, or start afresh with resume='never'",
            sides=sides,
            skipped=outcome.skipped,
        )
    except CorruptCheckpointError:
        if not is_named:
            raise
        if meeting.rank == 0:
            _LOG.warning("nothing that the run has saved since it began at %s is good: it begins there again", mode)
        return _explicit(mode, state, meeting, fit)
    if outcome.checkpoint is None and mode == "must":
        raise CheckpointNotFoundError(
            f"resume='must', but there is no checkpoint under {storage.uri}: check the path, or use resume='auto'"
        )
    return outcome


def saved_since(named: Checkpoint, opened: RunOpened, candidates: Sequence[str], meeting: Meeting) -> list[str]:
    """Return what a run has saved since it began at the checkpoint that ``resume=`` names; nothing once it is done.

    The command that began a run there is the one that is started again when it was stopped or killed.

    Args:
        named: the checkpoint, or the run of which the newest was taken.
        opened: the run.
        candidates: names of its checkpoints, in the order to try them.
        meeting: of the ranks; rank 0 looks at what is named.
    """
    began, finished = _began(opened), opened.finished or {}
    if not began or finished.get("attempt", 0) >= began["attempt"]:
        return []
    attempts = {row[0]: row[1] for row in opened.records}
    since = [name for name in candidates if attempts[name] >= began["attempt"]]
    return since if since and meeting.agree("begun", lambda: meeting.rank == 0 and _is_there(named, began)) else []


def beginning(
    outcome: ResumeResult, named: str | Checkpoint, opened: RunOpened, *, checkpoint_id: str | None
) -> dict[str, Any]:
    """Return the note `BEGAN` for a run that goes on from ``outcome``.

    Args:
        outcome: what it goes on from.
        named: what ``resume=`` says.
        opened: the run.
        checkpoint_id: of what it goes on from.
    """
    taken, is_own = outcome.checkpoint, outcome.is_own
    if outcome.is_named and not isinstance(named, str) and not (is_own and taken != named):  # the run itself: "auto"
        return {"uri": named.uri, "id": checkpoint_id, "attempt": opened.attempt}
    began, attempts = _began(opened), {row[0]: row[1] for row in opened.records}
    follows = is_own and taken is not None and attempts.get(taken.name, 0) >= began.get("attempt", 0)
    return began if follows else {}


def _began(opened: RunOpened) -> dict[str, Any]:
    note = opened.notes.get(BEGAN)
    return note if isinstance(note, dict) and type(note.get("attempt")) is int else {}


def _is_there(named: Checkpoint, began: Mapping[str, Any]) -> bool:
    """Tell whether a run began at this checkpoint."""
    try:
        manifest = named.manifest
    except HoldfastError:  # a run; or it is gone or away, and nothing says that another one has taken its place
        manifest = None
    return bool(named.uri == began.get("uri") if manifest is None else manifest.checkpoint_id == began.get("id"))


def first_good(
    storage: Storage,
    *,
    candidates: Sequence[str],
    quarantined: Mapping[str, str],
    quarantine: Quarantine,
    meeting: Meeting,
    attempt: Callable[[Checkpoint], str | None],
    what_else: str,
    sides: Callable[[str], Sequence[Storage]] | None = None,
    skipped: list[tuple[str, str]] | None = None,
    work_s: float = 0.0,
) -> Checkpoint | None:
    """Return the first candidate that is good for all ranks; those that are not are set aside.

    Args:
        storage: root of the run.
        candidates: names of committed checkpoints, in the order to try them.
        quarantined: names set aside by earlier starts, with reasons.
        quarantine: records a bad checkpoint.
        meeting: of the ranks.
        attempt: tries a candidate on this rank; returns the reason if it is bad, else None.
        what_else: the user may do if none is good, for the error.
        sides: as in `resume_run`.
        skipped: gets (name, reason) of those that were set aside now.
        work_s: how long ``attempt`` may take on some ranks while the others wait, beyond the bound of a wait.

    Raises:
        CorruptCheckpointError: there are checkpoints and none of them is good.
    """

    def copies() -> Iterator[tuple[str, tuple[int, Checkpoint]]]:
        """Yield every copy of every candidate: of a mirrored run one side may be damaged and the other good."""
        for name in candidates:
            if name not in quarantined:
                from holdfast.checkpoint.handle import Checkpoint  # not above: a fresh start needs none

                for number, side in enumerate([storage] if sides is None else sides(name), 1):
                    yield name, (number, Checkpoint.at(side, name))

    def check(copy: tuple[int, Checkpoint]) -> str | None:
        number, checkpoint = copy
        name = checkpoint.directory
        side = {} if sides is None else {"side": checkpoint.storage.uri}
        judge = partial(_judge, partial(quarantine, name, **side))
        # Not by its URI: the local side need not have the same path on all machines.
        reason: str | None = meeting.agree(
            f"load {name} ({number})", partial(attempt, checkpoint), judge, work_s=work_s
        )
        return reason

    answer = newest_good(copies(), check, bad=quarantined, where=storage.uri, advice=what_else)
    found, bad = answer
    if skipped is not None:
        skipped += bad
    return None if found is None else found[1]


def _try(home: Storage, state: Mapping[Any, Any], meeting: Meeting, outcome: ResumeResult, fit: Fit) -> str | None:
    """Load a candidate; give the reason if it is bad."""
    try:
        outcome.loaded = _load(home, state, meeting, fit)
    except (CorruptCheckpointError, IncompleteCheckpointError, CheckpointNotFoundError) as error:
        return str(error)
    except StorageError as error:
        if error.errno != errno.EIO or home.local_root is None:
            raise
        return f"{_UNREADABLE}: {error}"
    return None


def _judge(set_aside: Quarantine, reasons: list[str | None]) -> str | None:
    """Return the reason for all ranks, after setting a bad candidate aside. On rank 0: all ranks receive its errors.

    What a disk cannot read is not set aside for good: the bytes may be there when its cable is.
    """
    reason = first_bad(reasons)
    if reason is not None and any(other and not other.startswith(_UNREADABLE) for other in reasons):
        set_aside(reason=reason)
    return reason


def first_bad(reasons: list[str | None]) -> str | None:
    """Choose the reason that is given for all."""
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return reason if all(other == reason for other in reasons) else f"rank {rank}: {reason}"
    return None


def _load(home: Storage, state: Mapping[Any, Any], meeting: Meeting, fit: Fit, *, lacks: Sequence[str] = ()) -> Loaded:
    from holdfast.state.load.restore import load_state  # not above: a fresh start has nothing to load

    with load_bar(home, show=None if meeting.rank == 0 else False) as progress:
        return load_state(
            home, state, replace(fit, allow_missing=(*fit.allow_missing, *lacks), added=Progress.added_in),
            rank=meeting.rank, world_size=meeting.world_size, progress=progress,
            swap=meeting.swap if meeting.world_size > 1 else None,
        )  # fmt: skip


def _explicit(
    mode: str | os.PathLike[str] | Checkpoint, state: Mapping[Any, Any], meeting: Meeting, fit: Fit
) -> ResumeResult:
    from holdfast.checkpoint.handle import Checkpoint, newest_of_run  # not above: a fresh start needs none

    checkpoint = newest_of_run(mode if isinstance(mode, Checkpoint) else Checkpoint(mode))
    root = checkpoint.storage.local_root
    if root is not None and (root / checkpoint.directory).is_file():
        raise ConfigError(f"resume={checkpoint.uri!r} is a file; give the directory of a checkpoint")
    # A checkpoint of `holdfast.save` has none of the run's own entries: the run starts, and the block lists them.
    own = (RESERVED, f"{RESERVED}/*")
    home = checkpoint.storage.child(checkpoint.directory)
    outcome = ResumeResult(checkpoint, is_named=True)

    def load() -> None:
        outcome.loaded = _load(home, state, meeting, fit, lacks=own)

    meeting.agree(f"load {checkpoint.name}", load)
    assert outcome.loaded is not None
    outcome.lacks_progress = RESERVED in dict(outcome.loaded.not_restored)
    return outcome


def is_within(checkpoint: Checkpoint, storage: Storage) -> bool:
    """Tell whether a checkpoint lies directly under the root of a run, however its path was spelt."""
    root, home = storage.local_root, checkpoint.storage.local_root
    if root is not None and home is not None:
        return os.path.realpath(root) == os.path.realpath(home) and "/" not in checkpoint.directory
    return checkpoint.storage.uri == storage.uri and "/" not in checkpoint.directory


def made_with(state: Mapping[Any, Any]) -> _Made:
    """Return options that training itself leaves alone, by the path of their owner, and by name.

    A resume puts back the learning rate and the length of a schedule with all else. Whoever has changed them in the
    script has to hear that, for nothing fails. Of an optimizer it is a list, with an entry for each group: the learning
    rate before any scheduler moved it.
    """
    found: _Made = {}

    for path, value in leaves(state):
        if isinstance(value, torch.optim.Optimizer):
            found[path] = {name: [_of_group(group, name) for group in value.param_groups] for name in _OPTIONS}
        elif isinstance(value, LRScheduler):
            found[path] = _of_scheduler(value)
    return found


def not_as_made(made: _Made, loaded: _Made) -> list[str]:
    """Return a sentence for each option that a checkpoint has set to another value than the script had."""
    found = []
    for path, options in made.items():
        for name, own in options.items():
            saved: Any = loaded.get(path, {}).get(name, own)
            of_groups = isinstance(own, list)
            if repr(saved) == repr(own) or (of_groups and len(saved) != len(own)):
                continue
            part = f"{path}/param_groups" if of_groups else f"{path}/{name}"
            # A scheduler that another one holds is no part that can be named.
            advice = "" if " " in name else f", skip={part!r} takes the script's"
            now, script = _short(saved), _short(own)
            found.append(f"{path}: {name} is {now} as saved, {script} in the script: what was saved counts{advice}")
    return found


def _of_group(group: Mapping[str, Any], name: str) -> Any:
    if name == "lr":
        return _plain(group.get("initial_lr", group.get("lr")))
    is_moved = "base_momentum" in group or "max_momentum" in group  # by a scheduler, in each step
    return None if is_moved and name in ("momentum", "betas") else _plain(group.get(name))


def _of_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the arguments that it keeps under their names, and those of the schedulers that it holds."""
    held, found = vars(scheduler), {}
    names = inspect.signature(type(scheduler).__init__).parameters.keys() - {"optimizer", "schedulers", "last_epoch"}
    for name in sorted(names):
        kept = name if name in held else f"_{name}"
        if isinstance(value := held.get(kept), (bool, int, float, str, list, tuple, Counter)):
            found[kept] = _plain(value)
    for number, inner in enumerate(held.get("_schedulers") or ()):
        found.update((f"{name} of scheduler {number}", value) for name, value in _of_scheduler(inner).items())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, Counter)):
        return tuple(map(_plain, sorted(value.elements()) if isinstance(value, Counter) else value))
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    return repr(value)
