"""What was meant by an argument that a function does not have.

Some are known from other libraries: what to do instead of each. Others are misspelt: Python says which argument was
meant from 3.13 on only, and for names alike only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from .errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def answering(name: str, advice: Mapping[str, str]) -> Callable[[_F], _F]:
    """Answer arguments of a function with what to do instead of them.

    Args:
        name: what messages call the function.
        advice: what to do, by argument.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            wrong = sorted(given.keys() & advice.keys())
            if wrong:
                several = len(wrong) > 1
                lines = "; ".join(
                    f"{argument}: {advice[argument]}" if several else advice[argument] for argument in wrong
                )
                raise ConfigError(f"{name} has no argument {' and '.join(wrong)}: {lines}")
            return function(*args, **given)

        return cast("_F", checked)

    return decorate


def removed(**advice: str) -> Callable[[type[_T]], type[_T]]:
    """Answer arguments of a class that others know (or knew) and we do not with what to do instead of them.

    Args:
        **advice: what to do, by argument.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        cls.__init__ = answering(cls.__name__, advice)(cls.__init__)  # type: ignore[method-assign]
        return cls

    return decorate


_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, None if none is alike."""
    from difflib import get_close_matches  # here and below: slow to import, and `import holdfast` needs them not

    found = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def suggests(*, also: Mapping[str, str] | None = None) -> Callable[[_F], _F]:
    """Make a function name the argument that was meant when it is called with an unknown one.

    Args:
        also: names that other libraries use -> the argument here.
    """
    import inspect

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
