"""The block printed when a run starts: what was resumed, what was restored, and what was not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.run.catalog import Catalog
from holdfast.storage.base import Storage
from holdfast.writer.messages import RunOpened

from .options import RESERVED, CheckpointerOptions
from .progress import Progress
from .resume import ResumeResult
from .run_session import RunSession

__all__ = ["ResumeBlock", "show_stop", "start_block"]

_SHOWN = 8
_OWN = {f"{RESERVED}/progress": "step, epoch and data position", f"{RESERVED}/rng": "random generators"}


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
            lines.append(f"  restored      {_listed([_OWN.get(path, path) for path in self.restored])}")
        if self.put_back:
            lines.append(f"  restored into ck.state: {_listed(self.put_back)}")
        shown = self.not_restored[:_SHOWN]
        lines.extend(f"  NOT restored  {_OWN.get(path, path)}: {why}" for path, why in shown)
        if len(shown) < len(self.not_restored):
            lines.append(f"  NOT restored  ... and {len(self.not_restored) - len(shown)} more")
        lines.extend(f"  {note}" for note in self.notes)
        return lines

    def show(self) -> None:
        """Print the block."""
        print("\n".join(self.lines()), file=sys.stderr, flush=True)  # noqa: T201 - the one thing a run prints


def show_stop(signal: str | None, step: int, storage: Storage, exit_code: int) -> None:
    """Print, on stderr, how a run ended that was asked to stop, and how to go on.

    Args:
        signal: name of the signal; None for the deadline.
        step: newest step that is safe, -1 if there is none.
        storage: where the run is.
        exit_code: exit status of the process.
    """
    safe = f"step {step} is saved in {storage.uri}" if step >= 0 else f"there was nothing to save in {storage.uri}"
    ResumeBlock(
        headline=f"stopped by {signal or 'the deadline'}: {safe}; the same command goes on from there "
        f"(exit status {exit_code})"
    ).show()


def start_block(
    session: RunSession,
    outcome: ResumeResult,
    progress: Progress,
    *,
    finished: int | None,
    room: str,
    options: CheckpointerOptions,
) -> ResumeBlock:
    """Say what a start found and did."""
    storage, opened = session.root, session.opened
    remote = None if session.staged else session.remote
    block = ResumeBlock()
    notes = block.notes
    if outcome.checkpoint is None:
        block.headline = _fresh(storage, opened, notes, options)
        if remote is not None:
            block.headline += f" and {remote.uri}"
    else:
        assert outcome.loaded is not None
        block.headline = (
            f"resumed from {outcome.checkpoint.uri} at step {progress.step}, epoch {progress.epoch} "
            f"(attempt {opened.attempt})"
        )
        block.restored = outcome.loaded.restored
        block.put_back = outcome.put_back.restored
        block.not_restored = [*outcome.loaded.not_restored, *outcome.put_back.lost]
        notes.extend((*outcome.loaded.notes, *progress.notes()))
        if progress.batch:
            notes.append(
                f"epoch {progress.epoch} goes on with batch {progress.batch}: ck.batch and ck.enumerate(loader) count "
                "from there, enumerate() counts from 0"
            )
    skipped = {**opened.quarantined, **dict(outcome.skipped)} if isinstance(options.resume, str) else {}
    for name, reason in skipped.items():
        notes.append(f"set aside {name}, its files are left alone: {reason.splitlines()[0]}")
    if opened.swept:
        gone = sorted({path.split("/")[0] for path in opened.swept})
        notes.append(f"removed what unfinished saves left: {_listed(gone)}")
    if opened.waited_s > 1:
        notes.append(f"waited {opened.waited_s:.1f} s for the writer of the life before to finish")
    if finished is not None:
        notes.append(
            f"this run had finished ({f'{finished} epochs, ' if finished else ''}step {progress.step}): nothing to do "
            "unless more is asked for"
        )
    if threading.current_thread() is not threading.main_thread():
        notes.append("not in the main thread: signals are left alone, only deadline= and ck.save() save early")
    if remote is not None and opened.remote is not None:
        waiting = opened.remote["waiting"]
        told = f"; still to be uploaded: {_listed(waiting)}" if waiting else ""
        notes.append(f"saves go to {storage.uri} first and are uploaded to {remote.uri}{told}")
    if session.staged:
        notes.append(
            f"the ranks do not share {session.storage.uri}: each stages its part of a save there, on its own machine, "
            f"and brings it to {storage.uri}"
        )
    notes.append(room)
    return block


def _fresh(storage: Storage, opened: RunOpened, notes: list[str], options: CheckpointerOptions) -> str:
    if opened.records:
        notes.append(f"the newest one not used is {opened.records[0][0]}")
        keep = options.keep
        if keep is not None and (keep.last, keep.best, keep.every) != (None, None, None):
            notes.append(
                "they count as older ones of this run: keep= REMOVES them as new ones are saved. "
                "Pin them, or use another directory, to keep them"
            )
        return f"fresh start (resume='never'): {len(opened.records)} checkpoint(s) under {storage.uri} are not used"
    # Whoever expected a resume has to see why there is none.
    found = Catalog(storage)
    if found.incomplete:
        notes.append(f"never committed, so not usable: {_listed(found.incomplete)}")
    if found.others:
        notes.append(f"not of this run, so not picked (name one with resume=): {_listed(found.others)}")
    return f"fresh start: no checkpoint under {storage.uri}"


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f", ... and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more
