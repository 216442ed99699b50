"""Named tuples that come back from a checkpoint: a type with the stored name and fields, made without ``eval``."""

from __future__ import annotations

from functools import lru_cache
from keyword import iskeyword
from operator import itemgetter
from typing import Any

__all__ = ["is_named_tuple", "named_tuple"]


def is_named_tuple(value: Any) -> bool:
    """Tell whether a value is a tuple with names for its items."""
    names = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and type(names) is tuple
        and type(value).__name__.isidentifier()
        and len(names) == len(value)
        and all(_is_field(name) for name in names)
    )


@lru_cache(maxsize=1024)
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return a named tuple type; equal arguments give the same type.

    ``collections.namedtuple`` compiles source text. Loading a checkpoint must not, however well that text is checked.

    Raises:
        ValueError: a name is not an identifier, or a field occurs twice.
    """
    if type(name) is not str or not name.isidentifier() or iskeyword(name):
        raise ValueError(f"{str(name)[:80]!r} is no name for a named tuple")
    if not all(_is_field(field) for field in fields) or len(set(fields)) != len(fields):
        raise ValueError(f"{str(fields)[:200]} are no names for the fields of a named tuple")
    body: dict[str, Any] = {field: property(itemgetter(number)) for number, field in enumerate(fields)}
    return type(name, (_Named,), {**body, "__slots__": (), "_fields": fields, "__match_args__": fields})


def _is_field(name: object) -> bool:
    # "_0" is what namedtuple(rename=True) gives; other names with an underscore could hide the methods below.
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        return False
    return not name.startswith("_") or name[1:].isdigit()


class _Named(tuple[Any, ...]):
    """What all these types share; behaves as ``collections.namedtuple`` types do."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()
    _field_defaults: dict[str, Any] = {}  # noqa: RUF012

    def __new__(cls, *args: Any, **kwargs: Any) -> _Named:
        if kwargs:
            missing = [name for name in cls._fields[len(args) :] if name not in kwargs]
            if missing or len(args) + len(kwargs) != len(cls._fields):
                raise TypeError(f"{cls.__name__} takes exactly {', '.join(cls._fields)}")
            args = (*args, *(kwargs[name] for name in cls._fields[len(args) :]))
        return cls._make(args)

    @classmethod
    def _make(cls, values: Any) -> _Named:
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"{cls.__name__} takes {len(cls._fields)} values, not {len(made)}")
        return made

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> _Named:
        if unknown := changes.keys() - set(self._fields):
            raise ValueError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        return self._make(changes.get(name, item) for name, item in zip(self._fields, self, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={item!r}' for name, item in self._asdict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The type belongs to no module, so copies and pickles make it again from its names.
        return _rebuild, (type(self).__name__, self._fields, tuple(self))


def _rebuild(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return named_tuple(name, fields)._make(values)
