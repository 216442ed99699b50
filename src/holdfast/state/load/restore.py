"""Load a checkpoint: plan all reads, refuse what does not fit, read, then give objects their state.

`load_state` restores tensors, arrays and objects in place and returns everything else, which `put_back` puts into the
live mapping: containers keep their identity (other references to a list see the loaded values), other values are
assigned under their name.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch

from holdfast._paused_gc import paused_gc
from holdfast._units import format_bytes
from holdfast.errors import ConfigError, HoldfastError, StateMismatchError
from holdfast.format.digest import CHUNK, Digests, bytes_digest
from holdfast.format.manifest import Manifest
from holdfast.format.names import save_id_of
from holdfast.run.life import kept_arenas
from holdfast.storage.base import FileReader, Storage
from holdfast.storage.wrapped import WrappedStorage

from ..tree.values import Attrs, ObjectNode, PerRank, fill
from .match import Matcher, holds_live
from .match_plan import Problems
from .reader import read_tensors
from .selection import Fit, Selection, of_one_name_each
from .shared_reads import Swap, reading_together
from .stored import Stored, open_stored
from .targets import CheckingReader, ReadRequest, Targets

__all__ = ["KeptMemory", "Loaded", "PutBack", "load_state", "paths", "put_back", "select", "set_attributes"]

_SHOWN = 200  # entries of each kind that a message lists; it counts the rest
_MISSES = 4  # blocks that are not in an arena, before it is asked no more


@dataclass(slots=True)
class Loaded:
    """The result of a load.

    Attributes:
        state: the loaded state.
        restored: paths that were restored.
        not_restored: (path, why) of entries that were not.
        bytes_read: bytes read from the storage.
        notes: a sentence for each value that differs from what was saved because another number of ranks loads.
        manifest: manifest of the checkpoint.
    """

    state: Any
    restored: list[str] = field(default_factory=list)
    not_restored: list[tuple[str, str]] = field(default_factory=list)
    bytes_read: int = 0
    notes: list[str] = field(default_factory=list)
    manifest: Manifest | None = None


@paused_gc()
def load_state(
    storage: Storage | Stored,
    into: Mapping[Any, Any] | None = None,
    fit: Fit = Fit(),  # noqa: B008 - frozen
    *,
    dtype: torch.dtype | None = None,
    map_location: torch.device | str | None = None,
    verify: bool = True,
    rank: int = 0,
    world_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    swap: Swap | None = None,
) -> Loaded:
    """Load the checkpoint at the root of ``storage``, or an opened checkpoint. See `holdfast.load` for the arguments.

    With ``world_size``, the number of ranks that load, generators and values of single ranks follow the rules for
    another number of ranks than have saved. With ``swap`` all ranks load together, and the ranks of one machine read
    once what several of them need; where it does not fit on one of them, the others change and restore nothing.

    Raises:
        ConfigError: an argument is wrong.
        StateMismatchError: ``into`` and the checkpoint do not fit; nothing was changed.
        CorruptCheckpointError: bytes differ from their digests.
    """
    selection = Selection(fit.only, fit.skip, fit.rename)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        raise ConfigError(f"dtype={dtype!r}: floating tensors are cast: give a floating dtype such as torch.bfloat16")
    try:
        device = None if map_location is None else torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"map_location={map_location!r}: give a device such as 'cpu' or 'cuda:0'") from error
    others = _Others(fit.apart, rank, swap)
    try:
        stored = storage
        if not isinstance(stored, Stored):
            stored = open_stored(stored, rank=rank, world_size=world_size, own_first=into is not None)
        if into is None:
            if not fit.idle_names:
                selection.check(paths(stored))
            tree, requests = _plan_fresh(stored, selection, dtype, device)
            matcher = None
        else:
            matcher = Matcher(
                stored, selection, allow_missing=fit.allow_missing, cast=dtype, rank=rank, device=device,
                added=frozenset(fit.added(stored.tree) if fit.added is not None else ()),
            )  # fmt: skip
            with torch.inference_mode(mode=False):  # a step refuses optimizer state that is made within it
                state = matcher.run(into)
            if not fit.idle_names:
                selection.check(paths(stored))
            if stored.manifest.run_id and fit.bookkeeping in matcher.problems.unexpected:
                matcher.problems.unexpected.remove(fit.bookkeeping)
            read_apart = partial(_read_apart, stored, verify=verify)
            matcher.problems.wrong += matcher.other_values(read_apart)
            clashes = matcher.targets.clashes(read_apart)
            matcher.problems.wrong += [f"{selection.renamed(name)}: {why}" for name, why in clashes]
            requests = matcher.targets.requests
            others.take(matcher)
            if fit.strict and (refused := matcher.problems.without(tuple(fit.lenient))):
                raise _mismatch(refused, stored.storage.uri, names=list(into))
        digests = stored.digests_of({request.file for request in requests}) if verify else None
    except Exception:
        if swap is not None:
            others.take(None)
            _have_failed(swap, "fits")
        raise
    # A `load_state_dict` may use collectives: no rank calls one unless all do.
    fits = [] if swap is None else swap("fits", matcher is not None and matcher.hands_over)
    if None in fits:
        return Loaded(into)  # another rank raises why
    meets = swap if any(fits) else None
    with torch.no_grad():
        try:
            read, from_memory = _read(stored, requests, digests, swap, progress=progress)
        except Exception:
            if meets is not None:
                _have_failed(meets, "read")
            raise
        if meets is not None and None in meets("read", True):
            return Loaded(into)
        if matcher is None:
            return Loaded(fill(tree, stored.per_rank), bytes_read=read, manifest=stored.manifest)
        for action in (*matcher.actions, *matcher.handovers(sort=world_size is not None and world_size > 1)):
            action()
        state = matcher.filled(state)
        for action in matcher.last:
            action()
        matcher.forget_actions()
    if from_memory:
        matcher.notes.append(f"{format_bytes(from_memory)} were still in memory, {format_bytes(read)} were read")
    for kind in ("missing", "unexpected", "wrong"):
        matcher.not_restored.extend((entry, kind) for entry in getattr(matcher.problems, kind))
    return Loaded(state, matcher.restored, matcher.not_restored, read, matcher.notes, stored.manifest)


def _have_failed(swap: Swap, group: str) -> None:
    with contextlib.suppress(HoldfastError, RuntimeError):  # this rank's own error is the one to raise
        swap(group, None)


@dataclass(slots=True)
class _Others:
    """Entries of ranks that hold other tensors: a stored entry that this rank does not expect may be one of them."""

    apart: tuple[int, ...] | None
    rank: int
    swap: Swap | None
    asked: bool = False

    def take(self, matcher: Matcher | None) -> None:
        """Remove entries of other ranks from the unexpected ones. All ranks call it once, with None after a failure."""
        if self.apart is None or self.asked:
            return
        self.asked = True
        entries = [] if matcher is None else _leaves(matcher.problems.unexpected, matcher.stored)
        left: list[str] = []
        if self.swap is not None:
            # The first of the ranks that hold the same answers for all of them.
            keys = None if matcher is None or self.rank != self.apart[0] else [_key(entry) for entry in entries]
            # After a failure on this rank, its own error is the one to raise.
            with contextlib.suppress(*(() if matcher is not None else (HoldfastError, RuntimeError))):
                missed = [set(theirs) for theirs in self.swap("apart", keys) if theirs is not None]
                nobody = set.intersection(*missed) if missed else set()
                left = [entry for entry in entries if _key(entry) in nobody]
        if matcher is not None and (taken := len(entries) - len(left)):
            matcher.problems.unexpected = left
            matcher.notes.append(
                f"{taken} entries of the checkpoint are for other ranks, which hold other parts of the state"
            )


def _leaves(entries: Sequence[str], stored: Stored) -> list[str]:
    """Return the tensors below some stored entries, which other ranks may know by more or less of their path."""
    names = sorted(stored.refs)
    leaves: list[str] = []
    for entry in entries:
        start = bisect_left(names, f"{entry}/")
        below = list(takewhile(lambda name, entry=entry: name.startswith(f"{entry}/"), islice(names, start, None)))  # type: ignore[misc]
        leaves.extend(below or [entry])
    return sorted(set(leaves))


def _key(entry: str) -> str:
    return bytes_digest(entry.encode(errors="surrogatepass")).removeprefix("xxh3:")


def _read_apart(stored: Stored, requests: Sequence[ReadRequest], *, verify: bool) -> None:
    """Read before all others what decides whether checkpoint and live state fit."""
    digests = stored.digests_of({request.file for request in requests}) if verify else None
    with torch.no_grad():
        read_tensors(stored.storage, requests, digests)


def _read(
    stored: Stored,
    requests: Sequence[ReadRequest],
    digests: Digests | None,
    swap: Swap | None,
    *,
    progress: Callable[[int], None] | None,
) -> tuple[int, int]:
    """Read, alone or together with other ranks.

    Returns:
        How many bytes this rank read from the storage, and how many of the life before were still in memory.
    """
    storage, kept = stored.storage, None
    with contextlib.ExitStack() as stack:
        if digests is not None and (arenas := kept_arenas()):  # without digests nothing there can be checked
            storage = kept = stack.enter_context(KeptMemory(storage, stored.manifest, digests, arenas))
        if swap is None:
            read = read_tensors(storage, requests, digests, progress=progress)
        else:
            with reading_together(storage, stored.manifest, requests, digests, swap) as shared:
                read = read_tensors(storage, requests, digests, progress=progress, shared=shared)
            read += 0 if shared is None else shared.bytes_read
    from_memory = 0 if kept is None else kept.nbytes
    return read - from_memory, from_memory


def _plan_fresh(
    stored: Stored, selection: Selection, dtype: torch.dtype | None, device: torch.device | None
) -> tuple[Any, list[ReadRequest]]:
    """Plan a load without a live state: every selected entry comes back in nested dicts with new tensors."""
    tree = stored.tree if selection.everything else select(stored.tree, "", selection)
    targets = Targets(stored)
    by_tensor: dict[str, torch.Tensor] = {}
    for ref in stored.refs_in(tree):
        original = stored.aliases.get(ref.name, ref.name)
        if original not in by_tensor:
            entry = stored.entry(ref.name)
            own = targets.dtype(entry.dtype)
            # Without dimensions it may be an optimizer's counter of steps: bfloat16 cannot count beyond 256.
            casts = own.is_floating_point and ref.kind not in ("array", "part") and bool(entry.shape)
            cast = dtype if dtype is not None and casts else own
            home = torch.device("cpu") if ref.kind == "array" or device is None else device
            by_tensor[original] = targets.fresh(original, dtype=cast, device=home)
        ref.value = by_tensor[original]
    return tree, targets.requests


def select(value: Any, path: str, selection: Selection) -> Any:
    """Return the wanted entries under their new names, and the containers that hold any of them."""
    if isinstance(value, ObjectNode):
        state = select(value.state, path, selection)
        return value if state is value.state else replace(value, state=state)
    if not isinstance(value, dict):
        return value
    kept = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
    taken: list[str] = []
    for key, item in value.items():
        where = f"{path}/{key}" if path else str(key)
        content = item.state if isinstance(item, ObjectNode) else item
        if isinstance(content, dict) and content:
            inner = select(item, where, selection)
            if not (inner.state if isinstance(inner, ObjectNode) else inner):
                continue
        elif selection.takes(where):
            inner = item
        else:
            continue
        kept[_new_key(path, where, key, selection)] = inner
        taken.append(where)
    of_one_name_each((where, selection.renamed(where)) for where in taken)
    return kept


def _new_key(path: str, where: str, key: Any, selection: Selection) -> Any:
    renamed = selection.renamed(where)
    parent = f"{selection.renamed(path)}/" if path else ""
    if renamed == parent + str(key):
        return key
    if not renamed.startswith(parent):
        raise ConfigError(
            f"rename moves {where!r} to {renamed!r}, into another container: give `into`, or rename within it"
        )
    return renamed[len(parent) :]


def paths(stored: Stored) -> Iterator[str]:
    """Yield the path of every entry of the checkpoint: containers, plain data, tensors."""
    yield from stored.refs

    def walk(value: Any, path: str) -> Iterator[str]:
        if path:
            yield path
        value = value.state if isinstance(value, ObjectNode) else value
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{path}/{key}" if path else str(key))

    yield from walk(stored.tree, "")


_CAST = re.compile(r": (b?float\d+) in the state, b?float\d+ in the checkpoint")


def _mismatch(problems: Problems, where: str, *, names: Sequence[Any]) -> StateMismatchError:
    lines = [f"the checkpoint {where} does not fit the state; nothing was changed."]
    everything: list[str] = []
    is_run = "holdfast" in names  # the own entry of a run: a `Checkpointer` loads, which has neither only= nor dtype=
    for title, kind, entries in (
        ("in the state but not in the checkpoint", "missing", problems.missing),
        ("in the checkpoint but not in the state", "unexpected", problems.unexpected),
        ("different", "wrong", problems.wrong),
    ):
        if entries:
            lines.append(f"  {len(entries)} {title}:")
            lines.extend(f"    {entry}" for entry in sorted(entries)[:_SHOWN])
            if len(entries) > _SHOWN:
                lines.append(f"    ... and {len(entries) - _SHOWN} more")
            everything.extend(f"{kind}: {entry}" for entry in sorted(entries))
    if hint := _prefix_hint(problems.missing, problems.unexpected):
        lines.append(f"  {hint}")
    if problems.unexpected and not problems.missing and not problems.wrong and "/" not in "".join(problems.unexpected):
        chosen = sorted(problems.unexpected) if is_run else [str(name) for name in names]
        option = f"{'skip' if is_run else 'only'}={(chosen[0] if len(chosen) == 1 else chosen)!r}"
        lines.append(f"  to load what the state has and nothing else: {option}")
    casts = {found[1] for entry in problems.wrong if (found := _CAST.search(entry))}
    if len(casts) == 1 and not is_run:
        lines.append(f"  to cast while loading: dtype=torch.{casts.pop()}")
    lines.append(
        "  what to do: allow_missing=[...] for entries that are new, skip=[...] for entries not wanted, "
        "rename={old: new} for other names, or strict=False to take what fits"
    )
    return StateMismatchError("\n".join(lines), problems=tuple(everything))


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str | None:
    """Find one prefix that, put before the names of one side, gives the names of the other."""
    if not missing or not unexpected:
        return None
    for fewer, more, have, want in (
        (missing, unexpected, "checkpoint", "rename={{'{item}{prefix}*': '{item}*'}}"),
        (unexpected, missing, "state", "rename={{'{item}*': '{item}{prefix}*'}}"),
    ):
        item, _, key = min(fewer).partition("/")
        for name in more:
            other_item, _, other = name.partition("/")
            if other_item == item and other.endswith(key) and len(other) > len(key):
                prefix = other[: len(other) - len(key)]
                prefixed = {f"{name.partition('/')[0]}/{prefix}{name.partition('/')[2]}" for name in fewer}
                # The prefix has to fit all names: one pair of names may end alike by chance.
                items = {name.partition("/")[0] for name in fewer}
                rest = [name.partition("/")[2] for name in more if name.partition("/")[0] in items]
                if prefixed <= set(more) and all(tail.startswith(prefix) for tail in rest):
                    advice = want.format(item=item + "/", prefix=prefix)
                    return f"names in the {have} carry the prefix {prefix!r}: pass {advice}"
    return None


class KeptMemory(WrappedStorage):
    """A storage, rooted at a checkpoint, whose files come where they can from memory that the life before has left.

    `holdfast run` holds the arenas of a life that has died (`holdfast.run.life`). An arena is laid out as the files of
    a checkpoint, so a block of a file is looked for at its place there, and counts if its digests are those of the
    checkpoint that is loaded: an arena may hold an older save, or the beginning of a newer one. What is not there is
    read as ever. A context manager.

    Args:
        storage: rooted at the checkpoint.
        manifest: of that checkpoint.
        digests: tables of its files.
        arenas: what `holdfast.run.life.kept_arenas` has found.

    Attributes:
        nbytes: bytes that came from memory so far.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, digests: Digests, arenas: Iterable[Mapping[str, Any]]
    ) -> None:
        super().__init__(storage)
        self._digests = digests
        self._sizes = {entry.path: entry.size for entry in manifest.files}
        self.nbytes = 0
        self._fds: list[int] = []
        self._places: dict[tuple[str, str], list[tuple[int, int]]] = {}  # by the name of a file around the save's id
        for arena in arenas:
            try:
                fd = os.open(arena["path"], os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # the supervisor has ended meanwhile, or a sandbox hides /proc
                continue
            self._fds.append(fd)
            for stem, suffix, at in arena["files"]:
                self._places.setdefault((stem, suffix), []).append((fd, at))

    def open(self, path: str) -> FileReader:
        """Open a file for reading."""
        save_id = save_id_of(path)
        stem, _, suffix = path.partition(f"-{save_id}") if save_id else (path, "", "")
        places = self._places.get((stem, suffix))
        return self.below.open(path) if not places else _KeptFile(self, path, places)

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class _KeptFile(CheckingReader):
    """One file: each block from the first arena that has it, else from the storage, which is opened then."""

    ahead_bytes = 0  # the storage is to fetch nothing before it is asked for

    def __init__(self, kept: KeptMemory, path: str, places: Sequence[tuple[int, int]]) -> None:
        self._kept, self._path, self._digests = kept, path, kept._digests
        self._places = dict.fromkeys(places, 0)  # with their misses in a row
        self.size = kept._sizes.get(path, 0)
        self._reader: FileReader | None = None

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `FileReader.read_into`."""
        self.read_checked(offset, view)

    def read_checked(self, offset: int, view: memoryview) -> bool:
        """See `CheckingReader.read_checked`."""
        for place, misses in self._places.items():
            if misses >= _MISSES:
                continue
            fd, at = place
            read = os.preadv(fd, [view], at + offset)  # not mapped: it may be cut to nothing while it is read
            if read == len(view) and self._digests.fit(self._path, offset // CHUNK, view):
                self._places[place] = 0
                self._kept.nbytes += read
                return True
            self._places[place] = misses + 1
        self._opened().read_into(offset, view)
        return False

    def _opened(self) -> FileReader:
        if self._reader is None:
            self._reader = self._kept.below.open(self._path)
        return self._reader

    def close(self) -> None:
        """See `FileReader.close`."""
        if self._reader is not None:
            self._reader.close()


@dataclass(slots=True)
class PutBack:
    """The result of `put_back`.

    Attributes:
        restored: paths of values that are back; a container of plain data is one value.
        lost: (path, why) of values that could not be assigned.
    """

    restored: list[str] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)


def put_back(live: Mapping[Any, Any], loaded: Mapping[Any, Any], *, takes: Callable[[str], bool]) -> PutBack:
    """Put the plain values of ``loaded``, the result of `load_state` for ``live``, into ``live``.

    Args:
        live: the mapping that was loaded into; its tensors and objects are restored already.
        loaded: nested like ``live``; restored objects in it are the live ones.
        takes: tells whether the value at a path was to be loaded.
    """
    done = PutBack()
    _assign(live, loaded, "", takes, done)
    return done


def set_attributes(live: Any, loaded: Any, path: str = "") -> list[tuple[str, str]]:
    """Set the attributes that `attrs` values of ``live`` name; returns (path, why) of those that cannot be set.

    All else of ``loaded`` is for the caller.
    """
    if isinstance(live, PerRank) and isinstance(loaded, PerRank):
        live, loaded = live.value, loaded.value
    if not (isinstance(live, Mapping) and isinstance(loaded, Mapping)):
        return []
    if isinstance(live, Attrs):
        done = PutBack()
        _assign(live, loaded, path, lambda _: True, done)
        return done.lost
    lost = []
    for key, value in loaded.items():
        if not isinstance(value, torch.Tensor) and isinstance(value, (Mapping, PerRank)) and key in live:
            lost += set_attributes(live[key], value, f"{path}/{key}" if path else str(key))
    return lost


def _assign(
    live: Mapping[Any, Any], loaded: Mapping[Any, Any], path: str, takes: Callable[[str], bool], done: PutBack
) -> None:
    """Assign loaded values in a mapping that holds more than plain data."""
    for key, value in loaded.items():
        where = f"{path}/{key}" if path else str(key)
        before = live.get(key, _MISSING)
        if _is_mixed(before) and isinstance(value, Mapping):
            _assign(before, value, where, takes, done)
            if live.get(key) is not before and (why := _put(live, key, before)) is not None:
                done.lost.append((where, why))
            continue
        if not takes(where) or (before is value and holds_live([before])):
            continue  # left alone, or restored in place
        new = value if before is _MISSING else _renewed(before, value)
        # What was filled in place may be a copy that a property gave (the state of NumPy's bit generators): then it is
        # assigned as well.
        why = None if new is before and live.get(key) is before else _put(live, key, new)
        if why is None:
            done.restored.append(where)
        else:
            done.lost.append((where, why))


_MISSING = object()


def _is_mixed(value: Any) -> bool:
    return isinstance(value, Attrs) or (isinstance(value, Mapping) and holds_live(value.values()))


def _put(live: Mapping[Any, Any], key: Any, value: Any) -> str | None:
    """Assign a value; returns the reason if that fails."""
    if not isinstance(live, MutableMapping):
        return f"a {type(live).__name__} cannot be changed: give the state as a dict"
    try:
        live[key] = value
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"cannot be assigned: {type(error).__name__}: {error}"
    return None


def _renewed(live: Any, loaded: Any) -> Any:
    """Return the replacement of ``live``: the same object with the loaded content if possible, else ``loaded``."""
    if live is loaded:
        return live
    if isinstance(live, PerRank) and isinstance(loaded, PerRank):
        live.value = _renewed(live.value, loaded.value)
        return live
    if isinstance(live, MutableMapping) and isinstance(loaded, Mapping):
        items = {key: _renewed(live[key], value) if key in live else value for key, value in loaded.items()}
        if not _is_mixed(live):
            live.clear()
        live.update(items)
        return live
    if type(live) is type(loaded) is list:
        live[:] = _entries(live, loaded)
        return live
    if type(live) is type(loaded) is deque:  # a script that gives it another length means that
        entries = _entries(live, loaded)
        live.clear()
        live.extend(entries)
        return live
    if type(live) is type(loaded) is set:
        live.clear()
        live.update(loaded)
        return live
    if isinstance(live, tuple) and _is_same_named_tuple(type(live), type(loaded)):
        return type(live)._make(_entries(live, loaded))  # type: ignore[attr-defined]
    return loaded


def _is_same_named_tuple(live: type, loaded: type) -> bool:
    """Tell whether a loaded named tuple, whose type was made of stored names, stands for one of the script's type."""
    fields = getattr(live, "_fields", None)
    return fields is not None and live.__name__ == loaded.__name__ and fields == getattr(loaded, "_fields", None)


def _entries(live: Any, loaded: Any) -> list[Any]:
    """Return the loaded entries; for a container the live container, with the loaded content."""
    both = min(len(live), len(loaded))
    renewed = [_renewed(live[number], loaded[number]) for number in range(both)]
    return [*renewed, *list(loaded)[both:]]
