"""Say which keyword argument was meant: on its own, Python does so from 3.13 on, and for names alike only.

In a file of its own since values (`config`) and front doors use it, and neither may import the other.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

__all__ = ["closest", "suggests", "suggests_fields"]

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, None if none is alike."""
    found = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def suggests(*, also: Mapping[str, str] | None = None) -> Callable[[_F], _F]:
    """Make a function name the argument that was meant when it is called with an unknown one.

    Args:
        also: names that other libraries use -> the argument here.
    """

    def decorate(function: _F) -> _F:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except TypeError as error:
                found = _UNEXPECTED.search(str(error))
                inside = error.__traceback__ is None or error.__traceback__.tb_next is not None
                if found is None or inside or found[1] in known:  # raised by the body, not by the call
                    raise
                meant = (also or {}).get(found[1]) or closest(found[1], known)
                said = f"did you mean {meant}=?" if meant else f"the arguments are {', '.join(known)}"
                message = re.sub(r"\. Did you mean .*", "", str(error))
            raise TypeError(f"{message}: {said}")

        return called  # type: ignore[return-value]

    return decorate


def suggests_fields(cls: type[_T]) -> type[_T]:
    """Let a dataclass name the field that was meant, as `suggests` does."""
    setattr(cls, "__init__", suggests()(cls.__init__))  # noqa: B010 - a plain assignment is refused by type checkers
    return cls
