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
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import RunOpened

from .block import start_block
from .node_local import share_a_disk, take_up
from .opening import open_run
from .options import RESERVED, CheckpointerOptions
from .progress import Progress
from .rendezvous import Alone, Meeting, same_for_all
from .resume import Fit, ResumeResult, is_within, resume_run
from .room import check_room
from .waiting import answer

__all__ = ["StartedRun", "start_run"]

_CALLS = 3  # of the writer, that rank 0 makes one after the other
_ALIKE = ("intervals", "keep", "when_busy", "on_full", "timeout_s", "exit_code", "resume")  # the same on all ranks


@dataclass(slots=True)
class StartedRun:
    """A run that may train now.

    Attributes:
        opened: what the writer found.
        checkpoint: what was resumed, None for a fresh start.
        in_this_run: whether that checkpoint belongs to this run.
        parent: id of that checkpoint.
        names: directory names that are taken.
        staged: the ranks share no disk, and each stages its parts on its own.
        has_generators: the random generators were restored.
        finished_epochs: epochs an earlier, finished life did in all; None if none finished at this step.
    """

    opened: RunOpened
    checkpoint: Checkpoint | None
    in_this_run: bool
    parent: str | None
    names: set[str]
    finished_epochs: int | None
    staged: bool = False
    has_generators: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where a run is, and where this rank brings its saves.

    Attributes:
        root: root of the run.
        local: this rank's disk, or ``root`` itself.
        remote: the other side of a mirrored run.
        staged: the ranks share no disk: the run is at the remote, and each rank stages its parts in ``local``.
    """

    root: Storage
    local: Storage
    remote: Storage | None
    staged: bool

    @property
    def sides(self) -> list[Storage]:
        """The storages in which checkpoints of this run lie."""
        return [side for side in (self.root, self.remote) if side is not None]


def start_run(
    storage: Storage,
    client: WriterClient,
    snapshotter: Snapshotter,
    state: Callable[[], Mapping[Any, Any]],
    progress: Progress,
    *,
    options: CheckpointerOptions,
    start_id: str,
    home: Mapping[str, Any],
    remote: Storage | None = None,
    meeting: Meeting | None = None,
) -> StartedRun:
    """Take the lease, resume, check that a save can work, print the block.

    With ``remote`` the run is mirrored, and ``storage`` is its local side; if the ranks have none in common, the run is
    at the remote, and each rank stages its part of a save in ``storage``, on its own machine. With several ranks,
    rank 0 alone talks to the run; what it finds, and whether each rank could follow, is agreed in ``meeting``.
    ``home`` is the mapping that the user gave: plain values are put back there.

    Raises:
        RunBusyError: another live process holds the run.
        StorageError, UnsupportedStateError, StateMismatchError, CheckpointError: saving or resuming cannot work; the
            error comes before the first step.
    """
    meeting = meeting or Alone()
    apart = _agree_on_options(options, home, meeting)
    places, opened = _open(storage, remote, client, options, start_id, meeting)
    live = state()
    probes = _begin_probes(places, client, start_id) if meeting.rank == 0 else {}
    outcome = _resume(places, opened, client, live, home, replace(options.fit, apart=apart), options, meeting)
    mine = outcome.checkpoint is not None and any(is_within(outcome.checkpoint, side) for side in places.sides)
    parent = _take_progress(outcome, progress)
    resumed = None
    if outcome.checkpoint is not None:
        name = outcome.checkpoint.name if mine else outcome.checkpoint.uri
        resumed = {"name": name, "step": progress.step}

    def need() -> list[Any]:
        own = snapshotter.plan(live).tensor_bytes
        return [memory_name(), own, places.local.free_bytes()] if places.staged else ["", own, None]

    def check(needs: Sequence[list[Any]]) -> dict[str, Any]:
        if resumed is not None:
            answer(client.run_op("resumed", **resumed), places.root, options.timeout_s)
        room = _check_storages(places, opened, client, needs, live, start_id, options, probes)
        return {"room": room, "taken": sorted(_taken(places.root, opened)), "seed": progress.own_seed()}

    ready = meeting.agree("ready", need, check, work_s=_CALLS * options.timeout_s)
    if meeting.world_size > 1:
        progress.first_seed = ready["seed"]
    finished = None
    if mine and opened.finished and opened.finished.get("step") == progress.step:
        finished = int(opened.finished.get("epoch", 0))
    if meeting.rank == 0:
        start_block(
            places.root, opened, outcome, progress, finished=finished, room=ready["room"], options=options,
            remote=places.remote, staged=places.local if places.staged else None,
        ).show()  # fmt: skip
    return StartedRun(
        opened, outcome.checkpoint, mine, parent, set(ready["taken"]), finished, places.staged,
        has_generators=outcome.loaded is not None and f"{RESERVED}/rng" in outcome.loaded.restored,
    )  # fmt: skip


def _open(
    storage: Storage,
    remote: Storage | None,
    client: WriterClient,
    options: CheckpointerOptions,
    start_id: str,
    meeting: Meeting,
) -> tuple[_Places, RunOpened]:
    """Find out whether the ranks share a disk, and open the run where all of them reach it."""
    mirror = options.mirror
    staged = meeting.world_size > 1 and remote is not None and not share_a_disk(meeting, storage, start_id)
    if not staged or remote is None or mirror is None:
        opened = open_run(storage, client, options, start_id, remote, meeting)
        return _Places(root=storage, local=storage, remote=remote, staged=staged), opened
    # The run is at the remote then, and the disks are where saves wait for it.
    opened = open_run(remote, client, options, start_id, None, meeting)
    meeting.agree(
        "stage", lambda: answer(client.stage(storage, remote, mirror, start_id=start_id), storage, options.timeout_s),
        work_s=options.timeout_s,
    )  # fmt: skip
    opened = take_up(meeting, client, storage, remote, opened, start_id=start_id, timeout_s=options.timeout_s)
    return _Places(root=remote, local=storage, remote=None, staged=True), opened


def _begin_probes(places: _Places, client: WriterClient, start_id: str) -> dict[Storage, Future[Any]]:
    """Begin to probe far stores: that takes as long as a load from there, so the two go on side by side."""
    stores = {one for one in (*places.sides, places.local) if one.num_parallel > 1}
    return {one: client.probe(one, directory=f".probe-{start_id}") for one in stores}


def _resume(
    places: _Places,
    opened: RunOpened,
    client: WriterClient,
    live: Mapping[Any, Any],
    home: Mapping[str, Any],
    fit: Fit,
    options: CheckpointerOptions,
    meeting: Meeting,
) -> ResumeResult:
    """Load the checkpoint to go on from, and put plain values back into the mapping that the user gave."""
    outcome = resume_run(
        places.root,
        live,
        options.resume,
        candidates=[row[0] for row in opened.records],
        quarantined=opened.quarantined,
        quarantine=lambda name, reason, **more: answer(
            client.run_op("quarantine", name=name, reason=reason, **more), places.root, options.timeout_s
        ),
        meeting=meeting,
        sides=lambda name: _sides(name, opened, places.root, places.remote),
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
    places: _Places,
    opened: RunOpened,
    client: WriterClient,
    needs: Sequence[list[Any]],
    live: Mapping[Any, Any],
    start_id: str,
    options: CheckpointerOptions,
    probes: Mapping[Storage, Future[Any]],
) -> str:
    """See that every storage takes a save; return a line about room on the local disk."""
    room = check_room(
        places.local,
        client,
        needs,
        live,
        start_id,
        options.timeout_s,
        keep=options.keep,
        num_there=0 if places.staged else len(opened.records),
        probe=probes.get(places.local),
    )
    for far in {one for one in places.sides if one is not places.local}:
        answer(probes.get(far) or client.probe(far, directory=f".probe-{start_id}"), far, options.timeout_s)
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


def _taken(storage: Storage, opened: RunOpened) -> set[str]:
    """Return the names a save must not use: of checkpoints, good or bad, and of anything else that lies there."""
    there: set[str] = set()
    if storage.local_root is not None:  # of others the writer has told all that it found
        there = {info.path.rstrip("/") for info in storage.list("", recursive=False)}
    return {*(row[0] for row in opened.records), *opened.quarantined, *opened.taken, *there}


def _sides(name: str, opened: RunOpened, storage: Storage, remote: Storage | None) -> list[Storage]:
    """Return where a checkpoint is complete; the local disk first, which is faster."""
    if remote is None or opened.remote is None:
        return [storage]
    return {"local": [storage], "remote": [remote]}.get(opened.remote["places"][name], [storage, remote])
