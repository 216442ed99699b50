"""Answers to arguments that other trainers know and we do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from .errors import ConfigError

__all__ = ["answering"]

_F = TypeVar("_F", bound=Callable[..., Any])


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
                lines = "; ".join(f"{argument}: {advice[argument]}" for argument in wrong)
                raise ConfigError(f"{name} has no argument {' and '.join(wrong)}: {lines}")
            return function(*args, **given)

        return cast("_F", checked)

    return decorate
