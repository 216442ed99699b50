"""Copy a whole run: its checkpoints newest first, then what else lies in it, the run index last.

Newest first, because a copy that ends early is then a run whose newest checkpoint is the true one: who resumes from it
loses nothing but older checkpoints. The index goes last, since it is rebuilt from the checkpoints where it is missing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    StorageNotFoundError,
)
from holdfast.format.commit import remove
from holdfast.run.catalog import Catalog
from holdfast.run.heartbeat import Heartbeat
from holdfast.run.index import CHANGES_FILE, RUN_FILE, RunIndex
from holdfast.run.lease import Lease, is_of_lease, make_owner
from holdfast.run.names import VERIFIED_FILE
from holdfast.run.reports import LOGS, REPORTS
from holdfast.storage.base import Storage

from .sending import Progress, Stop
from .transfer import Copied, copy_checkpoint

__all__ = ["CopyOutcome", "RunPlan", "check_apart", "copy_run", "plan_run"]

_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What there is to copy in a run.

    Attributes:
        names: checkpoints and foreign directories, in the order in which they are copied.
        total_bytes: of all of them.
        left_out: names that are not copied, and why.
        damaged: those of ``left_out`` that are no good any more.
        is_run: false if nothing in there is ours: then all of it is a single foreign directory, whatever it holds.
    """

    names: tuple[str, ...]
    total_bytes: int
    left_out: dict[str, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    is_run: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """How the copy of one checkpoint ended.

    Attributes:
        name: its directory.
        state: "ok", "foreign" (nothing to check it against), "gone" (deleted at the source meanwhile) or "failed".
        copied: which bytes went which way.
        problem: why it failed.
    """

    name: str
    state: str
    copied: Copied = field(default_factory=Copied)
    problem: str | None = None


def plan_run(source: Storage) -> RunPlan:
    """Find what there is to copy."""
    catalog = Catalog(source)
    sizes = {record.name: record.size for record in catalog.records()}
    sizes |= {name: manifest.total_bytes for name, manifest in catalog.others.items()}
    is_run = bool(sizes or catalog.incomplete or catalog.bad()) or catalog.index.damage != "missing"
    runs = []
    for name in catalog.foreign:
        inside = {info.path: info.size for info in source.list(name)}
        if f"{name}/{RUN_FILE}" in inside:
            runs.append(name)
        else:
            sizes[name] = sum(inside.values())
    left_out = dict.fromkeys(catalog.incomplete, "never committed: a save under way, or the remains of one")
    left_out |= dict.fromkeys(runs, "a run of its own: copy it by itself")
    for name, why in catalog.bad().items():
        left_out[name] = f"damaged: {why}" if name in catalog.corrupt else f"quarantined: {why}"
        sizes.pop(name, None)
    return RunPlan(
        names=tuple(sizes),
        total_bytes=sum(sizes.values()),
        left_out=left_out,
        damaged=tuple(sorted(catalog.corrupt)),
        is_run=is_run or bool(runs),
    )


def copy_run(
    source: Storage,
    plan: RunPlan,
    target: Storage,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Iterator[CopyOutcome]:
    """Copy a run into the root of ``target``; yields as each checkpoint is durable there.

    Holds the lease of the run at the target meanwhile. One checkpoint that cannot be copied does not keep the others.

    Raises:
        RunBusyError: somebody else writes to the run at the target.
        CheckpointExistsError: the target has another run, or went on with this one, and ``overwrite`` is false.
        StorageError: a storage failed; what is complete at the target stays.
        TransferStopped: ``stop()`` returned true.
    """
    check_apart(source, target)
    with contextlib.closing(Heartbeat(Lease.acquire(target, make_owner(os.urandom(8).hex())))) as heartbeat:

        def ended() -> bool:
            heartbeat.check()  # raises if another process took the run over meanwhile
            return stop is not None and stop()

        # The catalog knows which run lives in a directory even if its run.json is gone, or not yet there.
        there = Catalog(target)
        theirs = there.index
        _check_target(Catalog(source).index, theirs, target, overwrite=overwrite)
        there.admit(dict.fromkeys(plan.names, "*"), "".join(filter(str.isalnum, heartbeat.lease.owner["start_id"])))
        quarantined = dict(theirs.quarantined)
        previous: str | None = None
        for name in plan.names:
            if name in quarantined:
                if not overwrite:
                    problem = (
                        f"{target.uri}/{name} was quarantined there ({quarantined[name]}): files of the same name and "
                        "size would be taken for whole. Delete it there, or copy with --overwrite, which sends all of "
                        "it again"
                    )
                    yield CopyOutcome(name=name, state="failed", problem=problem)
                    continue
                remove(target, name)
                del quarantined[name]
            outcome = _copy_one(source, name, target, previous, overwrite=overwrite, progress=progress, stop=ended)
            previous = name if outcome.state == "ok" else previous
            yield outcome
        # With its row: a checkpoint without a row would be taken for new, and for sound as far as its manifest is.
        _copy_rest(source, target, {name: (why, theirs.rows.get(name)) for name, why in quarantined.items()})
        Catalog(target).point_latest()


def check_apart(source: Storage, target: Storage) -> None:
    """Refuse to copy something onto or into itself.

    Raises:
        ConfigError: saying so.
    """
    source_uri, target_uri = (f"{storage.uri.rstrip('/')}/" for storage in (source, target))
    if target_uri.startswith(source_uri) or source_uri.startswith(target_uri):
        raise ConfigError(f"cannot copy {source.uri} to {target.uri}: one of them lies in the other")


def _copy_one(
    source: Storage,
    name: str,
    target: Storage,
    previous: str | None,
    *,
    overwrite: bool,
    progress: Progress | None,
    stop: Stop,
) -> CopyOutcome:
    try:
        copied = copy_checkpoint(
            source, name, target, name, previous=previous, overwrite=overwrite, progress=progress, stop=stop
        )
    except CheckpointNotFoundError as error:
        return CopyOutcome(name=name, state="gone", problem=str(error))
    except CheckpointError as error:
        return CopyOutcome(name=name, state="failed", problem=str(error))
    return CopyOutcome(name=name, state="foreign" if copied.is_foreign else "ok", copied=copied)


def _check_target(ours: RunIndex, theirs: RunIndex, target: Storage, *, overwrite: bool) -> None:
    if not theirs.run_id:
        return
    if theirs.run_id != ours.run_id:
        raise CheckpointExistsError(
            f"{target.uri} is another run ({theirs.run_id}, not {ours.run_id or 'one with an index'}): two runs in one "
            "directory cannot be told apart; give another one"
        )
    known = {attempt.start_id for attempt in ours.attempts}
    own = [attempt for attempt in theirs.attempts if attempt.start_id not in known]
    if own and not overwrite:
        raise CheckpointExistsError(
            f"{target.uri} went on with this run by itself (attempt {own[-1].attempt}, {own[-1].started}): copying "
            "would forget that. Copy the other way, or to another directory; --overwrite does it all the same"
        )


def _copy_rest(source: Storage, target: Storage, quarantined: Mapping[str, tuple[str, list[Any] | None]]) -> None:
    """Copy reports, logs and loose files, all of them each time: they are small and may have grown.

    Args:
        source: the run.
        target: where it goes.
        quarantined: checkpoints at the target that are never to be picked there: why, and their rows in its index.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(StorageNotFoundError):  # segments are merged while a run goes on: look again
            paths = [info.path for tree in (REPORTS, LOGS) for info in source.list(tree)]
            paths += [info.path for info in source.list("", recursive=False) if not info.path.endswith("/")]
            for path in paths:
                if path not in (RUN_FILE, CHANGES_FILE, VERIFIED_FILE) and not is_of_lease(path):
                    target.put(path, source.read(path))
            break
    with contextlib.suppress(StorageNotFoundError):
        data = source.read(RUN_FILE)
        index = RunIndex.load(source)
        if quarantined or index.has_changes:
            index.quarantined = {**{name: why for name, (why, _) in quarantined.items()}, **index.quarantined}
            index.rows.update({name: row for name, (_, row) in quarantined.items() if row and name not in index.rows})
            data = index.to_bytes()
            if index.damage is not None:
                return  # that of the target stays: without it nobody would know what was set aside
        target.put(RUN_FILE, data)
