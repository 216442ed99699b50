"""The arguments of a `Checkpointer`, checked before anything happens."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from holdfast._meant import closest
from holdfast._ranks import current_ranks, job_end
from holdfast._units import Interval, IntervalLike, parse_bytes, parse_intervals
from holdfast.config import Guard, Keep, Mirror, check_silence, check_timeout, is_int
from holdfast.errors import ConfigError
from holdfast.run.life import VARIABLE
from holdfast.state.load.selection import Fit, Selection, covers, patterns_of
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage

from .meeting import SILENCE_S
from .progress import RESERVED
from .save_policy import Deadline, Schedule

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.model_files import ModelFiles
    from holdfast.state.tree.sharded import Alike

    from .announce import Listener

_WORDS = ("auto", "must", "never")
_MEANT: dict[object, str] = {
    None: "never", False: "never", True: "auto", "latest": "auto", "last": "auto", "newest": "auto", "always": "auto",
    "required": "must", "none": "never", "no": "never", "false": "never", "yes": "auto", "true": "auto",
}  # fmt: skip
_CHOICES = {
    "when_busy": ("wait", "skip"),
    "on_full": ("skip", "wait", "raise"),
    "unsupported": ("raise", "drop"),
    "on_data_mismatch": ("raise", "warn", "ignore"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointerOptions:
    """Arguments of a `Checkpointer` in the form it uses them; see there.

    Attributes:
        intervals: the parsed ``every``.
        auto: whether it has an interval that the run finds itself, see `holdfast.checkpointer.auto_interval`.
        keep: rules of retention.
        resume: "auto", "must", "never" or the checkpoint.
        when_busy: "wait" or "skip".
        on_full: "skip", "wait" or "raise".
        max_staging_bytes: bound of the memory a save may use.
        deadline: counted from the construction, not from entering.
        exit_code: exit status after a signal or the deadline.
        timeout_s: bound of every wait.
        silence_s: silence of a rank after which it is given up.
        seed_samples: whether ``__getitem__`` gets seeds.
        mirror: the local side of a mirrored run.
        on_commit: called with each committed checkpoint.
        fit: how a checkpoint has to fit the state.
        unsupported: what becomes of values that cannot be saved: "raise" or "drop".
        alike: the ranks that hold the same as this one, as the user named them.
        model_files: what is committed beside the tensors.
        on_data_mismatch: what becomes of a loader that gives other batches than the ledger says.
        rescue: when a snapshot is kept in memory.
        auto_rescue: whether the run finds that interval itself, too.
        guard: what is watched, and what follows.
    """

    intervals: tuple[Interval, ...]
    keep: Keep | None
    resume: str | Checkpoint
    when_busy: str
    on_full: str
    max_staging_bytes: int | None
    deadline: Deadline
    exit_code: int
    timeout_s: float
    silence_s: float
    seed_samples: bool
    mirror: Mirror | None
    on_commit: tuple[Listener, ...]
    fit: Fit
    unsupported: str
    alike: Alike
    auto: bool
    model_files: ModelFiles | None
    on_data_mismatch: str
    rescue: tuple[Interval, ...]
    auto_rescue: bool
    guard: Guard | None

    @property
    def rescues(self) -> bool:
        """Whether snapshots are kept at all."""
        return bool(self.rescue) or self.auto_rescue

    @classmethod
    def check(
        cls,
        *,
        every: IntervalLike | Sequence[IntervalLike] | None,
        keep: Keep | None,
        resume: str | os.PathLike[str] | Checkpoint,
        local_dir: str | os.PathLike[str] | Mirror | None,
        max_staging_bytes: int | str | None,
        deadline: float | IntervalLike | datetime | None,
        exit_code_for_requeue: int,
        timeout_s: float,
        silence_s: float,
        on_commit: Listener | str | Sequence[Listener | str] | None,
        strict: bool,
        allow_missing: str | Sequence[str] | None,
        skip: str | Sequence[str] | None,
        rename: Mapping[str, str] | None,
        rescue: IntervalLike | Sequence[IntervalLike] | None,
        guard: Guard | None,
        **as_given: Any,
    ) -> CheckpointerOptions:
        """Check every argument; those of ``as_given`` are used in the form in which they were given.

        Raises:
            ConfigError: an argument is wrong.
        """
        for name, choices in _CHOICES.items():
            if as_given[name] not in choices:
                raise ConfigError(f"{name}={as_given[name]!r}: use one of {', '.join(map(repr, choices))}")
        if keep is not None and not isinstance(keep, Keep):
            raise ConfigError(f"keep={keep!r}: give a holdfast.Keep, as in Keep(last=3), or None to keep everything")
        if guard is not None and not isinstance(guard, Guard):
            raise ConfigError(f"guard={guard!r}: give a holdfast.Guard, as in Guard(metric='loss'), or None")
        if guard is not None and guard.action == "rollback" and resume == "never" and VARIABLE in os.environ:
            raise ConfigError(
                "guard= with resume='never' under `holdfast run`: each life would begin anew, meet the bad step again "
                "and be rolled back, for ever. Leave resume= out, or give Guard(..., action='stop')"
            )
        check_timeout(timeout_s)
        check_silence(silence_s)
        if silence_s > max(SILENCE_S, timeout_s):
            raise ConfigError(
                f"silence_s={silence_s!r} is longer than timeout_s={timeout_s!r}, after which a save fails: "
                "raise timeout_s too"
            )
        if not isinstance(as_given["seed_samples"], bool):
            raise ConfigError(f"seed_samples={as_given['seed_samples']!r}: use True or False")
        if not is_int(exit_code_for_requeue) or not 0 <= exit_code_for_requeue <= 255:
            raise ConfigError(f"exit_code_for_requeue={exit_code_for_requeue!r}: an exit status is 0 to 255")
        auto, given = _divide(every)
        intervals = _intervals("every", given)
        auto_rescue, given = _divide(rescue)
        snapshots = _intervals("rescue", given)
        if any(interval.unit == "ep" for interval in snapshots):
            raise ConfigError(f"rescue={rescue!r}: give steps, samples or a time (rescue=50); every='1ep' saves epochs")
        now = time.monotonic()
        Schedule(intervals, now=now)
        Schedule(snapshots, now=now)
        staging = parse_bytes(max_staging_bytes) if isinstance(max_staging_bytes, str) else max_staging_bytes
        if staging is not None and (isinstance(staging, bool) or not isinstance(staging, int)):
            staging = None
        if staging is None and max_staging_bytes is not None:
            raise ConfigError(
                f"max_staging_bytes={max_staging_bytes!r}: give a whole number of bytes, a text such as '512MiB', or "
                "None for one copy of the state"
            )
        Snapshotter(max_staging_bytes=staging).close()
        if isinstance(resume, bool) or resume is None or (isinstance(resume, str) and (_meant(resume))):
            meant = _MEANT[resume] if resume is None or isinstance(resume, bool) else _meant(str(resume))
            raise ConfigError(
                f"resume={resume!r}: did you mean {meant!r}? Use resume='auto' (the newest good checkpoint, else a "
                "fresh start; the default), 'must' (no checkpoint is an error), 'never' (a fresh start), or the path "
                "of a checkpoint"
            )
        if not (isinstance(resume, str) and resume in _WORDS):
            from holdfast.checkpoint.handle import Checkpoint  # not above: most runs name none

            # Made absolute now, so that a later chdir does not move it.
            resume = resume if isinstance(resume, Checkpoint) else Checkpoint(resume)
        return cls(
            intervals=intervals,
            keep=keep,
            resume=resume,
            max_staging_bytes=staging,
            deadline=Deadline(_end_of_job() if deadline == "slurm" else deadline, now=now),
            exit_code=exit_code_for_requeue,
            timeout_s=timeout_s,
            silence_s=float(silence_s),
            mirror=local_dir if local_dir is None or isinstance(local_dir, Mirror) else Mirror(local_dir),
            on_commit=_listeners(on_commit),
            fit=_fit(strict, allow_missing, skip, rename),
            auto=auto,
            rescue=snapshots,
            auto_rescue=auto_rescue,
            guard=guard,
            **as_given,
        )


def _meant(resume: str) -> str | None:
    """Return the word that was probably meant by one that is neither a known word nor the path of anything."""
    if resume in _WORDS or not resume.isalpha() or os.path.exists(resume):
        return None
    return _MEANT.get(resume.lower()) or closest(resume.lower(), _WORDS)


def _divide(
    every: IntervalLike | Sequence[IntervalLike] | None,
) -> tuple[bool, IntervalLike | Sequence[IntervalLike] | None]:
    """Take "auto" out of what ``every`` names."""
    if isinstance(every, (list, tuple)):
        rest = [interval for interval in every if interval != "auto"]
        return len(rest) < len(every), rest
    return (True, None) if every == "auto" else (False, every)


def _intervals(name: str, given: IntervalLike | Sequence[IntervalLike] | None) -> tuple[Interval, ...]:
    try:
        return parse_intervals(given)
    except ConfigError as error:
        raise ConfigError(f"{name}={given!r}: {error}") from None


def _fit(
    strict: bool,
    allow_missing: str | Sequence[str] | None,
    skip: str | Sequence[str] | None,
    rename: Mapping[str, str] | None,
) -> Fit:
    if not isinstance(strict, bool):
        raise ConfigError(f"strict={strict!r}: use True or False")
    missing, left_out = patterns_of(allow_missing, "allow_missing"), patterns_of(skip, "skip")
    Selection(rename=rename)  # refuses what is no name
    if left_out:
        own = [pattern for pattern in left_out if covers((pattern,), f"{RESERVED}/progress")]
        if own:
            raise ConfigError(f"skip={own[0]!r} covers the run's own step and data position: name entries of the state")
    return Fit(strict=strict, allow_missing=missing, skip=left_out or None, rename=rename, idle_names=True)


def check_state(state: Any) -> Mapping[str, Any]:
    """Refuse what cannot be a state; None is an empty state.

    Raises:
        ConfigError: it is no mapping, or uses the run's own key.
    """
    if state is None:
        return {}
    if not isinstance(state, Mapping):
        raise ConfigError(f"state is a mapping such as {{'model': model}}, not {type(state).__name__}")
    if RESERVED in state:
        raise ConfigError(f"state[{RESERVED!r}] is reserved for the run's own entries: use another key")
    return state


def sides(root: Storage, mirror: Mirror | None) -> tuple[Storage, Storage | None]:
    """Return where saves go first, and the remote of a mirrored run.

    Raises:
        ConfigError: the two sides are the same directory, or one lies inside the other.
    """
    if mirror is None:
        return root, None
    local = LocalStorage(mirror.path)
    if root.local_root is not None:
        inner, other = os.path.realpath(mirror.path), os.path.realpath(root.local_root)
        if os.path.commonpath([inner, other]) in (inner, other):
            raise ConfigError(f"local_dir={inner!r} and the run's {other!r} lie in each other: give another local_dir")
    return local, root


def _end_of_job() -> datetime | None:
    """Return when SLURM ends our job; only rank 0 asks, because only its deadline counts."""
    end = job_end() if current_ranks().rank == 0 else None
    return None if end is None else datetime.fromtimestamp(end, timezone.utc)


def check_root(storage: Storage) -> None:
    """Refuse what cannot be the directory of a run.

    Raises:
        ConfigError: there is a file, or a link that leads nowhere, or the name is too long.
    """
    root = storage.local_root
    if root is None:
        return
    try:
        is_file = root.is_file()
    except OSError as error:
        raise ConfigError(f"{root}: {error.strerror}: give another path") from error
    if is_file:
        raise ConfigError(f"{root} is a file; a run needs a directory: give another path")
    if root.is_symlink() and not root.exists():
        raise ConfigError(
            f"{root} is a link to {os.readlink(root)}, which is not there (a disk that is not mounted?): make that "
            "directory, or give another path"
        )


def _listeners(given: Listener | str | Sequence[Listener | str] | None) -> tuple[Listener, ...]:
    if given is None:
        return ()
    from .announce import listeners  # not above: most runs have none

    return listeners(given)
