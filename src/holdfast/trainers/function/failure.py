"""Exceptions on the wire between driver and workers: what they say for people, and the object where it pickles."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from holdfast import errors
from holdfast._log import get_logger
from holdfast.writer.messages import error_from_json

__all__ = ["RemoteTraceback", "error_from_wire", "error_to_wire"]

_LOG = get_logger("trainers.function")
_MAX_PICKLE = 8 << 20  # an exception that holds a model travels in words only


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


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - an error whose own words fail is reported all the same
        return f"<its message cannot be made: {broken!r}>"
