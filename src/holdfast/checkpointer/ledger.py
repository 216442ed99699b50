"""`DataLedger`: what was trained on, and whether a resumed loader goes on from there; `LeftOut`: what no life trains.

Nobody's word is taken for the position in the data. Each batch is noted when it is handed out, in the ring of the run
(`holdfast.run.data_ring`), and those since the last checkpoint in the checkpoint. After a resume both say what may
come:

- what the dead life drew after its save is what must come again, batch by batch;
- what was trained before the save must not come again in the same epoch.

Only entries count that lead to the checkpoint, or from it: those of its own life, of the lives it descends from, and of
other lives that went on from the very same checkpoint with the same loader. A run that was begun afresh, or from a
checkpoint of another run, with other ranks, or with a loader of another make-up, has nothing to be compared with.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import StateMismatchError
from holdfast.run.data_ring import NUM_ENTRIES, BatchSpan, DataRing, RingEntry, name_id
from holdfast.state.data.batches import ResumableBatches, batch_length
from holdfast.state.data.digest import NOT_READ, batch_digest
from holdfast.state.data.loaders import name_of
from holdfast.state.tree.values import PerRank

_LOG = get_logger("data")
_STORED = struct.Struct("<QQIII")  # content, indices, epoch, index, name
_NUM_LIVES = 64
_Key = tuple[int, int]  # epoch, index in the epoch


class LeftOut:
    """Batches that no life trains, as so many ranks count them; they go into each checkpoint.

    Args:
        num_ranks: of this life, each of which counts its own batches.

    Attributes:
        spans: the batches.

    Example:
        >>> left_out = LeftOut(1)
        >>> left_out.load_state_dict([1, [["train", 0, 5, 7]]])
        >>> left_out.covers("train", 0, 6), left_out.of_epoch("train", 0)
        (True, {5, 6})
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.spans: set[BatchSpan] = set()

    def covers(self, name: str, epoch: int, batch: int) -> bool:
        """Tell whether a batch is one of them."""
        return any(span[:2] == (name, epoch) and span.first <= batch < span.end for span in self.spans)

    def of_epoch(self, name: str, epoch: Any) -> set[int]:
        """Return those of an epoch of one loader."""
        return set().union(*(range(span.first, span.end) for span in self.spans if span[:2] == (name, epoch)))

    def state_dict(self) -> list[Any]:
        """Describe them as plain data."""
        return [self._num_ranks, [list(span) for span in sorted(self.spans)]]

    def load_state_dict(self, state: Any) -> None:
        """Take over what an earlier life had saved; another number of ranks counts other batches."""
        num_ranks, spans = state
        if num_ranks == self._num_ranks:
            self.spans.update(map(BatchSpan.from_json, spans))


@dataclass(slots=True)
class _Known:
    """What is known of the batches of one loader when a life begins.

    Attributes:
        expected: those that came after the checkpoint, in lives before; what must come again.
        trained: place of each content that was trained, in the epoch of the checkpoint.
        places: content of each place that was trained, likewise.
        repeats: the epoch has given one content twice, so that a content does not tell a place.
        epoch: of ``trained``.
        suspect: place and content of a batch that came again, which alone is no proof.
        is_first: no batch was compared in this life. Only the first one is looked up in ``trained``: later on the data
            of an endless epoch may begin anew.
    """

    epoch: int = -1
    expected: dict[_Key, RingEntry] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    repeats: bool = False
    suspect: tuple[int, int] | None = None
    is_first: bool = True


class DataLedger:
    """The ledger of one rank in one life.

    Args:
        on_mismatch: "raise", "warn" or "ignore".
        world_size: number of ranks.

    Attributes:
        tell: gets what would be an error or a warning, while a resume is being verified.
    """

    def __init__(self, *, on_mismatch: str = "raise", world_size: int = 1) -> None:
        self._on_mismatch, self._world_size = on_mismatch, world_size
        self.tell: Callable[[str], None] | None = None
        self._ring: DataRing | None = None
        self._attempt = self._parent = self._parent_step = 0
        self._lives: list[list[int]] = []  # attempt and first step of the lives that lead here, oldest first
        self._stored: Mapping[str, Any] | None = None  # of the checkpoint, until the life begins
        self._recent: deque[bytes] = deque(maxlen=NUM_ENTRIES)  # since the last checkpoint
        self._first: dict[str, tuple[int, bytes]] = {}  # of each loader: its epoch, and the first batch of it
        self._known: dict[str, _Known] = {}
        self._makeups: dict[str, dict[str, Any]] = {}
        self._makeups_before: Mapping[str, Any] = {}
        self._apart: set[str] = set()  # loaders of this life whose batches no other life has to give again
        self._said_other = False

    # -- life

    def begin(self, ring: DataRing | None, *, attempt: int, step: int, is_own: bool) -> None:
        """Begin a life.

        Args:
            ring: the file; None where there is no local directory.
            attempt: number of this life.
            step: that it goes on from.
            is_own: it goes on from a checkpoint of this run.
        """
        self._ring, self._attempt = ring, attempt
        stored, self._stored = self._stored, None
        if is_own and stored is not None and stored.get("world_size") == self._world_size:
            try:
                self._parent, self._parent_step = int(stored["attempt"]), step
                self._lives = [[int(life[0]), int(life[1])] for life in stored["lives"]][-_NUM_LIVES:]
                self._makeups_before = dict(stored["loaders"])
                if self._on_mismatch != "ignore":
                    self._learn(stored, ring.entries if ring is not None else [])
            except (KeyError, TypeError, ValueError, IndexError, struct.error) as error:
                _LOG.warning("the ledger of the checkpoint cannot be read, its batches are not compared: %r", error)
                self._known, self._makeups_before = {}, {}
        self._lives.append([attempt, step])

    def _learn(self, stored: Mapping[str, Any], entries: list[RingEntry]) -> None:
        names = {name_id(name): name for name in self._makeups_before}
        last = {attempt: number for number, (attempt, _) in enumerate(self._lives)}
        at: Mapping[str, Any] = stored["at"]
        for content, indices, epoch, index, number in _STORED.iter_unpack(stored["recent"]):
            if number in names:
                self._was_trained(names[number], at, epoch, index, content, indices)
        for entry in entries:
            name = names.get(entry.name)
            if name is None or name not in at:
                continue
            key = entry.epoch, entry.index
            is_before = key < tuple(at[name])
            number = last.get(entry.attempt, -1)
            if is_before and number >= 0:
                until = self._lives[number + 1][1] if number + 1 < len(self._lives) else None
                if until is None or entry.step < until:
                    self._was_trained(name, at, *key, entry.content, entry.indices)
            elif not is_before and (
                entry.attempt == self._parent or (entry.parent, entry.parent_step) == (self._parent, self._parent_step)
            ):
                self._known_of(name).expected[key] = entry  # of two lives the newer one

    def _known_of(self, name: str) -> _Known:
        return self._known.setdefault(name, _Known())

    def _was_trained(
        self, name: str, at: Mapping[str, Any], epoch: int, index: int, content: int, indices: int
    ) -> None:
        known = self._known_of(name)
        # Where there are indices, the order of the epoch is ours, and a sample may come twice in it.
        if content == NOT_READ or indices or name not in at or epoch != at[name][0] or index >= at[name][1]:
            return
        known.epoch = epoch
        known.places[index] = content
        if known.trained.setdefault(content, index) != index:
            known.repeats = True

    def close(self) -> None:
        """Let go of the file; idempotent."""
        if self._ring is not None:
            self._ring.close()

    # -- what a checkpoint holds

    def state_dict(self, positions: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return what a checkpoint holds: where it stands, and the batches since the checkpoint before.

        Args:
            positions: of the loaders, after the last trained step.
        """
        first = [entry for _, entry in self._first.values()]
        state = {
            "attempt": self._attempt,
            "world_size": self._world_size,
            "lives": self._lives[-_NUM_LIVES:],
            "at": {name: [int(found["epoch"]), int(found["batches"])] for name, found in positions.items()},
            "loaders": {**self._makeups_before, **self._makeups},
            "recent": b"".join(dict.fromkeys([*first, *self._recent])),
        }
        return PerRank(state) if self._world_size > 1 else state

    def load_state_dict(self, state: Any) -> None:
        """Keep what a checkpoint holds until `begin`."""
        state = state.value if isinstance(state, PerRank) else state
        self._stored = state if isinstance(state, Mapping) else None

    def saved(self) -> None:
        """Note that a checkpoint has what was noted so far."""
        self._recent.clear()

    # -- batches

    def opened(self, loader: Any, name: str, batches: ResumableBatches, position: Mapping[str, Any] | None) -> None:
        """Note that a pass over a loader begins, or goes on.

        Args:
            loader: the user's.
            name: of the loader.
            batches: what iterates it.
            position: of an earlier life, or of this one.
        """
        makeup = self._makeups[name] = batches.makeup()
        before: Mapping[str, Any] = self._makeups_before.get(name) or {}
        moved = position is not None and position["epoch"] == batches.epoch and position["batches"] != batches.batches
        changed = [key for key in makeup if makeup[key] != before.get(key, makeup[key])]
        if moved or changed:
            self._apart.add(name)
        if (moved or changed) and name in self._known:
            del self._known[name]
            if changed and batches.kind != "map":  # what a map-style loader says of it, it says itself
                what = ", ".join(f"{key} {makeup[key]!r}, was {before.get(key)!r}" for key in changed)
                _LOG.warning(
                    "the loader %r (%s) is not what it was when this run was saved: %s. Whether it goes on where it "
                    "stopped cannot be told", name, name_of(loader), what,
                )  # fmt: skip

    def given(self, loader: Any, name: str, batches: ResumableBatches, batch: Any, *, index: int, step: int) -> None:
        """Compare a batch that is about to be trained on with what is known, and note it.

        Raises:
            StateMismatchError: it cannot be the one that should come.
        """
        epoch, indices = batches.epoch, batches.indices
        content = batch_digest(batch)
        if self._known:
            self._compare(loader, name, (epoch, index), content, indices, batch, step)
        parent, parent_step = (0, 0) if name in self._apart else (self._parent, self._parent_step)
        entry = content, indices, self._attempt, parent, parent_step, step, epoch, index, batch_length(batch)
        if self._ring is not None:
            self._ring.add(entry, name)
        stored = _STORED.pack(content, indices, epoch & 0xFFFFFFFF, index & 0xFFFFFFFF, name_id(name))
        self._recent.append(stored)
        if self._first.get(name, (-1, b""))[0] != epoch and index == 0:
            self._first[name] = epoch, stored

    def replayed(self, loader: Any, name: str, index: int, batch: Any, *, step: int) -> None:
        """Compare a batch that was trained, and is drawn again to get back to the position, with what was trained."""
        known = self._known.get(name)
        if known is None or self._said_other:
            return
        trained = known.places.get(index, NOT_READ)
        if NOT_READ not in (trained, content := batch_digest(batch)) and content != trained:
            self._say_other(
                f"{_at(step, known.epoch)}: batch {index} of {name!r} was drawn again to get back to the position, and "
                f"the {name_of(loader)} gave another one than was trained there"
            )

    def ended(self, loader: Any, name: str, batches: ResumableBatches, *, index: int, step: int) -> None:
        """Note that the loader has no more batches in this epoch.

        Raises:
            StateMismatchError: more were trained in this epoch.
        """
        known = self._known.get(name)
        if known is None or (batches.epoch, index) not in known.expected:
            return
        self.say(
            name,
            f"{_at(step, batches.epoch)}: batch {index} of {name!r} should come, and the {name_of(loader)} says "
            "that the epoch is over. This run has drawn that batch before: the loader does not go on from its saved "
            "position",
        )

    def _compare(self, loader: Any, name: str, key: _Key, content: int, indices: int, batch: Any, step: int) -> None:
        known = self._known.get(name)
        if known is None:
            return
        (epoch, index), expected = key, known.expected.pop(key, None)
        what = f"{_at(step, epoch)}: batch {index} of {name!r} should come"
        kind = name_of(loader)
        is_first, known.is_first = known.is_first, False
        if expected is not None and indices and expected.indices:
            if indices != expected.indices:
                self.say(
                    name,
                    f"{what}, and the {kind} gave other samples (other indices) than this run has trained at that "
                    "place before: its sampler does not give the same order again",
                )
            elif NOT_READ not in (content, expected.content) and content != expected.content:
                self._say_other(f"{what} again, and it holds the same samples with other contents")
            return
        if content == NOT_READ:
            return
        trained = known.trained if epoch == known.epoch else {}
        if expected is None or expected.content == NOT_READ:
            # A replay by count has begun at sample 0 itself, so what comes again there is in the data.
            if (is_first or known.suspect) and not known.repeats and trained and hasattr(loader, "load_state_dict"):
                self._look_for_repeat(known, loader, name, index, content, batch, what)
            return
        if content == expected.content:
            return
        later = {entry.content: place for (its, place), entry in known.expected.items() if its == epoch}
        num_later = sum(its == epoch for its, _ in known.expected)
        place = trained.get(content, later.get(content))
        if place is None or known.repeats or len(later) < num_later:
            self._say_other(f"{what} again, and the {kind} gave another one")
            return
        left_out = f": what comes from batch {index} to {place - 1} would be left out" if place > index else ""
        self.say(name, f"{what}, and the {kind} gave batch {place} of this epoch{_again(place, index)}{left_out}")

    def _look_for_repeat(
        self, known: _Known, loader: Any, name: str, index: int, content: int, batch: Any, what: str
    ) -> None:
        """Look a batch up among those that were trained, where nobody knows what should come."""
        place, kind, trained = known.trained.get(content, -1), name_of(loader), known.trained
        suspect, known.suspect = known.suspect, None
        if suspect is not None and content != suspect[1]:
            began, _ = suspect
            if place == began + 1 or (len(trained) == 1 and batch_length(batch) > 1):
                self.say(
                    name, f"{what}, and the {kind} goes on with batch {began + 1} of this epoch again", was_trained=1
                )
            return
        if place < 0 or suspect is not None:
            known.repeats = suspect is not None  # the same data all the time
            return
        if len(trained) == 1 or batch_length(batch) == 1:
            known.suspect = place, content  # constant data, or a sample that is there twice, look like this too
        elif place > 0 or _is_within(loader, index):
            self.say(name, f"{what}, and the {kind} gave batch {place} of this epoch{_again(place, index)}")
        else:
            # A stream that begins anew after its last sample, just here, looks like this too.
            _LOG.warning(
                "%s, and the %s gave batch 0 of this epoch again, which was trained already: it does not go on from "
                "its saved position, unless its data begin anew just here", what, kind,
            )  # fmt: skip

    def say(self, name: str, what: str, *, was_trained: int = 0) -> None:
        """Say what is certain; after the first difference everything differs, so nothing more is compared."""
        self._known.pop(name, None)
        self._apart.add(name)
        if self.tell is not None:
            self.tell(what)
            return
        trained = "No step was trained on it"
        if was_trained:
            trained = f"{was_trained} batch was trained again before that could be told"
        text = (
            f"{what}. {trained}. Look at what the loader does with its state (`holdfast log RUN --data` prints what "
            "this run was trained on), use a map-style data set, or a loader without state_dict, which is replayed by "
            "count; if the data were changed on purpose, on_data_mismatch='warn' goes on with them"
        )
        if self._on_mismatch == "raise":
            raise StateMismatchError(text)
        if self._on_mismatch == "warn":
            _LOG.warning("%s", text)

    def _say_other(self, what: str) -> None:
        if self._said_other:
            return
        self._said_other = True
        _LOG.warning(
            "%s: random augmentation that nothing seeds, a stream that does not repeat itself, or other data than "
            "before. The run goes on and is not exact", what,
        )  # fmt: skip


def _at(step: int, epoch: int) -> str:
    return f"step {step + 1}, epoch {epoch}"


def _is_within(loader: Any, index: int) -> bool:
    """Tell whether a pass over the loader is longer than so many batches; False if it cannot know."""
    try:
        return 0 < index < len(loader)
    except (TypeError, NotImplementedError):
        return False


def _again(place: int, index: int) -> str:
    return " again, which was trained already" if place < index else ""
