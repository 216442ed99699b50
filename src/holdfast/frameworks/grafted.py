"""Classes whose base class is chosen when an object is made.

A framework may be installed under two names (`lightning` and `pytorch_lightning`), with classes of its own under each,
and checks `isinstance`. What the user has imported by then is what he uses.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from holdfast._optional import require

__all__ = ["Grafted"]

_made: dict[tuple[type, tuple[type, ...]], type] = {}


class Grafted:
    """An object of this class is an instance of the framework's class as well.

    Attributes:
        BASES: "module:class" for each name the framework has, the preferred first. Those whose top module is imported
            are used; the first that is installed, if none is.
        EXTRA: extra of Holdfast that brings the framework.
        ALONE: take the first of them only: classes that call each other's methods with ``super()`` do not mix.
    """

    BASES: ClassVar[Sequence[str]] = ()
    EXTRA: ClassVar[str] = ""
    ALONE: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of a class that has the framework's among its bases."""
        return object.__new__(_grafted(cls))

    def __reduce__(self) -> Any:
        return _again, (_origin(type(self)), self.__dict__)

    def graft_onto(self, names: Sequence[str] | None = None) -> None:
        """Make this object an instance of other classes from now on, subclasses of `BASES`; None: of `BASES` again."""
        self.__class__ = _grafted(_origin(type(self)), names)


def _origin(made: type) -> type:
    return next(cls for cls in made.__mro__ if "_grafted_onto" not in vars(cls))


def _grafted(cls: type[Grafted], names: Sequence[str] | None = None) -> type:
    if hasattr(cls, "_grafted_onto"):
        return cls
    bases = tuple(_bases(cls, names or cls.BASES))
    key = (cls, bases)
    if key not in _made:
        about = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _made[key] = type(cls.__name__, (cls, *bases), {**about, "_grafted_onto": bases})
    return _made[key]


def _bases(cls: type[Grafted], names: Sequence[str]) -> list[type]:
    here = [base for base in names if _package(base) in sys.modules]
    if not here:
        here = [base for base in names if importlib.util.find_spec(_package(base))][:1] or list(names[:1])
    found = []
    for base in here[:1] if cls.ALONE else here:
        module, _, name = base.partition(":")
        found.append(getattr(require(module, extra=cls.EXTRA, purpose=f"{cls.__module__}.{cls.__qualname__}"), name))
    return found


def _package(base: str) -> str:
    return base.partition(":")[0].partition(".")[0]


def _again(cls: type[Grafted], state: dict[str, Any]) -> Any:
    made: Any = object.__new__(_grafted(cls))
    made.__dict__.update(state)
    return made
