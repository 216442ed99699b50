"""The start of a run: lease, resume, preflight, and the block that says what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast._units import format_bytes
from holdfast.checkpoint.handle import Checkpoint
from holdfast.config import Keep
from holdfast.errors import ConfigError, StorageFullError
from holdfast.state.load.put_back import put_back
from holdfast.state.load.selection import Selection
from holdfast.state.load.shared_read_buffer import node_name
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree.groups import group_of, ranks_alike
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import RunOpened
from holdfast.writer.ranks.saves import rank_list

from .block import start_block
from .node_local import share_a_disk, take_up
from .options import RESERVED, CheckpointerOptions
from .progress import Progress
from .rendezvous import Alone, Meeting, same_for_all
from .resume import is_within, resume_run
from .waiting import answer

__all__ = ["StartedRun", "answer", "open_together", "start_run"]

_LEASE_S = 60.0
_CALLS = 3  # of the writer, that rank 0 makes one after the other
_MARGIN = 16 << 20
_VISIBLE_S = 5.0
_ALIKE = ("intervals", "keep", "when_busy", "on_full", "timeout_s", "exit_code", "resume")  # the same on all ranks
# State tensors of parameter size that an optimizer will create with its first step; others are taken for one.
_SLOTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SparseAdam": 2, "Adadelta": 2, "SGD": 1}


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
    timeout_s = options.timeout_s
    meeting = meeting or Alone()
    leads = meeting.rank == 0
    local, root = storage, storage
    apart = _agree_on_options(options, home, meeting)
    spread = meeting.world_size > 1 and remote is not None and not share_a_disk(meeting, local, start_id)
    if spread and remote is not None and options.mirror is not None:
        # The run is at the remote then, and the disks are where saves wait for it.
        root, remote = remote, None
        opened = _open(root, client, options, start_id, None, meeting)
        mirror = options.mirror
        meeting.agree(
            "stage", lambda: answer(client.stage(local, root, mirror, start_id=start_id), local, timeout_s),
            work_s=timeout_s,
        )  # fmt: skip
        opened = take_up(meeting, client, local, root, opened, start_id=start_id, timeout_s=timeout_s)
    else:
        opened = _open(root, client, options, start_id, remote, meeting)
    live = state()
    # A probe of a store takes as long as a load from there, so the two go on side by side.
    stores = {one for one in (root, remote, local) if leads and one is not None and one.num_parallel > 1}
    probes = {one: client.probe(one, directory=f".probe-{start_id}") for one in stores}
    committed = [row[0] for row in opened.records]
    outcome = resume_run(
        root,
        live,
        options.resume,
        candidates=committed,
        quarantined=opened.quarantined,
        quarantine=lambda name, reason, **more: answer(
            client.run_op("quarantine", name=name, reason=reason, **more), root, timeout_s
        ),
        meeting=meeting,
        sides=lambda name: _sides(name, opened, root, remote),
        fit=replace(options.fit, apart=apart),
    )
    if outcome.loaded is not None:
        own = {key: value for key, value in outcome.loaded.state.items() if key != RESERVED}
        outcome.put_back = put_back(home, own, takes=Selection(None, options.fit.skip).takes)
    parent, mine = None, False
    resumed: dict[str, Any] | None = None
    if outcome.checkpoint is not None:
        manifest = outcome.checkpoint.manifest if outcome.loaded is None else outcome.loaded.manifest
        parent = manifest.checkpoint_id if manifest is not None else None
        if progress.step == 0 and manifest is not None and manifest.step is not None and outcome.lacks_progress:
            progress.step = manifest.step
        mine = any(is_within(outcome.checkpoint, side) for side in (root, remote) if side is not None)
        name = outcome.checkpoint.name if mine else outcome.checkpoint.uri
        resumed = {"name": name, "step": progress.step}

    def need() -> list[Any]:
        own = snapshotter.plan(live).tensor_bytes
        return [node_name(), own, local.free_bytes()] if spread else ["", own, None]

    def check(needs: Sequence[list[Any]]) -> dict[str, Any]:
        if resumed is not None:
            answer(client.run_op("resumed", **resumed), root, timeout_s)
        kept = 0 if spread else len(committed)
        room = _check_room(
            local, client, needs, live, start_id, timeout_s, keep=options.keep, num_there=kept, probe=probes.get(local)
        )
        for far in {one for one in (root, remote) if one is not None and one is not local}:
            answer(probes.get(far) or client.probe(far, directory=f".probe-{start_id}"), far, timeout_s)
        return {"room": room, "taken": sorted(_taken(root, committed, opened)), "seed": progress.own_seed()}

    ready = meeting.agree("ready", need, check, work_s=_CALLS * timeout_s)
    if meeting.world_size > 1:
        progress.first_seed = ready["seed"]
    finished = None
    if mine and opened.finished and opened.finished.get("step") == progress.step:
        finished = int(opened.finished.get("epoch", 0))
    if leads:
        start_block(
            root, opened, outcome, progress, finished=finished, room=ready["room"], options=options, remote=remote,
            staged=local if spread else None,
        ).show()  # fmt: skip
    return StartedRun(
        opened, outcome.checkpoint, mine, parent, set(ready["taken"]), finished, spread,
        has_generators=outcome.loaded is not None and f"{RESERVED}/rng" in outcome.loaded.restored,
    )  # fmt: skip


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


def _open(
    storage: Storage,
    client: WriterClient,
    options: CheckpointerOptions,
    start_id: str,
    remote: Storage | None,
    meeting: Meeting,
) -> RunOpened:
    """Open the run on rank 0, and see that all ranks have it before their eyes."""
    keep, timeout_s = options.keep, options.timeout_s
    lease_s = min(_LEASE_S, timeout_s)

    def open_run() -> RunOpened:
        opened: RunOpened = answer(
            client.open_run(
                storage, owner={"start_id": start_id}, keep=None if keep is None else keep.to_json(), wait_s=lease_s,
                mirror=options.mirror, remote=remote,
            ),
            remote or storage, lease_s + timeout_s,
        )  # fmt: skip
        return opened

    return open_together(meeting, storage, start_id, open_run, work_s=lease_s + timeout_s)


def open_together(
    meeting: Meeting, storage: Storage, start_id: str, open_run: Callable[[], RunOpened], *, work_s: float
) -> RunOpened:
    """Open a run on rank 0, and see that all ranks have its storage before their eyes.

    Args:
        meeting: of the ranks.
        storage: root of the run.
        start_id: of this start; part of the name of the file that rank 0 shows the others.
        open_run: opens it; called on rank 0 alone.
        work_s: how long that may take.

    Raises:
        ConfigError: naming the ranks that see another storage.
    """
    mark = f".probe-{start_id}/ranks"

    def open_here() -> dict[str, Any] | None:
        if meeting.rank > 0:
            return None
        opened = open_run()
        if meeting.world_size > 1:
            storage.put(mark, b"all ranks see this file")
        return opened.to_json()

    opened = RunOpened.from_json(meeting.agree("open", open_here, work_s=work_s))
    if meeting.world_size > 1:
        meeting.agree("place", lambda: _sees(storage, mark), lambda seen: _check_shared(seen, storage, mark))
    return opened


def _told(option: Any) -> str:
    """Spell an argument out, alike on machines that have mounted the same storage at different places."""
    return f"Checkpoint {option.name}" if isinstance(option, Checkpoint) else repr(option)


def _sees(storage: Storage, mark: str) -> bool:
    """Look for a file that rank 0 has made; a network file system may show it a little later."""
    until = time.monotonic() + _VISIBLE_S
    while not storage.exists(mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _check_shared(seen: Sequence[bool], storage: Storage, mark: str) -> None:
    storage.delete(mark)
    storage.tidy(mark.partition("/")[0])
    blind = [rank for rank, one in enumerate(seen) if not one]
    if blind:
        raise ConfigError(
            f"{rank_list(blind)} cannot see what rank 0 writes to {storage.uri}: all ranks save parts of the same "
            "checkpoints, so the run needs a place that all machines share: a network file system, or remote storage "
            "such as s3://bucket/run"
        )


def _taken(storage: Storage, committed: Sequence[str], opened: RunOpened) -> set[str]:
    """Return the names a save must not use: of checkpoints, good or bad, and of anything else that lies there."""
    there: set[str] = set()
    if storage.local_root is not None:  # of others the writer has told all that it found
        there = {info.path.rstrip("/") for info in storage.list("", recursive=False)}
    return {*committed, *opened.quarantined, *opened.taken, *there}


def _sides(name: str, opened: RunOpened, storage: Storage, remote: Storage | None) -> list[Storage]:
    """Return where a checkpoint is complete; the local disk first, which is faster."""
    if remote is None or opened.remote is None:
        return [storage]
    return {"local": [storage], "remote": [remote]}.get(opened.remote["places"][name], [storage, remote])


def _check_room(
    storage: Storage,
    client: WriterClient,
    needs: Sequence[list[Any]],
    state: Mapping[Any, Any],
    start_id: str,
    timeout_s: float,
    *,
    keep: Keep | None = None,
    num_there: int = 0,
    probe: Future[Any] | None = None,
) -> str:
    """Send a small probe through the whole commit, compare free space with the size of a checkpoint.

    Args:
        storage: where saves go, of rank 0.
        client: rank 0's writer.
        needs: of each rank the machine, the bytes of its part, and what is free there. Where all ranks save to one
            place, machine and free space are not named; else each machine has to hold the parts of its own ranks.
        state: of rank 0.
        start_id: of this life.
        timeout_s: bound of the probe.
        keep: rules of retention.
        num_there: checkpoints that the run has already.
        probe: one that is under way.

    Returns:
        A line about size and space.
    """
    found = answer(probe or client.probe(storage, directory=f".probe-{start_id}"), storage, timeout_s)
    future = _future_optimizer_bytes(state.values())
    least = found["free_bytes"]
    for machine in dict.fromkeys(name for name, _, _ in needs):
        first, parts = [one[0] for one in needs].index(machine), [one[1:] for one in needs if one[0] == machine]
        expected = sum(own for own, _ in parts) + future * len(parts) // len(needs)
        frees = [its for _, its in parts if its is not None]
        free = min(frees, default=found["free_bytes"] if first == 0 else None)
        if free is not None and free < expected + _MARGIN:
            whose = f" on the machine of rank {first}" if machine else ""
            what = f"the parts of {len(parts)} of {len(needs)} ranks take" if whose else "one checkpoint takes"
            raise StorageFullError(
                f"{storage.uri}{whose} has {format_bytes(free)} free and {what} about {format_bytes(expected)} (and "
                f"{format_bytes(_MARGIN)} to spare): free some space or choose another place; nothing was trained"
            )
        least = free if least is None or free is None else min(least, free)
    size = sum(own for _, own, _ in needs) + future
    line = f"one checkpoint takes about {format_bytes(size)}"
    if least is None:
        return line
    line += f"; {format_bytes(least)} are free"
    at_most = _most_kept(keep)
    # A new checkpoint is whole before an old one goes: there is one more than retention keeps, for a moment.
    missing = 0 if at_most is None else max(0, at_most + 1 - num_there) * size - least
    if missing > 0:
        line += (
            f"\n  NOT enough for keep={keep!r}: {at_most} are kept and one more is written before the oldest goes, "
            f"which takes {format_bytes(missing)} more; a save that finds no space is lost, older ones are safe"
        )
    return line


def _most_kept(keep: Keep | None) -> int | None:
    """Return how many checkpoints retention keeps at most; None without a bound."""
    if keep is None or keep.every is not None or (keep.last is None and keep.best is None):
        return None
    return (keep.last or 0) + (keep.best or 0)


def _future_optimizer_bytes(values: Any) -> int:
    """Estimate the optimizer state that does not exist before the first step."""
    total = 0
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            slots = _SLOTS.get(type(value).__name__, 1)
            if type(value).__name__ == "SGD" and not any(group.get("momentum") for group in value.param_groups):
                slots = 0
            total += slots * sum(
                param.numel() * param.element_size()
                for group in value.param_groups
                for param in group["params"]
                if param.requires_grad and param not in value.state
            )
        elif isinstance(value, Mapping):
            total += _future_optimizer_bytes(value.values())
        elif isinstance(value, (list, tuple)):
            total += _future_optimizer_bytes(value)
    return total
