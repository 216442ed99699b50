"""Put the plain data of a loaded state back into the live mapping it belongs to.

`load_state` restores tensors, arrays and objects in place and returns everything else. The mapping of a run holds its
state, so the rest goes back there: containers keep their identity (other references to a list see the loaded values),
other values are assigned under their name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from ..tree.values import Attrs, PerRank
from .match import holds_live

__all__ = ["PutBack", "put_back", "set_attributes"]


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
    if not (isinstance(live, Mapping) and isinstance(loaded, Mapping)):
        return []
    if isinstance(live, Attrs):
        done = PutBack()
        _assign(live, loaded, path, lambda _: True, done)
        return done.lost
    lost = []
    for key in loaded.keys() & live.keys():
        lost += set_attributes(live[key], loaded[key], f"{path}/{key}" if path else str(key))
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
    if type(live) is type(loaded) is deque and live.maxlen == loaded.maxlen:
        entries = _entries(live, loaded)
        live.clear()
        live.extend(entries)
        return live
    if type(live) is type(loaded) is set:
        live.clear()
        live.update(loaded)
        return live
    return loaded


def _entries(live: Any, loaded: Any) -> list[Any]:
    """Return the loaded entries; for a container the live container, with the loaded content."""
    both = min(len(live), len(loaded))
    renewed = [_renewed(live[number], loaded[number]) for number in range(both)]
    return [*renewed, *list(loaded)[both:]]
