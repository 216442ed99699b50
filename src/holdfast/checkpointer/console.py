"""What a run prints on stderr: the block at its start, lines on its interval and its stop, the bar of a long load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast._outgoing import masked, on_one_line
from holdfast._units import listed
from holdfast.errors import CheckpointError, StorageError
from holdfast.storage.base import Storage

from .progress import RESERVED

if TYPE_CHECKING:
    from holdfast.writer.messages import RunOpened

_SHOWN = 8
_OWN = {f"{RESERVED}/progress": "step, epoch and data position", f"{RESERVED}/rng": "random generators"}
_AFTER_S = 2.0


@dataclass(slots=True)
class ResumeBlock:
    """Collects what happened at start and prints it once, on stderr.

    Attributes:
        headline: "resumed from ... at step ..." or "fresh start: ...".
        notes: one line each: fallbacks, leases waited for, numbers that changed.
        restored: paths that were restored.
        put_back: paths of plain values that are in ``ck.state`` again.
        not_restored: (path, why).
    """

    headline: str = ""
    notes: list[str] = field(default_factory=list)
    restored: Sequence[str] = ()
    put_back: Sequence[str] = ()
    not_restored: Sequence[tuple[str, str]] = ()

    def lines(self) -> list[str]:
        """Return the lines of the block."""
        lines = [f"holdfast: {self.headline}"]
        if self.restored:
            lines.append(f"  restored      {listed([_OWN.get(path, path) for path in self.restored])}")
        if self.put_back:
            lines.append(f"  restored into ck.state: {listed(self.put_back)}")
        shown = self.not_restored[:_SHOWN]
        lines.extend(f"  NOT restored  {_OWN.get(path, path)}: {why}" for path, why in shown)
        if len(shown) < len(self.not_restored):
            lines.append(f"  NOT restored  ... and {len(self.not_restored) - len(shown)} more")
        lines.extend(f"  {note}" for note in self.notes)
        return lines

    def show(self) -> None:
        """Print the block."""
        lines = (on_one_line(masked(line)) for line in self.lines())  # names in it come from files
        print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201 - the one thing a run prints


def found_notes(opened: RunOpened, set_aside: Mapping[str, str]) -> list[str]:
    """Return the notes on what a start has found in a run.

    Args:
        opened: the run.
        set_aside: checkpoints that are not taken, and why.
    """
    notes = [
        f"set aside {name}, its files are left alone: {reason.partition(chr(10))[0]}"
        for name, reason in set_aside.items()
    ]
    if opened.swept:
        gone = sorted({path.partition("/")[0] for path in opened.swept})
        notes.append(f"removed what unfinished saves left: {listed(gone)}")
    if opened.waited_s > 1:
        notes.append(f"waited {opened.waited_s:.1f} s for the writer of the life before to finish")
    return notes


def show_stop(why: str, step: int, storage: Storage, exit_code: int, *, left_by: str = "", anew: bool = False) -> None:
    """Print, on stderr, how a run ended that was asked to stop, and how to go on.

    Args:
        why: what asked it to: the name of a signal, "the deadline".
        step: newest step that is safe, -1 if there is none.
        storage: where the run is.
        exit_code: exit status of the process.
        left_by: what the body raised instead of stopping; the status is another one then.
        anew: the same command begins at step 0 again.
    """
    safe = f"step {step} is saved in {storage.uri}" if step >= 0 else f"there was nothing to save in {storage.uri}"
    headline = f"stopped by {why}: {safe}; the same command goes on from there (exit status {exit_code})"
    if anew:
        headline = (
            f"stopped by {why}: {safe}; with resume='never' the same command begins anew, without it it goes on from "
            f"there (exit status {exit_code})"
        )
    if left_by:
        headline = (
            f"to be stopped by {why}, but {left_by} left the body first: {safe}; the exit status is not {exit_code}"
        )
    ResumeBlock(headline=headline).show()


def show_rollback(step: int, found: str, storage: Storage, exit_code: int, *, anew: bool = False) -> None:
    """Print, on stderr, that the guard has ended this process, and how to go on.

    Args:
        step: the bad one.
        found: what was bad, and what follows.
        storage: where the run is.
        exit_code: exit status of the process.
        anew: the same command begins at step 0 again.
    """
    how, again = "", "; `holdfast run` starts it again"
    if anew:
        how, again = " without resume='never', with it it begins anew", ""
    ResumeBlock(
        headline=f"rolled back at step {step}: {found}. The same command goes on in {storage.uri} from before that "
        f"step{how} (exit status {exit_code}){again}"
    ).show()


def load_bar(storage: Storage, *, show: bool | None = None) -> AbstractContextManager[Callable[[int], None]]:
    """Give what `holdfast.state.load.restore.load_state` takes as ``progress``, in a ``with``.

    Args:
        storage: rooted at the checkpoint.
        show: True draws from the start, False never; None draws if the checkpoint is remote, stderr is a terminal and
            two seconds have passed.

    Example:
        >>> with load_bar(storage) as progress:                                         # doctest: +SKIP
        ...     load_state(storage, state, progress=progress)
    """
    from holdfast._progress import progress_bar  # not above: a fresh start loads nothing
    from holdfast.format.commit import read_manifest

    def total() -> int | None:
        try:
            return read_manifest(storage, "").total_bytes
        except (CheckpointError, StorageError):
            return None  # loading will raise the error

    name = storage.uri.rstrip("/").rpartition("/")[2]
    wanted = False if show is None and storage.local_root is not None else show
    return progress_bar(f"load {name}", total, show=wanted, after_s=_AFTER_S if show is None else 0.0)
