"""The start of a run: lease, resume, checks that saving can work, and the block that says what happened."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from holdfast._ranks import current_ranks
from holdfast._units import format_bytes, format_duration, listed
from holdfast.config import Keep, rules_of
from holdfast.errors import CheckpointError, StorageFullError
from holdfast.run.life import VARIABLE, kept_bytes
from holdfast.run.names import ROLLBACKS, WATCHED
from holdfast.run.process import memory_name
from holdfast.state.load.selection import Fit, Selection
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree.objects import leaves, plain_optimizer
from holdfast.storage.base import Storage
from holdfast.writer.messages import SPARE_BYTES, RunOpened

from .console import ResumeBlock, found_notes
from .first_step import first_step_checks, loaders_apart, outdated_dicts
from .meeting import Meeting, same_for_all
from .options import CheckpointerOptions
from .progress import RESERVED, Progress
from .resume import BEGAN, ResumeResult, beginning, is_within, made_with, not_as_made, resume_run, saved_since
from .run_session import RunSession

if TYPE_CHECKING:
    from holdfast.format.manifest import Manifest
    from holdfast.run.rollbacks import Rollback

_CALLS = 4  # of the writer, that rank 0 makes one after the other
_ALIKE = (  # the same on all ranks
    "intervals", "auto", "keep", "when_busy", "on_full", "timeout_s", "exit_code", "resume", "rescue", "guard",
)  # fmt: skip
# State tensors of parameter size that an optimizer creates with its first step, and the options of a parameter group
# that each add one. An optimizer of another kind counts as one tensor.
_SLOTS = {
    "ASGD": 1, "Adadelta": 2, "Adafactor": 1, "Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "LBFGS": 0, "Muon": 0,
    "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Rprop": 2, "SGD": 0, "SparseAdam": 2,
}  # fmt: skip
_MORE_SLOTS = ("amsgrad", "centered", "momentum")
_MANIFEST_BYTES = 1536
_INDEX_BYTES = 260  # of a small tensor in the index, in the header of its file and in the structure of the state


def start_run(
    session: RunSession,
    snapshotter: Snapshotter,
    state: Callable[[], Mapping[Any, Any]],
    progress: Progress,
    *,
    options: CheckpointerOptions,
    home: Mapping[str, Any],
) -> ResumeResult:
    """Take the lease, resume, check that a save can work, print the block; returns what the run begins with.

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
    # Far stores at once: to probe one takes as long as a load from there, so both run at the same time.
    stores = {storage for storage in (*session.sides, session.storage) if storage.traits.num_parallel > 1}
    probes = {storage: _probe(session, storage) for storage in stores if session.leads}
    names, unsound, rollbacks = _candidates(session, options)
    outcome = _resume(session, live, home, replace(options.fit, apart=apart), options, names, unsound)
    if rollbacks:
        from holdfast.run.rollbacks import left_out_by

        progress.left_out.spans.update(left_out_by(rollbacks, num_ranks=meeting.world_size))
    outcome.rollbacks, taken = rollbacks, outcome.checkpoint
    mine = outcome.is_own = taken is not None and any(is_within(taken, side) for side in session.sides)
    session.saves.parent = _take_progress(outcome, progress)
    if meeting.rank == 0:  # it alone says it
        looks = first_step_checks(home, *_saved(outcome))
        progress.checks = [*looks, outdated_dicts(home), loaders_apart(progress, home)]
    began = beginning(outcome, options.resume, session.opened, checkpoint_id=session.saves.parent)
    resumed = None
    if taken is not None:
        name = taken.name if mine else taken.uri
        resumed = {"name": name, "step": progress.step}
        if mine:  # its step is safe; saving it again would only make a copy
            session.resume_at(progress.step, name=name, checkpoint_id=session.saves.parent)
            outcome.before = _before(name, names, {**session.quarantined, **unsound}, session)
    short: list[str | None] = []

    def need() -> list[Any]:
        # Before any rank takes memory: each looks at what all of them share.
        freed = kept_bytes(session.root.uri) // current_ranks().local_world_size
        to_come = _future_optimizer_bytes(live, on="cpu") - freed
        short.append(snapshotter.look_at_memory(live, reserve=to_come))
        own, division = snapshotter.stored_bytes(live), snapshotter.division
        room = [memory_name(), own, session.storage.free_bytes()] if session.staged else ["", own, None]
        return [room, None if division is None else division.to_json()]

    def check(given: Sequence[list[Any]]) -> dict[str, Any]:
        needs = [row for row, _ in given]
        _check_divisions([division for _, division in given])
        if outcome.before is not None and _watched(options) is not None:
            # Before uploads of lives before, and what they push out, go on.
            session.ask("protect", names=[outcome.before[1]])
        if resumed is not None:
            session.ask("resumed", **resumed)
        if session.opened.notes.get(BEGAN, {}) != began:
            session.ask("note", key=BEGAN, value=began)
        if session.opened.notes.get(WATCHED) != (watched := _watched(options)):
            session.ask("note", key=WATCHED, value=watched)
        room = _check_storages(session, needs, live, options, probes)
        return {"room": room, "seed": progress.own_seed()}

    ready = meeting.agree("ready", need, check, work_s=_CALLS * options.timeout_s)
    if meeting.world_size > 1:
        progress.first_seed = ready["seed"]
    left_out = _agree_on_rescue(session, snapshotter, options)
    inexact = _fix_gradient_orders(live, meeting)
    finished = session.opened.finished
    if mine and finished and finished.get("step") == progress.step:
        outcome.finished_epochs = int(finished.get("epoch", 0))
    if session.leads:
        block = _start_block(session, outcome, progress, room=ready["room"], options=options)
        block.notes.extend([*inexact, *_without_model(home)])
        block.notes.extend(note for note in short if note is not None)
        if left_out:
            block.notes.append(f"rescue= is left out: {left_out}")
        if rollbacks or unsound:
            from holdfast.run.rollbacks import notes_of

            block.notes.extend(notes_of(rollbacks, unsound, step=progress.step, num_ranks=meeting.world_size))
        block.show()
    return outcome


def _check_divisions(given: Sequence[Any]) -> None:
    """Refuse ranks whose parts would make up no state, as the commit of a save does.

    What the first steps may still bring, tensors in plain containers and values, is left to the commit.
    """
    if len(given) == 1:
        return
    from holdfast.format.division import Division, disagreement  # not above: most runs have one rank

    if problem := disagreement({rank: Division.from_json(row) for rank, row in enumerate(given)}):
        raise CheckpointError(f"no save of these ranks could be committed: {problem}. Nothing was trained")


def _saved(outcome: ResumeResult) -> tuple[Storage | None, Manifest | None]:
    """Return the root and the manifest of the checkpoint of this run that was loaded, if there is one."""
    taken = outcome.checkpoint if outcome.is_own else None
    if taken is None or outcome.loaded is None:
        return None, None
    return taken.storage.child(taken.directory), outcome.loaded.manifest


def _before(resumed: str, names: Sequence[str], bad: Mapping[str, str], session: RunSession) -> tuple[int, str] | None:
    """Return step and name of the checkpoint that would have been resumed if ``resumed`` were not there."""
    later = names[names.index(resumed) + 1 :] if resumed in names else ()
    name = next((name for name in later if name not in bad), None)
    return next(((row[2], name) for row in session.opened.records if row[0] == name), None) if name else None


def _candidates(
    session: RunSession, options: CheckpointerOptions
) -> tuple[list[str], dict[str, str], Sequence[Rollback]]:
    """Return the checkpoints to try, in their order; why others are not sound; what is known of bad steps."""
    rows, metric = session.opened.records, _watched(options)
    notes = {} if options.resume == "never" else session.opened.notes
    if metric is None and ROLLBACKS not in notes:
        return [row[0] for row in rows], {}, ()
    from holdfast.run.record import unpack  # not above: of runs with a guard
    from holdfast.run.rollbacks import order_to_try, read_rollbacks

    rollbacks = read_rollbacks(notes)
    judged: list[Sequence[Any]] = [(*row[:3], {} if metric is None else unpack(row).metrics) for row in rows]
    names, unsound = order_to_try(judged, rollbacks, metric=metric, are_all_known=not session.opened.quarantined)
    return names, unsound, rollbacks


def _watched(options: CheckpointerOptions) -> str | None:
    """Return the metric that makes a checkpoint unfit to go on from where it is not finite."""
    guard = options.guard
    return None if guard is None or guard.action == "warn" else guard.metric


def _agree_on_rescue(session: RunSession, snapshotter: Snapshotter, options: CheckpointerOptions) -> str:
    """Let all ranks keep snapshots, or none; return why there are none, "" if there are, or nobody asked for them."""
    if not options.rescues:
        return ""
    why, meeting = "", session.meeting
    if session.staged:
        why = "the ranks share no disk"
    elif snapshotter.streams and options.max_staging_bytes is not None:
        why = "the state does not fit into max_staging_bytes"
    elif snapshotter.model_files is not None and meeting.world_size > 1:
        why = "with model_files the ranks put tensors together, which they do at saves alone"
    elif not snapshotter.rescues and meeting.world_size > 1:
        why = "memory is short on a rank"
    agreed: str = meeting.agree("rescue", lambda: why, lambda reasons: next(filter(None, reasons), ""))
    snapshotter.rescues = snapshotter.rescues and not agreed
    return agreed


def _fix_gradient_orders(live: Mapping[Any, Any], meeting: Meeting) -> list[str]:
    """Let DDP add gradients in one order from the first step on, see `fix_gradient_order`; return notes for the block.

    A module is left alone unless all ranks of its process group have it in their states: it would wait for the others.
    """
    if meeting.world_size < 3:
        return []
    from holdfast.state.gradient_order import INEXACT, fix_gradient_order, parallel_modules, replicated_modules
    from holdfast.state.tree.sharded import parallel_group

    found = {path: module for path, module in parallel_modules(live).items() if module.process_group.size() > 2}
    keys = {path: _key_of(path, parallel_group(module)) for path, module in found.items()}

    def decide(given: list[Any]) -> list[str]:
        counts = Counter(key for keys in given for key in keys)
        return [key for key, count in counts.items() if count == int(key.partition(" ")[0])]

    shared = set(meeting.agree("gradients", lambda: list(keys.values()), decide))
    fixed = {path: fix_gradient_order(found[path]) for path, key in keys.items() if key in shared}
    inexact = [path for path in found if not fixed.get(path, False)]
    return [f"{path}: {INEXACT}" for path in (*inexact, *replicated_modules(live))]


def _key_of(path: str, ranks: tuple[int, ...]) -> str:
    """Return a short name for a module and the ranks that have it, which begins with their number."""
    return f"{len(ranks)} {hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]} {path}"


def _open(session: RunSession, options: CheckpointerOptions) -> None:
    """Find out whether the ranks share a disk, and open the run at a storage that all of them reach."""
    mirror, remote, meeting = options.mirror, session.remote, session.meeting
    if meeting.world_size > 1 and remote is not None:
        from .remote import share_a_disk

        session.staged = not share_a_disk(session)
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
    from .remote import take_up

    take_up(session)


def _probe(session: RunSession, storage: Storage) -> Future[Any]:
    """Send a small checkpoint through the whole commit."""
    return session.client.probe(storage, directory=f".probe-{session.start_id}")


def _resume(
    session: RunSession, live: Mapping[Any, Any], home: Mapping[str, Any], fit: Fit, options: CheckpointerOptions,
    candidates: Sequence[str], unsound: Mapping[str, str],
) -> ResumeResult:  # fmt: skip
    """Load the checkpoint to go on from, and put plain values back into the mapping that the user gave."""
    bad, named = {**session.opened.quarantined, **unsound}, options.resume
    since: Sequence[str] = ()
    if not isinstance(named, str):
        usable = [name for name in candidates if name not in bad]
        since = saved_since(named, session.opened, usable, session.meeting)
    made = made_with(home)
    outcome = resume_run(
        session.root,
        live,
        named,
        candidates=candidates,
        quarantined=bad,
        quarantine=session.quarantine,
        meeting=session.meeting,
        sides=lambda name: _sides(name, session),
        fit=fit,
        since=since,
    )
    if outcome.loaded is not None:
        own = {key: value for key, value in outcome.loaded.state.items() if key != RESERVED}
        from holdfast.state.load.restore import put_back  # not above: a fresh start has nothing to put back

        outcome.put_back = put_back(home, own, takes=Selection(None, fit.skip).takes)
        outcome.loaded.notes.extend(not_as_made(made, made_with(home)))
    return outcome


def _take_progress(outcome: ResumeResult, progress: Progress) -> str | None:
    """Return the id of the resumed checkpoint; without a run's own entries the step comes from its manifest."""
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
    """Check that every storage takes a small save; return a line about room on the local disk."""
    near = session.storage
    found = session.answer(probes.get(near) or _probe(session, near), near)
    num_there = 0 if session.staged else len(session.opened.records)
    keep, waiting = options.keep, 0
    if options.mirror is not None:
        keep, waiting = options.mirror.keep, options.mirror.max_behind
    room = check_room(near, found["free_bytes"], needs, live, keep=keep, num_there=num_there, waiting=waiting)
    for far in {side for side in session.sides if side is not near}:
        session.answer(probes.get(far) or _probe(session, far), far)
    return room


def _agree_on_options(
    options: CheckpointerOptions, home: Mapping[str, Any], meeting: Meeting
) -> tuple[int, ...] | None:
    """Check that all ranks have the same arguments; return the ranks alike to this one, None if all ranks are alike."""
    if meeting.world_size == 1:
        return None
    from holdfast.state.tree.sharded import group_of, ranks_alike  # not above: a process alone needs neither

    rank, world_size = meeting.rank, meeting.world_size
    given = {name: _spelled(getattr(options, name)) for name in _ALIKE}
    given["local_dir"] = "given" if options.mirror is not None else "None"
    given["alike"] = "given" if options.alike is not None else "None"
    groups: list[tuple[int, ...] | None] = []

    def give() -> list[Any]:
        found = ranks_alike(options.alike, rank=rank, world_size=world_size)
        groups.append(found or group_of(home, rank=rank, world_size=world_size))
        return [given, groups[0] is not None]

    def decide(all_given: list[Any]) -> bool:
        same_for_all([arguments for arguments, _ in all_given], "the arguments of Checkpointer")
        return any(is_apart for _, is_apart in all_given)

    is_apart = meeting.agree("options", give, decide)
    return (groups[0] or tuple(range(world_size))) if is_apart else None


def _spelled(option: Any) -> str:
    """Spell an argument out, alike on machines that have mounted the same storage at different places."""
    from holdfast.checkpoint.handle import Checkpoint  # not above: most runs have one rank

    return f"Checkpoint {option.name}" if isinstance(option, Checkpoint) else repr(option)


def _sides(name: str, session: RunSession) -> list[Storage]:
    """Return where a checkpoint is complete; the local disk first, which is faster."""
    mirrored = session.opened.remote
    if mirrored is None or len(session.sides) == 1:
        return session.sides
    near, far = session.sides
    return {"local": [near], "remote": [far]}.get(mirrored["places"][name], [near, far])


def check_room(
    storage: Storage,
    free_bytes: int | None,
    needs: Sequence[list[Any]],
    state: Mapping[Any, Any],
    *,
    keep: Keep | None = None,
    num_there: int = 0,
    waiting: int = 0,
) -> str:
    """Compare free space with the size of a checkpoint.

    Args:
        storage: where saves go, of rank 0.
        free_bytes: what a probe (`WriterClient.probe`) has found free there, in bytes; None if unknown.
        needs: for each rank the machine, the bytes of its part, and the free bytes there. Where all ranks save to the
            same place, machine and free bytes are left out; else each machine has to hold the parts of its own ranks.
        state: of rank 0.
        keep: rules of retention.
        num_there: checkpoints that the run has already.
        waiting: how many more may be there until they are uploaded.

    Returns:
        A line about size and space, or two.
    """
    future = _future_optimizer_bytes(state)
    least = free_bytes
    for machine in dict.fromkeys(name for name, _, _ in needs):
        first, parts = [row[0] for row in needs].index(machine), [row[1:] for row in needs if row[0] == machine]
        expected = sum(own for own, _ in parts) + future * len(parts) // len(needs)
        frees = [its for _, its in parts if its is not None]
        free = min(frees, default=free_bytes if first == 0 else None)
        if free is not None and free < expected + SPARE_BYTES:
            whose = f" on the machine of rank {first}" if machine else ""
            what = f"the parts of {len(parts)} of {len(needs)} ranks take" if whose else "one checkpoint takes"
            from holdfast.run.trash import Trash  # not above: of this error only

            trash = Trash(storage).in_words()
            prune = f" (`holdfast prune {storage.uri} --keep last=1 --yes --now` leaves the newest one)"
            raise StorageFullError(
                f"{storage.uri}{whose} has {format_bytes(free)} free and {what} about {format_bytes(expected)} (and "
                f"{format_bytes(SPARE_BYTES)} to spare): free some space{prune * (num_there > 1)} or choose another "
                f"place; nothing was trained{trash and f'; {trash}'}"
            )
        least = free if least is None or free is None else min(least, free)
    size = sum(own for _, own, _ in needs) + future + _MANIFEST_BYTES
    line = f"one checkpoint takes about {format_bytes(size)}"
    if least is None:
        return line
    line += f"; {format_bytes(least)} are free"
    at_most = _most_kept(keep)
    # A new checkpoint is whole before an old one is deleted: for a moment there is one more than retention keeps.
    missing = 0 if at_most is None else max(0, at_most + waiting + 1 - num_there) * size - least
    if missing > 0:
        also = f", {waiting} more may wait for their upload" if waiting else ""
        line += (
            f"\nNOT enough for keep={keep!r}: {at_most} are kept{also} and one more is written before the oldest goes, "
            f"which takes {format_bytes(missing)} more; a save that finds no space is lost, older ones are safe"
        )
    return line


def _most_kept(keep: Keep | None) -> int | None:
    """Return how many checkpoints retention keeps at most; None without a bound."""
    bounds = [rule.most for rule in rules_of(keep)]
    return None if not bounds or None in bounds else sum(filter(None, bounds))


def _without_model(state: Mapping[Any, Any]) -> list[str]:
    """Say which optimizers train parameters that nothing in the state holds: a resume would not bring those back."""
    held: set[int] = set()
    optimizers: dict[str, torch.optim.Optimizer] = {}

    for path, value in leaves(state, tensors=True):
        if isinstance(value, torch.optim.Optimizer):
            optimizers[path] = value
        elif isinstance(value, torch.Tensor):
            held.add(id(value))
        elif isinstance(value, torch.nn.Module) or hasattr(value, "state_dict"):  # an object with a model of its own
            own = [value] if isinstance(value, torch.nn.Module) else [*getattr(value, "__dict__", {}).values()]
            held.update(
                id(param) for model in own if isinstance(model, torch.nn.Module) for param in model.parameters()
            )
    said = []
    for path, optimizer in optimizers.items():
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if plain_optimizer(optimizer) is not None and params and not any(id(param) in held for param in params):
            said.append(
                f"the optimizer state[{path!r}] trains {len(params)} parameters of no model in the state: they are NOT "
                "saved and a resume does not bring them back; put their model into the state, as in {'model': model}"
            )
    return said


def _future_optimizer_bytes(state: Any, *, on: str | None = None) -> int:
    """Estimate the optimizer state that does not exist before the first step; that ``on`` one kind of device only."""
    optimizers = (value for _, value in leaves(state) if isinstance(value, torch.optim.Optimizer))
    return sum(_future_bytes_of(optimizer, on=on) for optimizer in optimizers)


def _future_bytes_of(optimizer: torch.optim.Optimizer, *, on: str | None) -> int:
    kind = next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in _SLOTS), None)
    total = 0
    for group in optimizer.param_groups:
        trained = [param for param in group["params"] if param.requires_grad and on in (None, param.device.type)]
        if kind == "LBFGS":  # of all parameters together, and more with each step up to the length of its history
            full = (2 * group["history_size"] + 2) * sum(param.nbytes for param in trained)
            total += max(0, full - _tensor_bytes([*optimizer.state.values()]))
            continue
        slots = 1 if kind is None else _SLOTS[kind] + sum(bool(group.get(option)) for option in _MORE_SLOTS)
        for param in trained:
            if param in optimizer.state:
                continue
            if kind == "Adafactor" and param.dim() > 1:  # a row and a column instead of a matrix
                total += param.nbytes // param.shape[-1] + param.nbytes // param.shape[-2] if param.numel() else 0
            else:
                total += slots * param.nbytes
            total += _INDEX_BYTES * slots
    return total


def _tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in mappings and lists."""
    return sum(value.nbytes for _, value in leaves(state, tensors=True) if isinstance(value, torch.Tensor))


def _start_block(
    session: RunSession,
    outcome: ResumeResult,
    progress: Progress,
    *,
    room: str,
    options: CheckpointerOptions,
) -> ResumeBlock:
    """Say what a start found and did."""
    storage, opened, finished = session.root, session.opened, outcome.finished_epochs
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
        block.not_restored = [*outcome.loaded.not_restored]
        manifest = outcome.loaded.manifest
        if outcome.is_named:
            is_ours = manifest is not None and manifest.run_id == opened.run_id
            order = (manifest.attempt, manifest.step or 0) if manifest is not None and is_ours else (-1, -1)
            newer = [row for row in opened.records if (row[1], row[2]) > order and row[0] not in session.quarantined]
            if newer:
                notes.append(
                    f"resume= names where to begin: {len(newer)} checkpoint(s) of this run are not used, and "
                    "resume='auto' goes on from them"
                )
                notes.extend(_not_used(opened, options))
        elif not isinstance(options.resume, str):
            notes.append(
                f"resume={options.resume.uri!r} is not used again: this run began there and has got further by itself. "
                "To begin there once more, use another directory"
            )
        if outcome.put_back is not None:
            block.put_back = outcome.put_back.restored
            block.not_restored += outcome.put_back.lost
        notes.extend((*outcome.loaded.notes, *progress.notes()))
        if manifest is not None and (why := manifest.extra.get("rescued")):
            notes.append(f"its writer has rescued it: {why}")
        if progress.batch:
            notes.append(
                f"epoch {progress.epoch} goes on with batch {progress.batch}: ck.batch and ck.enumerate(loader) count "
                "from there, enumerate(), islice() and own counters count from 0"
            )
    notes += found_notes(opened, {} if outcome.is_named else {**opened.quarantined, **dict(outcome.skipped)})
    if opened.copies:
        notes.append(f"left alone, as copied or renamed: {opened.copies}; resume=PATH goes on from one")
    if finished is not None:
        done = f"{f'{finished} epochs, ' if finished else ''}step {progress.step}"
        notes.append(
            f"this run had finished ({done}), at the end of epoch {finished}, which was left by `break`: ck.epochs() "
            "enters it again without batches, and what the body does behind them comes once more, unless it asks at "
            "its head whether to stop"
            if finished == progress.epoch and progress.is_at_end_of_epoch
            else f"this run had finished ({done}): nothing to do unless more is asked for"
        )
    if threading.current_thread() is not threading.main_thread():
        notes.append("not in the main thread: signals are left alone, only deadline= and ck.save() save early")
    if remote is not None and opened.remote is not None:
        waiting = opened.remote["waiting"]
        behind = f"; still to be uploaded: {listed(waiting)}" if waiting else ""
        notes.append(f"saves go to {storage.uri} first and are uploaded to {remote.uri}{behind}")
    if session.staged:
        notes.append(
            f"the ranks do not share {session.storage.uri}: each stages its part of a save there, on its own machine, "
            f"and brings it to {storage.uri}"
        )
    if options.resume == "never" and VARIABLE in os.environ:
        notes.append(
            "`holdfast run` starts this command again when it dies; with resume='never' each life begins at step 0: "
            "leave it out, so that a life goes on from what the one before has saved"
        )
    notes.extend(room.splitlines())
    if options.auto:
        from .auto_interval import FIRST_S  # not above: of every="auto" only

        notes.append(
            f"every='auto': the first save comes after {format_duration(FIRST_S)} at most, unless the run knows what "
            "saves cost"
        )
    return block


def _fresh(storage: Storage, opened: RunOpened, notes: list[str], options: CheckpointerOptions) -> str:
    if opened.records:
        notes.extend(_not_used(opened, options))
        if options.resume != "never":
            return f"fresh start: all {len(opened.records)} checkpoint(s) under {storage.uri} may hold a bad step"
        return f"fresh start (resume='never'): {len(opened.records)} checkpoint(s) under {storage.uri} are not used"
    # Whoever expected a resume has to see why there is none.
    if opened.incomplete:
        notes.append(f"never committed, so not usable: {listed(opened.incomplete)}")
    if opened.strangers:
        notes.append(f"not of this run, so not picked (name one with resume=): {listed(opened.strangers)}")
    return f"fresh start: no checkpoint under {storage.uri}"


def _not_used(opened: RunOpened, options: CheckpointerOptions) -> list[str]:
    """Say what becomes of the checkpoints of a run that a start does not go on from."""
    found = [f"the newest one not used is {opened.records[0][0]}"]
    if rules_of(options.keep):
        found.append(
            "they count as older ones of this run: keep= REMOVES them as new ones are saved. "
            "Pin them, or use another directory, to keep them"
        )
    return found
