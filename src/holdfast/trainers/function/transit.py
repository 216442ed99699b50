"""Functions and their arguments on the way to workers, by cloudpickle. Nothing of it is stored."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle

from holdfast._log import get_logger
from holdfast.errors import ConfigError

__all__ = ["pack_call", "pack_result", "pack_value", "takes_config", "unpack_call", "unpack_result"]

_LOG = get_logger("trainers.function")


def takes_config(function: Callable[..., Any]) -> bool:
    """Tell whether a train function wants the config: ``train_func(config)`` or ``train_func()``.

    Raises:
        ConfigError: it is not callable, or needs more than one argument.
    """
    if not callable(function):
        raise ConfigError(f"train_func is {function!r}: give a function that takes nothing or one config")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins and C functions have no signature
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    only_by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(needed) > 1 or only_by_name:
        raise ConfigError(
            f"train_func needs the arguments {', '.join(needed)}: it is called with one config or with nothing; "
            "bind the others with functools.partial or put them into train_loop_config"
        )
    return bool(places)


def pack_call(function: Callable[..., Any], config: Any = None) -> bytes:
    """Pickle a train function with its config for the way to the workers.

    Raises:
        ConfigError: a part cannot be pickled; the message names it.
    """
    _by_value_if_not_importable(function)
    try:
        return _dumps((function, config))
    except Exception as error:  # noqa: BLE001 - pickling runs code of any kind; what is wrong is found out below
        failure = error
    for name, value in (("train_func", function), ("train_loop_config", config)):
        pack_value(value, name)
    raise ConfigError(f"train_func and its config cannot be pickled together: {failure}") from failure


def pack_value(value: Any, name: str) -> bytes:
    """Pickle a value.

    Raises:
        ConfigError: it cannot be pickled; the message names it and, in a mapping or function, the part.
    """
    try:
        return _dumps(value)
    except Exception as error:
        path, culprit = _culprit(value, name)
        raise ConfigError(
            f"{path} ({type(culprit).__qualname__}) cannot be sent to the workers: {_line(error)}. "
            "Everything train_func uses travels by pickle: create such objects (locks, files, connections, generators) "
            "inside train_func"
        ) from error


def unpack_call(data: bytes) -> tuple[Callable[..., Any], Any]:
    """Rebuild what `pack_call` packed; what came by value from the driver's ``__main__`` is put into ours.

    So that plain pickle (`torch.save` of a whole module, a spawned loader process) finds the script's classes by name.
    """
    function, config = cloudpickle.loads(data)
    names = getattr(inspect.unwrap(function), "__globals__", {})
    if names.get("__name__") == "__main__":
        main = vars(sys.modules["__main__"])
        main.update({name: value for name, value in names.items() if not name.startswith("__")})
    return function, config


def pack_result(value: Any) -> bytes | None:
    """Pickle what train_func returned; None for nothing, or for what cannot be pickled, which is said.

    The training is done by then: no value is worth failing it.
    """
    if value is None:
        return None
    try:
        return _dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling runs code of any kind
        _LOG.warning(
            "train_func returned a %s that cannot be sent to the driver (%s): Result.return_value is None; return "
            "plain data, or report it", type(value).__qualname__, _line(error),
        )  # fmt: skip
        return None


def unpack_result(data: bytes | None) -> Any:
    """Rebuild what `pack_result` packed; None for what makes no sense in this process, which is said."""
    if not data:
        return None
    try:
        return pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - a class may exist in the worker only
        _LOG.warning("what train_func returned cannot be read here (%s): Result.return_value is None", _line(error))
        return None


class _TransitPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle sends along what a function may mean by ``torch`` and ``.ops``: ``torch.ops``, no plain module.

    A checkpoint in the memory of this process travels with its files.
    """

    def reducer_override(self, obj: Any) -> Any:
        handle = sys.modules.get("holdfast.checkpoint.handle")  # what is not loaded has made no checkpoint
        if handle is not None and type(obj) is handle.Checkpoint and obj.storage.describe() is None:
            return _reduce_checkpoint(obj)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _reduce_checkpoint(checkpoint: Any) -> tuple[Any, ...]:
    from .values import pack_checkpoint, unpack_checkpoint

    if not checkpoint.uri.startswith("memory://"):
        raise ConfigError(f"{checkpoint.uri} is in a file system that only this process knows; copy it to a directory")
    return unpack_checkpoint, (pack_checkpoint(checkpoint),)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _TransitPickler(file).dump(value)
    return file.getvalue()


def _by_value_if_not_importable(function: Callable[..., Any]) -> None:
    """Send a module by value that workers could not import, such as those made with `runpy` or in a notebook."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if not isinstance(module, ModuleType) or module.__name__ == "__main__":
        return
    # Asked past sys.modules, where it is in this process however it came there.
    top = module.__name__.partition(".")[0]
    importable = any(finder.find_spec(top, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    if not importable and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(module)


def _culprit(value: Any, path: str, depth: int = 4) -> tuple[str, Any]:
    """Walk to the smallest named part that does not pickle."""
    for name, part in _parts(value, path) if depth else ():
        try:
            _dumps(part)
        except Exception:  # noqa: BLE001 - the same failure again, one level down
            return _culprit(part, name, depth - 1)
    return path, value


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    if inspect.isfunction(value):
        try:
            used = inspect.getclosurevars(value)
        except ValueError:  # a variable of the closure that is not bound yet
            return []
        named = {**used.globals, **used.nonlocals}
        return [(f"{name!r}, used by {path}", item) for name, item in named.items() if not inspect.ismodule(item)]
    if hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        return [(f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return [(f"{path}.{name}", item) for name, item in vars(value).items()]
    return []


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
