"""Load a checkpoint: plan everything, refuse what does not fit, then read, then hand objects their state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigError, StateMismatchError
from ..format.strict_json import paused_gc
from ..storage.base import Storage
from .digests import Digests
from .fill import fill
from .match import Matcher, Problems
from .reader import ReadRequest, read_tensors
from .selection import Selection
from .shared_reads import Swap, no_part, reading_together
from .stored import Stored, open_stored
from .targets import Targets
from .values import ObjectNode, PerRankNode, TensorRef

__all__ = ["Loaded", "load_state", "paths", "select"]

_SHOWN = 200  # offenders spelled out in a message before the rest is counted


@dataclass(slots=True)
class Loaded:
    """What a load brought back.

    Attributes:
        state: the loaded state.
        restored: paths that were restored.
        not_restored: (path, why) of what was not.
        bytes_read: bytes read from the storage.
        notes: what is not simply as it was saved, because another number of ranks loads; a sentence each.
    """

    state: Any
    restored: list[str] = field(default_factory=list)
    not_restored: list[tuple[str, str]] = field(default_factory=list)
    bytes_read: int = 0
    notes: list[str] = field(default_factory=list)


@paused_gc()
def load_state(
    storage: Storage | Stored,
    into: Mapping[Any, Any] | None = None,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    strict: bool = True,
    lenient: Iterable[str] = (),
    allow_missing: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    map_location: torch.device | str | None = None,
    verify: bool = True,
    rank: int = 0,
    world_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    swap: Swap | None = None,
) -> Loaded:
    """Load the checkpoint at the root of ``storage``, or an opened one. See `holdfast.load` for the arguments.

    ``lenient`` names (or globs) what need not fit: the rest is checked as ever, and what does not fit is listed as not
    restored. With ``world_size``, the number of ranks that load, generators and values of single ranks follow the rules
    for another number of ranks than have saved. With ``swap`` all ranks load together, and those of one machine
    read what several of them need once.

    Raises:
        StateMismatchError: ``into`` and the checkpoint do not fit; nothing was changed.
        CorruptCheckpointError: bytes differ from their digests.
    """
    selection = Selection(only, skip, rename)
    allowed = (allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing)
    device = None if map_location is None else torch.device(map_location)
    try:
        stored = _opened(storage, rank, world_size, own_first=into is not None)
        selection.check(paths(stored))
        if into is None:
            tree, requests = _plan_fresh(stored, selection, dtype, device)
            matcher = None
        else:
            matcher = Matcher(stored, selection, allow_missing=allowed, cast=dtype, rank=rank, device=device)
            state, requests = matcher.run(into), matcher.targets.requests
            if strict and (refused := matcher.problems.without(tuple(lenient))):
                raise _mismatch(refused, stored.storage.uri)
        digests = stored.digests_of({one.file for one in requests}) if verify else None
    except Exception:
        if swap is not None:
            no_part(swap)
        raise
    with torch.no_grad():
        read = _read(stored, requests, digests, swap, progress=progress)
        if matcher is None:
            return Loaded(fill(tree, stored.per_rank), bytes_read=read)
        for action in matcher.actions:
            action()
        state = matcher.filled(state)
        for action in matcher.last:
            action()
    for kind in ("missing", "unexpected", "wrong"):
        matcher.not_restored.extend((entry, kind) for entry in getattr(matcher.problems, kind))
    return Loaded(state, matcher.restored, matcher.not_restored, read, matcher.notes)


def _opened(storage: Storage | Stored, rank: int, world_size: int | None, *, own_first: bool) -> Stored:
    if isinstance(storage, Stored):
        return storage
    return open_stored(storage, rank=rank, world_size=world_size, own_first=own_first)


def _read(
    stored: Stored,
    requests: Sequence[ReadRequest],
    digests: Digests | None,
    swap: Swap | None,
    *,
    progress: Callable[[int], None] | None,
) -> int:
    """Read, alone or together with other ranks; returns the bytes that this one has read."""
    if swap is None:
        return read_tensors(stored.storage, requests, digests, progress=progress)
    with reading_together(stored.storage, stored.manifest, requests, digests, swap) as shared:
        read = read_tensors(stored.storage, requests, digests, progress=progress, shared=shared)
    return read + (0 if shared is None else shared.bytes_read)


def _plan_fresh(
    stored: Stored, selection: Selection, dtype: torch.dtype | None, device: torch.device | None
) -> tuple[Any, list[ReadRequest]]:
    """Plan a load without a live state: everything selected comes back as nested dicts with new tensors."""
    tree = stored.tree if selection.everything else select(stored.tree, "", selection)
    targets = Targets(stored)
    by_tensor: dict[str, torch.Tensor] = {}
    for ref in _live_refs(tree, stored):
        original = stored.aliases.get(ref.name, ref.name)
        if original not in by_tensor:
            entry = stored.entry(ref.name)
            own = targets.dtype(entry.dtype)
            cast = dtype if dtype is not None and own.is_floating_point and ref.kind != "array" else own
            home = torch.device("cpu") if ref.kind == "array" or device is None else device
            by_tensor[original] = torch.empty(entry.shape, dtype=cast, device=home)
            targets.append(original, by_tensor[original])
        ref.value = by_tensor[original]
    return tree, targets.requests


def select(value: Any, path: str, selection: Selection) -> Any:
    """Leave out what is not wanted and rename what is; containers stay where anything in them is wanted."""
    if isinstance(value, ObjectNode):
        state = select(value.state, path, selection)
        return value if state is value.state else ObjectNode(value.type, value.kind, state)
    if not isinstance(value, dict):
        return value
    kept = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
    for key, item in value.items():
        where = f"{path}/{key}" if path else str(key)
        content = item.state if isinstance(item, ObjectNode) else item
        if isinstance(content, dict) and content:
            inner = select(item, where, selection)
            if inner.state if isinstance(inner, ObjectNode) else inner:
                kept[_new_key(path, where, key, selection)] = inner
        elif selection.takes(where):
            kept[_new_key(path, where, key, selection)] = item
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
    """Yield the path of everything in the checkpoint: containers, plain data, tensors."""
    yield from stored.refs

    def walk(value: Any, path: str) -> Iterator[str]:
        if path:
            yield path
        value = value.state if isinstance(value, ObjectNode) else value
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{path}/{key}" if path else str(key))

    yield from walk(stored.tree, "")


def _live_refs(tree: Any, stored: Stored) -> list[TensorRef]:
    found: list[TensorRef] = []

    def walk(value: Any) -> None:
        if isinstance(value, TensorRef):
            found.append(value)
        elif isinstance(value, ObjectNode):
            walk(value.state)
        elif isinstance(value, PerRankNode):
            stored.say_borrowed()
            walk((stored.per_rank or {}).get(value.key))
        elif isinstance(value, Mapping):
            for item in value.values():
                if not isinstance(item, (int, float, str)):
                    walk(item)
        elif not isinstance(value, (str, bytes)) and hasattr(value, "__iter__") and not isinstance(value, torch.Size):
            for item in value:
                if not isinstance(item, (int, float, str)):
                    walk(item)

    walk(tree)
    return found


def _mismatch(problems: Problems, where: str) -> StateMismatchError:
    lines = [f"the checkpoint {where} does not fit the state; nothing was changed."]
    everything: list[str] = []
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
    lines.append(
        "  what to do: allow_missing=[...] for entries that are new, skip=[...] for ones not wanted, "
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
                prefixed = {f"{one.partition('/')[0]}/{prefix}{one.partition('/')[2]}" for one in fewer}
                if prefixed <= set(more):
                    advice = want.format(item=item + "/", prefix=prefix)
                    return f"names in the {have} carry the prefix {prefix!r}: pass {advice}"
    return None
