"""Every state of the disk that a power cut may leave, built from a recorded log of operations.

The model, in the manner of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018), promises only
what POSIX promises:

* bytes and length of a file survive from the fsync of that file on, direct writes included;
* a change of a directory (create, link, rename, unlink, mkdir, rmdir) survives from the fsync of that directory on;
* both survive from a syncfs of the file system on;
* later operations may have happened or not, in any combination: a rename may be there without the bytes it was meant
  to publish, the second of two files without the first. A rename happens as a whole or not at all.

So a state is: a number of operations done when the power went, a choice among the changes of directories not yet
durable, and for each file with bytes not yet durable one of `_VARIANTS`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ConfigError

from .faults import Operation

_ALL_SUBSETS_UP_TO = 5
_RANDOM_CHOICES = 16
_AT_LEAST = 3  # states of each moment that is looked at: everything arrived, nothing did, one in between


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A durable tree of files; paths are relative to ``root``, "" is the root itself.

    Attributes:
        root: absolute directory.
        names: path -> identity; two names of the same file share it.
        contents: identity -> bytes, None for a directory.
    """

    root: str
    names: dict[str, int]
    contents: dict[int, bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCutState:
    """The content of the disk when the machine comes back.

    Attributes:
        files: relative path -> content.
        directories: relative paths, parents first.
        num_done: operations that had been done, durably or not, when the power went.
        marks: labels of `FaultyOps.mark` that had been passed: the promises this state must keep.
        complete: whether the whole log had been done.
    """

    files: dict[str, bytes]
    directories: tuple[str, ...]
    num_done: int
    marks: tuple[str, ...]
    complete: bool

    def materialise(self, target: str | os.PathLike[str]) -> Path:
        """Write the state into the directory ``target``, which is made and must be empty; return it."""
        root = Path(target)
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise ConfigError(f"{root} is not empty: give each state a directory of its own")
        for path in self.directories:
            (root / path).mkdir()
        for path, data in self.files.items():
            (root / path).write_bytes(data)
        return root


def snapshot(root: str | os.PathLike[str]) -> Snapshot:
    """Read the tree below ``root`` as the durable beginning of a log; take it before the recording starts.

    Without symbolic links: no promise rests on one, and they are not made by operations that are recorded.
    """
    top = os.path.abspath(os.fspath(root))
    names, contents = {"": 0}, dict[int, "bytes | None"]({0: None})
    identities: dict[int, int] = {}
    for directory, subdirectories, files in os.walk(top):
        for name in [*subdirectories, *files]:
            full = os.path.join(directory, name)
            if os.path.islink(full):
                continue
            inode = os.stat(full).st_ino
            identity = identities.setdefault(inode, len(identities) + 1)
            names[os.path.relpath(full, top)] = identity
            contents[identity] = None if name in subdirectories else Path(full).read_bytes()
    return Snapshot(root=top, names=names, contents=contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """An operation with names resolved to identities.

    ``changes`` are (directory, name, new identity or None); ``data`` at ``offset`` is written to the file
    ``wrote``; ``synced`` is the file or directory made durable, ``synced_all`` says that all are.
    """

    changes: tuple[tuple[int, str, int | None], ...] = ()
    wrote: int | None = None
    offset: int = 0
    data: bytes | None = None  # None: the length is set to `offset`
    synced: int | None = None
    synced_all: bool = False
    mark: str | None = None


class _LiveTree:
    """The tree as the running program sees it: resolves the paths of the log to identities."""

    def __init__(self, base: Snapshot) -> None:
        self._root = base.root
        self.entries: dict[int, dict[str, int]] = {i: {} for i, data in base.contents.items() if data is None}
        for path, identity in base.names.items():
            if path:
                parent, name = os.path.split(path)
                self.entries[base.names[parent]][name] = identity
        self.start = {directory: dict(names) for directory, names in self.entries.items()}
        self._handles: dict[int, int] = {}
        self._next = itertools.count(max(base.contents) + 1)

    def event(self, operation: Operation) -> _Event:
        """Resolve an operation and apply it."""
        name = operation.name
        if name == "mark":
            return _Event(mark=operation.target)
        if name == "open":
            parent, last = self._parent(operation.path)
            identity = next(self._next) if operation.created else self._find(operation.path)
            self._handles[operation.handle] = identity
            return self._change((parent, last, identity)) if operation.created else _Event()
        if name in ("pwrite", "ftruncate", "fsync"):
            identity = self._handles[operation.handle]
            if name == "fsync":
                return _Event(synced=identity)
            data = operation.data if name == "pwrite" else None
            return _Event(wrote=identity, offset=operation.offset if data is not None else operation.size, data=data)
        if name == "syncfs":
            return _Event(synced_all=True)
        if name == "fsync_dir":
            inside = operation.path == self._root or operation.path.startswith(self._root + os.sep)
            return _Event(synced=self._find(operation.path)) if inside else _Event()
        parent, last = self._parent(operation.path)
        if name == "mkdir":
            identity = next(self._next)
            self.entries[identity], self.start[identity] = {}, {}
            return self._change((parent, last, identity))
        if name in ("rename", "link"):
            new = (*self._parent(operation.target), self._find(operation.path))
            return self._change((parent, last, None), new) if name == "rename" else self._change(new)
        return self._change((parent, last, None))  # unlink, rmdir

    def _change(self, *changes: tuple[int, str, int | None]) -> _Event:
        _apply(self.entries, changes)
        return _Event(changes=changes)

    def _parent(self, path: str) -> tuple[int, str]:
        directory, name = os.path.split(path)
        return self._find(directory), name

    def _find(self, path: str) -> int:
        relative = os.path.relpath(path, self._root)
        identity = 0
        for part in () if relative == "." else relative.split(os.sep):
            child = self.entries.get(identity, {}).get(part)
            if child is None:
                raise ConfigError(
                    f"power cut model: {path} is not known below {self._root}; take the snapshot of a directory that "
                    "holds everything, before recording, and change nothing except through the recorded operations"
                )
            identity = child
        return identity


def _apply(entries: dict[int, dict[str, int]], changes: Iterable[tuple[int, str, int | None]]) -> None:
    for directory, name, identity in changes:
        if identity is None:
            entries[directory].pop(name, None)
        else:
            entries[directory][name] = identity


def _write(data: bytes, event: _Event) -> bytes:
    if event.data is None:
        return data[: event.offset].ljust(event.offset, b"\0")
    return data[: event.offset].ljust(event.offset, b"\0") + event.data + data[event.offset + len(event.data) :]


def _all(data: bytes, pending: Sequence[_Event]) -> bytes:
    for event in pending:
        data = _write(data, event)
    return data


def _lost(data: bytes, pending: Sequence[_Event]) -> bytes:
    return data


def _half(data: bytes, pending: Sequence[_Event]) -> bytes:
    """The first half of the bytes arrived; the write in the middle is torn."""
    room = sum(len(event.data or b"") for event in pending) // 2
    for event in pending:
        if event.data is None or room <= 0:
            break
        data = _write(data, _Event(wrote=event.wrote, offset=event.offset, data=event.data[:room]))
        room -= len(event.data)
    return data


def _zeros(data: bytes, pending: Sequence[_Event]) -> bytes:
    """The length arrived, the bytes did not (delayed allocation)."""
    blank = [
        _Event(wrote=e.wrote, offset=e.offset, data=None if e.data is None else bytes(len(e.data))) for e in pending
    ]
    return _all(data, blank)


def _last(data: bytes, pending: Sequence[_Event]) -> bytes:
    """The last write arrived before the earlier ones."""
    writes = [event for event in pending if event.data is not None]
    return _all(_zeros(data, pending), writes[-1:])[: len(_all(data, pending))]


_VARIANTS: tuple[Callable[[bytes, Sequence[_Event]], bytes], ...] = (_all, _lost, _half, _zeros, _last)


def power_cut_states(
    log: Sequence[Operation], base: Snapshot, *, max_states: int | None = None, seed: int = 0
) -> Iterator[PowerCutState]:
    """Iterate over the different states a power cut during or after ``log`` may leave.

    All combinations are built where few changes are pending at once, and a seeded choice of them (always with the
    extremes) where they are many.

    Args:
        log: of `FaultyOps` with ``record=True``.
        base: `snapshot` of a directory that holds all paths of the log, taken before the first of them.
        max_states: about how many states at most, spread evenly over the log: three or more of each moment, of fewer
            moments where the log is long.
        seed: of the choice.

    Example:
        >>> import tempfile
        >>> from holdfast.testing import FaultyOps, FaultyStorage
        >>> root = tempfile.mkdtemp()
        >>> before, ops = snapshot(root), FaultyOps(record=True)
        >>> tag = FaultyStorage(root, ops=ops).put("a", b"12")
        >>> sorted({state.files.get("a", b"none") for state in power_cut_states(ops.log, before)})
        [b'12', b'none']
    """
    tree = _LiveTree(base)
    events = [tree.event(operation) for operation in log]
    chance = random.Random(seed)
    moments, budget = list(range(len(events) + 1)), None
    if max_states is not None:
        budget = max(_AT_LEAST, max_states // len(moments))
        last = max(1, max_states // budget - 1)  # evenly spaced, with the first and the last one
        if last < len(events):
            moments = [round(number * len(events) / last) for number in range(last + 1)]
    seen: set[tuple[bytes, tuple[str, ...], bool]] = set()
    for num_events in moments:
        done = events[:num_events]
        num_done = sum(event.mark is None for event in done)
        marks = tuple(event.mark for event in done if event.mark is not None)
        complete = num_events == len(events)
        for files, directories in _states_after(done, tree.start, base.contents, chance, budget):
            # The same tree counts again after another mark: it may have kept the earlier promises only.
            key = (_fingerprint(files, directories), marks, complete)
            if key not in seen:
                seen.add(key)
                yield PowerCutState(
                    files=files, directories=directories, num_done=num_done, marks=marks, complete=complete
                )


def _states_after(
    done: Sequence[_Event],
    start: dict[int, dict[str, int]],
    contents: dict[int, bytes | None],
    chance: random.Random,
    budget: int | None,
) -> Iterator[tuple[dict[str, bytes], tuple[str, ...]]]:
    """Iterate over the trees that may be found when exactly ``done`` had been done."""
    last_sync = {event.synced: position for position, event in enumerate(done) if event.synced is not None}
    last_of_all = max((position for position, event in enumerate(done) if event.synced_all), default=-1)

    def synced(identity: int) -> int:
        return max(last_sync.get(identity, -1), last_of_all)

    pending = [
        position
        for position, event in enumerate(done)
        if event.changes and all(synced(directory) < position for directory, _, _ in event.changes)
    ]
    durable: dict[int, bytes] = {identity: data for identity, data in contents.items() if data is not None}
    dirty: dict[int, list[_Event]] = {}
    for position, event in enumerate(done):
        if event.wrote is not None:
            if synced(event.wrote) > position:
                durable[event.wrote] = _write(durable.get(event.wrote, b""), event)
            else:
                dirty.setdefault(event.wrote, []).append(event)
    choices = list(itertools.product(_subsets(pending, chance), _assignments(sorted(dirty), chance)))
    if budget is not None and len(choices) > budget:
        # The first and the last are the extremes: everything arrived, nothing did.
        choices = [choices[0], choices[-1], *chance.sample(choices[1:-1], max(0, budget - 2))][:budget]
    for dropped, variants in choices:
        entries = {directory: dict(names) for directory, names in start.items()}
        for position, event in enumerate(done):
            if position not in dropped:
                _apply(entries, event.changes)
        data = dict(durable)
        for identity, variant in variants.items():
            data[identity] = variant(durable.get(identity, b""), dirty[identity])
        yield _reachable(entries, data)


def _subsets(pending: Sequence[int], chance: random.Random) -> list[frozenset[int]]:
    """Choose which pending changes are dropped: none first, all of them last."""
    if len(pending) <= _ALL_SUBSETS_UP_TO:
        return [frozenset(s) for n in range(len(pending) + 1) for s in itertools.combinations(pending, n)]
    chosen = [frozenset({position}) for position in pending]
    chosen += [frozenset(pending) - {position} for position in pending]
    chosen += [frozenset(pending[cut:]) for cut in range(1, len(pending))]
    chosen += [frozenset(p for p in pending if chance.random() < 0.5) for _ in range(_RANDOM_CHOICES)]
    return [frozenset(), *dict.fromkeys(chosen), frozenset(pending)]


def _assignments(
    dirty: Sequence[int], chance: random.Random
) -> list[dict[int, Callable[[bytes, Sequence[_Event]], bytes]]]:
    """Choose a variant for each file with bytes not yet durable: the same for all, and mixtures."""
    if not dirty:
        return [{}]
    same = [dict.fromkeys(dirty, variant) for variant in (*(v for v in _VARIANTS if v is not _lost), _lost)]
    mixed = [
        {file: chance.choice(_VARIANTS) for file in dirty} for _ in range(_RANDOM_CHOICES if len(dirty) > 1 else 0)
    ]
    return [same[0], *mixed, *same[1:]]


def _reachable(entries: dict[int, dict[str, int]], data: dict[int, bytes]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return files and directories that can be reached from the root; the rest is lost."""
    files: dict[str, bytes] = {}
    directories: list[str] = []
    waiting = [("", 0)]
    while waiting:
        prefix, directory = waiting.pop()
        for name, identity in sorted(entries[directory].items()):
            path = prefix + name
            if identity in entries:
                directories.append(path)
                waiting.append((f"{path}/", identity))
            else:
                files[path] = data.get(identity, b"")
    return files, tuple(directories)


def _fingerprint(files: dict[str, bytes], directories: tuple[str, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directories):
        digest.update(b"d" + os.fsencode(path) + b"\0")
    for path in sorted(files):
        digest.update(b"f" + os.fsencode(path) + b"\0" + len(files[path]).to_bytes(8, "big"))
        digest.update(hashlib.blake2b(files[path], digest_size=16).digest())
    return digest.digest()
