"""The start of a run: lease, resume, preflight, and the block that says what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.run.process import memory_name
from holdfast.state.load.put_back import put_back
from holdfast.state.load.selection import Selection
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree.groups import group_of, ranks_alike
from holdfast.storage.base import Storage

from .block import start_block
from .node_local import share_a_disk, take_up
from .options import RESERVED, CheckpointerOptions
from .progress import Progress
from .rendezvous import Meeting, same_for_all
from .resume import Fit, ResumeResult, is_within, resume_run
from .room import check_room
from .run_session import RunSession

__all__ = ["StartedRun", "start_run"]

_CALLS = 3  # of the writer, that rank 0 makes one after the other
_ALIKE = ("intervals", "keep", "when_busy", "on_full", "timeout_s", "exit_code", "resume")  # the same on all ranks


@dataclass(slots=True)
class StartedRun:
    """What a run that may train now has begun with.

    Attributes:
        checkpoint: what was resumed, None for a fresh start.
        has_generators: the random generators were restored.
        finished_epochs: epochs an earlier, finished life did in all; None if none finished at this step.
    """

    checkpoint: Checkpoint | None
    has_generators: bool
    finished_epochs: int | None


def start_run(
    session: RunSession,
    snapshotter: Snapshotter,
    state: Callable[[], Mapping[Any, Any]],
    progress: Progress,
    *,
    options: CheckpointerOptions,
    home: Mapping[str, Any],
) -> StartedRun:
    """Take the lease, resume, check that a save can work, print the block.

    With several ranks, rank 0 alone talks to the run; what it finds, and whether each rank could follow, is agreed in
    the meeting of the session. ``home`` is the mapping that the user gave: plain values are put back there.

    Raises:
        RunBusyError: another live process holds the run.
        StorageError, UnsupportedStateError, StateMismatchError, CheckpointError: saving or resuming cannot work; the
            error comes before the first step.
    """
    meeting = session.meeting
    apart = _agree_on_options(options, home, meeting)
    _open(session, options)
    live = state()
    probes = _begin_probes(session) if session.leads else {}
    outcome = _resume(session, live, home, replace(options.fit, apart=apart), options)
    mine = outcome.checkpoint is not None and any(is_within(outcome.checkpoint, side) for side in session.sides)
    session.parent = _take_progress(outcome, progress)
    resumed = None
    if outcome.checkpoint is not None:
        name = outcome.checkpoint.name if mine else outcome.checkpoint.uri
        resumed = {"name": name, "step": progress.step}
        if mine:  # its step is safe; saving it again would only make a copy
            session.resume_at(progress.step, name=name, checkpoint_id=session.parent)

    def need() -> list[Any]:
        own = snapshotter.plan(live).tensor_bytes
        return [memory_name(), own, session.storage.free_bytes()] if session.staged else ["", own, None]

    def check(needs: Sequence[list[Any]]) -> dict[str, Any]:
        if resumed is not None:
            session.ask("resumed", **resumed)
        room = _check_storages(session, needs, live, options, probes)
        return {"room": room, "seed": progress.own_seed()}

    ready = meeting.agree("ready", need, check, work_s=_CALLS * options.timeout_s)
    if meeting.world_size > 1:
        progress.first_seed = ready["seed"]
    finished, before = None, session.opened.finished
    if mine and before and before.get("step") == progress.step:
        finished = int(before.get("epoch", 0))
    if session.leads:
        start_block(session, outcome, progress, finished=finished, room=ready["room"], options=options).show()
    has_generators = outcome.loaded is not None and f"{RESERVED}/rng" in outcome.loaded.restored
    return StartedRun(outcome.checkpoint, has_generators, finished)


def _open(session: RunSession, options: CheckpointerOptions) -> None:
    """Find out whether the ranks share a disk, and open the run where all of them reach it."""
    mirror, remote, meeting = options.mirror, session.remote, session.meeting
    session.staged = meeting.world_size > 1 and remote is not None and not share_a_disk(session)
    if not session.staged or remote is None or mirror is None:
        session.open(keep=options.keep, mirror=mirror)
        return
    # The run is at the remote then, and the disks are where saves wait for it.
    session.open(keep=options.keep, root=remote)
    local, start_id = session.storage, session.start_id
    meeting.agree(
        "stage", lambda: session.answer(session.client.stage(local, remote, mirror, start_id=start_id), local),
        work_s=options.timeout_s,
    )  # fmt: skip
    take_up(session)


def _begin_probes(session: RunSession) -> dict[Storage, Future[Any]]:
    """Begin to probe far stores: that takes as long as a load from there, so the two go on side by side."""
    stores = {one for one in (*session.sides, session.storage) if one.num_parallel > 1}
    return {one: _probe(session, one) for one in stores}


def _probe(session: RunSession, storage: Storage) -> Future[Any]:
    """Send a small checkpoint through the whole commit."""
    return session.client.probe(storage, directory=f".probe-{session.start_id}")


def _resume(
    session: RunSession, live: Mapping[Any, Any], home: Mapping[str, Any], fit: Fit, options: CheckpointerOptions
) -> ResumeResult:
    """Load the checkpoint to go on from, and put plain values back into the mapping that the user gave."""
    outcome = resume_run(
        session.root,
        live,
        options.resume,
        candidates=[row[0] for row in session.opened.records],
        quarantined=session.opened.quarantined,
        quarantine=session.quarantine,
        meeting=session.meeting,
        sides=lambda name: _sides(name, session),
        fit=fit,
    )
    if outcome.loaded is not None:
        own = {key: value for key, value in outcome.loaded.state.items() if key != RESERVED}
        outcome.put_back = put_back(home, own, takes=Selection(None, fit.skip).takes)
    return outcome


def _take_progress(outcome: ResumeResult, progress: Progress) -> str | None:
    """Return the id of the resumed checkpoint; one without a run's own entries tells its step in the manifest."""
    if outcome.checkpoint is None:
        return None
    manifest = outcome.checkpoint.manifest if outcome.loaded is None else outcome.loaded.manifest
    if manifest is None:
        return None
    if progress.step == 0 and manifest.step is not None and outcome.lacks_progress:
        progress.step = manifest.step
    return manifest.checkpoint_id


def _check_storages(
    session: RunSession,
    needs: Sequence[list[Any]],
    live: Mapping[Any, Any],
    options: CheckpointerOptions,
    probes: Mapping[Storage, Future[Any]],
) -> str:
    """See that every storage takes a small save; return a line about room on the local disk."""
    near = session.storage
    found = session.answer(probes.get(near) or _probe(session, near), near)
    num_there = 0 if session.staged else len(session.opened.records)
    room = check_room(near, found["free_bytes"], needs, live, keep=options.keep, num_there=num_there)
    for far in {one for one in session.sides if one is not near}:
        session.answer(probes.get(far) or _probe(session, far), far)
    return room


def _agree_on_options(
    options: CheckpointerOptions, home: Mapping[str, Any], meeting: Meeting
) -> tuple[int, ...] | None:
    """See that all ranks were told the same; return who holds the same as this one if some hold something else."""
    if meeting.world_size == 1:
        return None
    rank, world_size = meeting.rank, meeting.world_size
    told = {name: _told(getattr(options, name)) for name in _ALIKE}
    told["local_dir"] = "given" if options.mirror is not None else "None"
    told["alike"] = "given" if options.alike is not None else "None"
    groups: list[tuple[int, ...] | None] = []

    def give() -> list[Any]:
        found = ranks_alike(options.alike, rank=rank, world_size=world_size)
        groups.append(found or group_of(home, rank=rank, world_size=world_size))
        return [told, groups[0] is not None]

    def decide(given: list[Any]) -> bool:
        same_for_all([one for one, _ in given], "the arguments of Checkpointer")
        return any(is_apart for _, is_apart in given)

    is_apart = meeting.agree("options", give, decide)
    return (groups[0] or tuple(range(world_size))) if is_apart else None


def _told(option: Any) -> str:
    """Spell an argument out, alike on machines that have mounted the same storage at different places."""
    return f"Checkpoint {option.name}" if isinstance(option, Checkpoint) else repr(option)


def _sides(name: str, session: RunSession) -> list[Storage]:
    """Return where a checkpoint is complete; the local disk first, which is faster."""
    mirrored = session.opened.remote
    if mirrored is None or len(session.sides) == 1:
        return session.sides
    near, far = session.sides
    return {"local": [near], "remote": [far]}.get(mirrored["places"][name], [near, far])
