"""Snapshots: take a state apart, copy it into memory that the writer shares, and submit the save.

`Snapshotter` owns the arena and the layout of the last structure. `submit` takes the state apart, plans if its
structure is new, and copies it; with `max_staging_bytes` the state streams through a small arena in windows instead.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from holdfast._log import get_logger
from holdfast._paused_gc import paused_gc
from holdfast._units import format_bytes
from holdfast.errors import ConfigError, HoldfastError
from holdfast.format.codec import dumps
from holdfast.format.digest import CHUNK, DIGEST_BYTES, num_chunks
from holdfast.storage.base import Storage
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.conversation import PendingCall
from holdfast.writer.messages import BlobPlan, SaveJob

from ..accelerator import any_on_device
from ..tree.flatten import Flat, flatten
from ..tree.objects import has_objects
from .arenas import SMALL_COPY, Arenas
from .plan import MIN_WINDOW, Layout, fits, plan, signature
from .staging import StateCopy, sampled, stage

if TYPE_CHECKING:
    from holdfast.format.division import Division
    from holdfast.model_files import ModelFiles

    from .device_copies import DeviceCopies

__all__ = ["Snapshotter"]

_LOG = get_logger("state")
_FOLLOW = 128 << 20  # bytes of a state from which on the writer starts before the copying has ended
_FOLLOW_FROM = 0.6  # share of the copying that is done when the writer starts
_RELEASE_S = 0.2  # that a snapshot waits for its arena
_ASIDE = 64 << 20  # from this size on a first save is copied aside; it then streams through windows of this size


class Snapshotter:
    """Copies states into one reused arena. Not thread-safe: one owner, one save at a time.

    Args:
        rank: the writing rank, part of the file names.
        world_size: how many ranks save together: each writes its share of the replicated tensors, rank 0 the rest.
        max_file_bytes: larger files are split.
        max_staging_bytes: bound of the arena; a state that does not fit streams through it and the caller is held
            until the last window has been taken. None: a copy of the state, or windows where memory is short.
        timeout_s: bound of the wait for one window; None waits as long as it takes.
        rescues: two arenas take turns, for `keep`, unless memory is short.
        unsupported: what happens to values that cannot be saved, unless a call says otherwise: "raise" or "drop".
        alike: the ranks that hold the same as this rank, where others hold other tensors; None: the state says which.

    Attributes:
        dropped: paths that the last save left out (``unsupported="drop"``); they are logged when they change.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        max_file_bytes: int = 4 << 30,
        max_staging_bytes: int | None = None,
        timeout_s: float | None = None,
        unsupported: str = "raise",
        rescues: bool = False,
        alike: tuple[int, ...] | None = None,
        model_files: ModelFiles | None = None,
    ) -> None:
        if max_staging_bytes is not None and max_staging_bytes < 2 * MIN_WINDOW:
            raise ConfigError(f"max_staging_bytes={max_staging_bytes}: give at least {2 * MIN_WINDOW} bytes")
        if not 0 <= rank < world_size and world_size > 1:
            raise ConfigError(f"rank {rank} is outside of a world of {world_size}")
        self.rank, self.world_size = rank, world_size
        self.max_file_bytes, self.max_staging_bytes = max_file_bytes, max_staging_bytes
        self.timeout_s, self.unsupported, self.alike = timeout_s, unsupported, alike
        self.model_files = model_files
        self.layout: Layout | None = None
        self.stable: frozenset[str] = frozenset()
        self.copies: DeviceCopies | None = None
        self._planned_for: tuple[tuple[int, ...] | None, ModelFiles | None] = (alike, None)
        self._observed = self._has_said_whole = False
        self.dropped: tuple[str, ...] = ()
        self.rescues = rescues
        self._arenas = Arenas(has_peers=world_size > 1)
        self._has_missed = False  # a snapshot, and said so
        self.shortage: str | None = None  # why saves go through windows although nobody asked for it
        self._bound: float = max_staging_bytes or math.inf  # of the arena; less where a copy does not fit into memory
        self._looked = False  # at memory, for the present layout
        self._streaming: threading.Thread | None = None  # sends a copy made aside, then gets the arena ready
        self._copied: StateCopy | None = None  # the state that was saved last, or loaded

    def stored_bytes(self, state: Mapping[Any, Any]) -> int:
        """Return how many bytes this rank would write now: tensors, their indexes and digests, and plain data.

        Raises:
            UnsupportedStateError: the state cannot be saved.
        """
        flat = self._flatten(state)
        layout = self._layout(flat)
        _, contents = self._blobs(flat, layout, "")
        files = [file.size for file in layout.files]
        digests = DIGEST_BYTES * sum(map(num_chunks, files))
        return sum(files) + digests + sum(len(content()) for content in contents)

    @property
    def division(self) -> Division | None:
        """How the ranks divide the state, as it was last looked at: tensors in plain containers and values left out."""
        division = None if self.layout is None else self.layout.division
        return None if division is None else replace(division, loose=(), num_loose=0)

    @property
    def arena(self) -> Arena | None:
        """The memory of the last copy, or of the first one to come."""
        return self._arenas.newest

    @property
    def streams(self) -> bool:
        """Whether the state, as it was last looked at, goes through an arena that is smaller."""
        return self.layout is not None and self._windowed(self.layout)

    @property
    def handed_over(self) -> Future[None] | None:
        """Done when the writer has the last save, which may be later if tensors lie on a device; None: it has it."""
        return None if self.copies is None else self.copies.sealing

    def arenas(self) -> list[tuple[int, int]]:
        """Descriptor and bytes of each arena that holds whole states in the present layout."""
        if self.streams:
            return []
        return self._arenas.shared()

    def arena_files(self) -> list[tuple[str, str, int]]:
        """Return for each file its name before and after the id of a save, and its first byte in an arena."""
        files = [] if self.layout is None else self.layout.files
        return [(file.stem, file.suffix, file.arena_offset) for file in files]

    def look_at_memory(self, state: Mapping[Any, Any], *, reserve: int = 0) -> str | None:
        """Decide whether a copy of the state fits into memory; return what it costs if it does not.

        Args:
            state: what will be saved.
            reserve: bytes that training itself has yet to take, without gradients.
        """
        self._fit_memory(state, self._layout(self._flatten(state)), reserve=reserve, says=False)
        return self.shortage

    def remember(self, state: Mapping[Any, Any]) -> None:
        """Note a state that was loaded, for `changed`."""
        self._copied = StateCopy(self._flatten(state))

    def changed(self, state: Mapping[Any, Any], *, apart_from: str) -> list[str]:
        """Return the names of what has changed since the last save, or `remember`; of several ranks not of objects."""
        if (was := self._copied) is None:
            return []
        within = None
        if self.world_size > 1:  # an object may use collectives, and the others may have left
            state = {key: value for key, value in state.items() if not has_objects(value)}
            within = frozenset(map(str, state))
        return was.changed(self._flatten(state), apart_from=apart_from, within=within)

    def prepare(self, state: Mapping[Any, Any], client: WriterClient) -> None:
        """Get ready for the first save: map the arena here and in the writer, fault its pages in the background."""
        flat = self._flatten(state)
        layout = self._layout(flat)
        self._fit_memory(state, layout)
        if not self._windowed(layout):
            if any_on_device(flat.tensors):
                # Its hook has to see a step before it may copy late.
                self._late_copies().prepare(flat)
            self._arenas.make_ready(layout, client, take_turns=self.rescues)

    def _late_copies(self) -> DeviceCopies:
        if self.copies is None:
            from .device_copies import DeviceCopies  # not above: a state in host memory needs none

            self.copies = DeviceCopies()
        return self.copies

    @paused_gc()
    def keep(self, state: Mapping[Any, Any], client: WriterClient, storage: Storage, job: SaveJob) -> bool:
        """Copy ``state`` for the case that this process dies: the writer holds the copy and commits it only then.

        Args:
            state: what to save.
            client: the writer.
            storage: root that ``job.directory`` is relative to.
            job: as for `submit`.

        Returns:
            False if nothing was kept and never will be, because memory is short: `shortage` says how short.

        Raises:
            UnsupportedStateError: the state cannot be saved.
        """
        self._end_streaming()
        flat = self._flatten(state)
        layout = self._layout(flat)
        self._fit_memory(state, layout)
        if self._windowed(layout) or not self.rescues or flat.whole:  # putting together is for saves alone
            self._arenas.forget_kept()
            return False
        plans, contents = self._blobs(flat, layout, job.save_id)
        job = replace(
            job, writer=self.rank, files=layout.file_plans(job.save_id), blobs=plans,
            division=self._division(flat, layout, wait=True),
        )  # fmt: skip
        step = job.manifest.get("step")
        arena = self._arenas.turn(layout, client, step, release_s=_RELEASE_S, timeout_s=self.timeout_s)
        if arena is None:
            late = f"the save before is not written after {self.timeout_s:.0f} s (timeout_s)"
            if not self._has_missed:
                what = late if self._arenas.has_given_up else "the writer is slow to take messages"
                _LOG.warning("%s: a snapshot (rescue=) is left out, as are later ones", what)
            self._has_missed = True
            return True

        def hand_over(filled: int | None = None) -> PendingCall:
            client.hold(storage, job, [content() for content in contents], arena)
            return PendingCall(0, {})  # nobody waits for it

        if any_on_device(flat.tensors):
            self._late_copies().submit(flat, layout, arena, client, hand_over, lazy=False)
        else:
            stage(flat.tensors, layout.offsets, layout.sizes, arena)
            hand_over()
        arena.prefault()
        self._arenas.keep(step)
        return True

    @property
    def would_wait(self) -> bool:
        """Whether `keep` would wait for a save: it is being written, and the newest snapshot has the other memory."""
        layout = self.layout
        return layout is not None and layout.arena_bytes >= SMALL_COPY and self._arenas.are_taken

    @paused_gc()
    def submit(
        self,
        state: Mapping[Any, Any],
        client: WriterClient,
        storage: Storage,
        job: SaveJob,
        *,
        metrics: Callable[[], Mapping[str, Any]] | None = None,
        unsupported: str | None = None,
        lazy: bool = False,
        aside: bool = False,
    ) -> Future[Any]:
        """Snapshot ``state`` and hand it to the writer. The caller may change the state when this returns.

        With several ranks each rank calls this, with ``part``, the same ``save_id`` and a state of the same structure;
        no rank waits for another here.

        Args:
            state: what to save.
            client: the writer.
            storage: root that ``job.directory`` is relative to.
            job: under which name the state is saved, and what a commit of it means; files and blobs are filled in.
            metrics: gives those of the manifest; called when the job is handed over, it may wait for a device.
            unsupported: "raise" or "drop"; None: the value given to this object.
            lazy: tensors of an accelerator that an optimizer owns may still be copied when this returns
                (`device_copies`).
            aside: if the arena does not exist yet, copy a big state into private memory, whose fresh pages cost a
                fraction of shared pages, and send it in the background. The writer then has all of it a moment after
                this returns.

        Returns:
            The future of the save, which resolves with its `SaveResult` when it is committed.

        Raises:
            ConfigError: several ranks save together, and ``job.part`` is not set.
        """
        if self.world_size > 1 and not job.part:
            raise ConfigError(f"rank {self.rank} of {self.world_size} holds one part of a checkpoint: give part=True")
        self._end_streaming()
        flat = self._flatten(state, unsupported)
        if tuple(flat.dropped) != self.dropped:
            self.dropped = tuple(flat.dropped)
            if self.dropped:
                _LOG.warning("NOT saved, as unsupported='drop' asks: %s", ", ".join(self.dropped))
        before, layout = self.layout, self._layout(flat)
        self._fit_memory(state, layout)
        if flat.whole:
            self._put_together(flat, layout)
        on_device = any_on_device(flat.tensors)
        bounded = self._windowed(layout)
        aside = aside and not bounded and self.arena is None and layout.tensor_bytes >= _ASIDE and not on_device
        windowed = bounded or aside
        plans, contents = self._blobs(flat, layout, job.save_id)
        job = replace(
            job,
            writer=self.rank,
            files=layout.file_plans(job.save_id),
            blobs=plans,
            windowed=windowed,
            division=self._division(flat, layout, wait=not lazy or layout is not before),
            want_unchanged=job.reuse and not windowed and not self._observed,
        )

        def hand_over(arena: Arena, filled: int | None = None, blobs: Sequence[bytes] | None = None) -> PendingCall:
            if blobs is None:  # while a big state is being copied, the helper thread goes on copying during `dumps`
                blobs = [content() for content in contents]
            if metrics is not None:
                job.manifest["metrics"] = dict(metrics())
            return client.submit(storage, job, blobs, arena, filled=filled)

        turn = partial(self._arenas.turn, layout, client, job.manifest.get("step"), take_turns=self.rescues)
        future: Future[Any]
        if aside:
            from .windows import send_aside  # as in `_send_windows`

            future = send_aside(
                layout, flat.tensors, client, hand_over, nbytes=_ASIDE, timeout_s=self.timeout_s,
                begun=partial(setattr, self, "_streaming"), ready=partial(self._arenas.make_ready, layout, client),
            )  # fmt: skip
        elif bounded:
            future = self._send_windows(flat, layout, client, hand_over)
        elif (arena := turn(release_s=self.timeout_s, timeout_s=self.timeout_s)) is None:
            raise HoldfastError(
                f"the writer takes no messages for {self.timeout_s:.0f} s (timeout_s): the process is stopped, or the "
                "machine is very slow; training cannot count on it"
            )
        elif on_device:
            sealed = partial(hand_over, arena, blobs=[content() for content in contents])
            future = self._late_copies().submit(flat, layout, arena, client, sealed, lazy=lazy)
        else:
            future = self._copy(flat, layout, arena, client, partial(hand_over, arena))
            arena.prefault()  # maps the pages for the next save, unless they are mapped already
        if job.reuse:  # one of a series
            self._copied = StateCopy(flat, layout, None if windowed else self.arena)
        if self.rescues and not windowed:
            self._arenas.write(future, self.handed_over)
        return future

    def _blobs(
        self, flat: Flat, layout: Layout, save_id: str
    ) -> tuple[tuple[BlobPlan, ...], list[Callable[[], bytes]]]:
        """Return the small files that this rank writes, and functions that make their contents."""
        plans: list[BlobPlan] = []
        contents: list[Callable[[], bytes]] = []
        if self.rank == layout.leader:
            name = f"state-{save_id}.json" if self.rank == 0 else f"state-{self.rank:05d}-{save_id}.json"
            plans.append(BlobPlan(path=name, role="state"))
            contents.append(partial(dumps, flat.tree))
        if flat.per_rank:
            plans.append(BlobPlan(path=f"rank-{self.rank:05d}-{save_id}.json", role="rank"))
            contents.append(partial(dumps, flat.per_rank))
        for path, text in layout.indexes.items():  # file names are those of this save
            plans.append(BlobPlan(path=path, role="user"))
            contents.append(text.replace("{save_id}", save_id).encode)
        return tuple(plans), contents

    def _send_windows(
        self, flat: Flat, layout: Layout, client: WriterClient, submit: Callable[[Arena], PendingCall]
    ) -> PendingCall:
        """Send everything through an arena that is smaller than the state."""
        from .windows import WindowStream, copy_window  # here and below: of states that are small, or fit, none is used

        window = self._arenas.window(int(self._bound) // MIN_WINDOW * MIN_WINDOW)
        save = submit(window)
        WindowStream(layout, client, window, self.timeout_s).send(save, partial(copy_window, flat.tensors))
        return save

    def _copy(
        self,
        flat: Flat,
        layout: Layout,
        arena: Arena,
        client: WriterClient,
        submit: Callable[[int | None], PendingCall],
    ) -> PendingCall:
        """Copy everything into the arena; submit a big job before the copying ends, so that the writer starts early.

        The writer does not start at once, because writer and copying share the cores and the memory bus (measured with
        1.4 GiB on two cores: the copy takes 1.4 times as long when the writer starts at once).
        """
        begun: list[PendingCall] = []

        def follow(filled: int) -> None:
            if begun:
                client.fill(begun[0], filled)
            elif filled >= _FOLLOW_FROM * arena.size:
                begun.append(submit(filled))

        big = layout.tensor_bytes >= _FOLLOW
        try:
            stage(flat.tensors, layout.offsets, layout.sizes, arena, filled=follow if big else None)
        except BaseException:
            if begun:
                client.abandon(begun[0])
            raise
        if not begun:
            return submit(None)
        client.fill(begun[0], arena.size)  # sealed
        return begun[0]

    def _end_streaming(self) -> None:
        """Wait until the thread of a first save is done; the owner of its future waits for its save."""
        thread, self._streaming = self._streaming, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def observe(self, unchanged: tuple[tuple[int, int, int], ...]) -> None:
        """Learn which tensors did not change between two saves, and give them files of their own.

        Args:
            unchanged: (file number, offset, bytes) of each run that equals the previous save.
        """
        layout = self.layout
        if layout is None or self._observed or not unchanged:
            return
        if self.model_files is not None and self.world_size > 1:
            return  # rank 0 has to know in which files the tensors of the others are
        self._observed = True
        names = set()
        total = 0
        for number, start, size in unchanged:
            file = layout.files[number]
            for source, first, nbytes in file.segments_between(start, start + size):
                # A tensor shares the chunks at its ends with neighbours that may change: its whole chunks are enough.
                low, high = -(-first // CHUNK) * CHUNK, (first + nbytes) // CHUNK * CHUNK
                low, high = (low, high) if high > low else (first, first + nbytes)
                if isinstance(source, int) and low >= start and high <= start + size:
                    names.add(layout.signature.names[source])
                    total += nbytes
        if total * 10 >= layout.tensor_bytes:
            _LOG.info("%d tensors did not change between saves: they get files of their own", len(names))
            self.stable |= names
            self._planned_for = (), None  # the next save is planned anew; its arena is looked at until then

    def rest(self) -> None:
        """End a series of saves that share their log lines. Layout and arena stay, unless the arena is pinned."""
        self.dropped = ()
        if self.copies is not None:
            self.close()

    def close(self) -> None:
        """Give the arena back; idempotent."""
        self._end_streaming()
        if self.copies is not None:
            self.copies.close()
            self.copies = None
        self._drop_layout()
        self._arenas.forget_kept()

    def _division(self, flat: Flat, layout: Layout, *, wait: bool) -> dict[str, Any] | None:
        """Describe how the state is divided, with fingerprints of replicated tensors, which the commit compares.

        Without ``wait`` it leaves out tensors on an accelerator: they would make training wait for its stream.
        """
        if layout.division is None:
            return None
        samples, alone = (sampled(flat, positions, wait=wait) for positions in (layout.sampled, layout.alone))
        if layout.division.alike is None:  # else they are those of other parameters
            alone = {**alone, **flat.settings}
        return replace(layout.division, samples=samples, alone=alone).to_json()

    # -- layout and arena

    def _flatten(self, state: Mapping[Any, Any], unsupported: str | None = None) -> Flat:
        shared = self.world_size > 1
        whole = self.model_files.wants if shared and self.model_files is not None else None
        refused = unsupported or self.unsupported
        return flatten(state, unsupported=refused, rank=self.rank, shared=shared, whole=whole)

    def _put_together(self, flat: Flat, layout: Layout) -> None:
        """Put the tensors together that are cut over ranks and saved whole: a collective, in one order on all ranks.

        Only the rank that writes a tensor keeps it.
        """
        for number in sorted(flat.whole, key=flat.names.__getitem__):
            with torch.no_grad():
                full = flat.whole[number].full_tensor().detach()  # type: ignore[attr-defined]
            if layout.offsets[number] >= 0:
                flat.tensors[number] = full.contiguous()

    def _layout(self, flat: Flat) -> Layout:
        alike = self.alike
        if alike is None and flat.groups:
            from ..tree.sharded import common_group

            alike = common_group(flat.groups, rank=self.rank, world_size=self.world_size)
        model_files = None if self.model_files is None else self.model_files.resolve()
        if self.layout is None or (alike, model_files) != self._planned_for or not fits(self.layout.signature, flat):
            self._drop_layout()
            self._planned_for = alike, model_files
            self.layout = plan(
                signature(flat),
                rank=self.rank,
                num_ranks=self.world_size,
                max_file_bytes=self.max_file_bytes,
                stable=self.stable,
                alike=alike,
                model_files=model_files,
            )
            if flat.whole and self.rank == 0 and not self._has_said_whole:
                self._has_said_whole = True
                size = sum(self.layout.sizes[number] for number in flat.whole)
                _LOG.warning(
                    "model_files: %d tensors (%s) are cut over ranks. Each save puts them together, by collectives of "
                    "the process group for which training waits, and one rank writes each of them whole",
                    len(flat.whole), format_bytes(size),
                )  # fmt: skip
        return self.layout

    def _drop_layout(self) -> None:
        self.layout, self._bound, self._looked = None, self.max_staging_bytes or math.inf, False
        if self.copies is not None and self.arena is not None:
            self.copies.unpin()
        self._arenas.drop()

    def _fit_memory(self, state: Mapping[Any, Any], layout: Layout, *, reserve: int = 0, says: bool = True) -> None:
        """Look, before a copy is made, whether it fits into memory, and go through windows if not.

        A kernel gives memory that it does not have, and kills for it later, without a word.
        """
        if self._looked or self.arena is not None or layout.arena_bytes < SMALL_COPY or self._windowed(layout):
            return
        self._looked = True
        from .windows import look_for_memory  # not above: small states do not ask

        room = look_for_memory(state, layout.arena_bytes, rescues=self.rescues, reserve=reserve)
        before, self.shortage = self.shortage, room.shortage
        if room.shortage is not None:
            self.rescues, self._bound = False, min(self._bound, room.bound)
            if says and before is None:
                _LOG.warning("%s", room.shortage)

    def _windowed(self, layout: Layout) -> bool:
        return layout.arena_bytes > self._bound
