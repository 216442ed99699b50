"""What travels between driver and workers, none of which is stored.

Functions and their arguments go by cloudpickle. An exception is what it says for people, and the object where it
pickles. A checkpoint or a run is {"storage": description or None, "uri": of the storage, "name": directory}.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import pickle
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import cloudpickle

from holdfast import errors
from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint, CommittedCheckpoint, DictStore
from holdfast.errors import ConfigError
from holdfast.format.names import MANIFEST_NAME
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import as_given
from holdfast.storage.memory import MemoryStorage
from holdfast.storage.resolve import from_description
from holdfast.writer.messages import error_from_json

_MAX_PICKLE = 8 << 20  # an exception that holds a model travels in words only

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


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return all files of a (small) checkpoint as bytes that `unpack_checkpoint` takes. In transit only."""
    prefix = f"{checkpoint.directory}/"
    storage = checkpoint.storage
    files = {info.path[len(prefix) :]: storage.read(info.path) for info in storage.list(checkpoint.directory)}
    return pickle.dumps(files, protocol=5)


def unpack_checkpoint(data: bytes) -> Checkpoint:
    """Rebuild in memory what `pack_checkpoint` packed; it lives as long as a handle refers to it."""
    files: dict[str, bytes] = pickle.loads(data)
    store = DictStore(secrets.token_hex(8))
    storage = MemoryStorage(store.uri.removeprefix("memory://"))
    for path in sorted(files, key=lambda path: path == MANIFEST_NAME):  # the manifest last, as every commit
        storage.put(f"checkpoint/{path}", files[path])
    return Checkpoint(f"{store.uri}/checkpoint")


def _reduce_checkpoint(checkpoint: Any) -> tuple[Any, ...]:
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


class RemoteTraceback(Exception):  # noqa: N818 - it is shown as the cause of an error, never raised or caught
    """The traceback of an exception as text, from the process where it happened; set as its ``__cause__``."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


def error_to_wire(error: BaseException) -> tuple[dict[str, Any], bytes]:
    """Return the header fields of an exception and, for attachment 0, its pickle (b"" if it cannot be pickled)."""
    description = {
        "type": type(error).__name__,
        "message": _words(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }
    try:
        blob = cloudpickle.dumps(error)
    except Exception as unpicklable:  # noqa: BLE001 - anything may happen in there; the words are enough
        _LOG.debug("%s travels in words only: %s", description["type"], unpicklable)
        blob = b""
    return description, blob if len(blob) <= _MAX_PICKLE else b""


def error_from_wire(description: dict[str, Any], blob: bytes = b"") -> BaseException:
    """Rebuild an exception; what does not unpickle becomes the Holdfast error of that name, or a `TrainingError`."""
    error: BaseException | None = None
    if blob:
        try:
            found = pickle.loads(blob)
            str(found)  # whoever shows it must be able to
            error = found if isinstance(found, BaseException) else None
        except Exception as unreadable:  # noqa: BLE001 - its class may exist in the other process only
            _LOG.debug("%s could not be unpickled: %s", description.get("type"), unreadable)
    if error is None:
        kind, words = str(description.get("type", "Exception")), str(description.get("message", ""))
        if kind in errors.__all__:
            error = error_from_json({"type": kind, "message": words})
        else:
            error = errors.TrainingError(f"{kind}: {words}")
    if description.get("traceback"):
        error.__cause__ = RemoteTraceback(description["traceback"])
    return error


def add_note(error: BaseException, note: str) -> None:
    """Add a line that is shown below the traceback of an error, wherever it travels; nothing before Python 3.11."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - an error whose own words fail is reported all the same
        return f"<its message cannot be made: {broken!r}>"


def describe_location(storage: Storage, name: str) -> dict[str, Any]:
    """Describe a directory of a storage."""
    return {"storage": storage.describe(), "uri": storage.uri, "name": name}


def checkpoint_at(location: Mapping[str, Any]) -> Checkpoint:
    """Return a handle of a location.

    Raises:
        ConfigError: it lives in the memory of another process.
    """
    if "manifest" in location:  # in the driver, right after the commit
        known = {key: location[key] for key in ("step", "metrics", "manifest")}
        return CommittedCheckpoint.told(_storage(location), location["name"], **known)
    return Checkpoint.at(_storage(location), location["name"])


def open_root(location: Mapping[str, Any]) -> Storage:
    """Return the storage rooted at a location.

    Raises:
        ConfigError: it lives in the memory of another process.
    """
    return as_given(_storage(location).child(location["name"]))


def pack_secrets(*storages: Storage) -> bytes:
    """Return the credentials that the descriptions of these storages leave out; b"" if there are none.

    For the control sockets of our own processes: never for a file, an argument, the environment or a log.
    """
    described = [{"storage": storage.describe(), "secrets": storage.secrets()} for storage in storages]
    described = [entry for entry in described if entry["storage"] is not None and entry["secrets"]]
    return json.dumps(described).encode() if described else b""


def learn_secrets(data: bytes) -> None:
    """Let this process find the credentials of `pack_secrets` when it opens those storages, or unpickles them."""
    for described in json.loads(data) if data else ():
        # Storages note the credentials they were given, and `describe` those found among a client's arguments.
        from_description(described["storage"], described["secrets"]).describe()


class TravellingSecrets:
    """Credentials in front of a pickled task: the process that unpickles it has learnt them before the rest."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return learn_secrets, (self._data,)


def run_validation(_: object, function: Callable[..., Any], checkpoint: Checkpoint, arguments: dict[str, Any]) -> Any:
    """Validate, in a process of its own; credentials come first: with them the checkpoint's storage is rebuilt."""
    from holdfast.checkpointer.metrics import plain_metrics

    found = function(checkpoint, **arguments)
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"validation={getattr(function, '__name__', function)!r} returned {type(found).__name__}: return a dict of "
            "metrics"
        )
    return plain_metrics(found)  # here, where the devices of its tensors are


def _storage(location: Mapping[str, Any]) -> Storage:
    if location["storage"] is None:
        raise ConfigError(
            f"{location['uri'].rstrip('/')}/{location['name']} lives in the memory of the driver: worker processes can "
            "neither read nor write it; use a directory as storage_path"
        )
    return from_description(location["storage"])
