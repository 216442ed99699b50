"""What a member of the control channel may say: the fields of each message, checked before anything acts on them.

What goes wrong behind this check is a mistake of ours, and not the member's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import HoldfastError

__all__ = ["check_word"]

_Kinds = tuple[type, ...]
_INT, _STR, _BOOL, _DICT = (int,), (str,), (bool,), (dict,)
_INT_OR_NONE, _DICT_OR_NONE = (int, type(None)), (dict, type(None))

_WORDS: dict[str, dict[str, _Kinds]] = {
    "hello": {"standing": _DICT, "judged": _DICT_OR_NONE},
    "beat": {"step": _INT, "stopped": _BOOL},
    "begun": {"save": _STR, "directory": _STR, "step": _INT_OR_NONE},
    "stored": {"save": _STR, "part": _DICT_OR_NONE},
    "failed": {"save": _STR, "error": _DICT},
    "uploaded": {"save": _STR, "error": _DICT_OR_NONE},
    "heard": {"save": _STR, "value": _DICT_OR_NONE, "error": _DICT_OR_NONE},
    "want": {"kind": _STR},
    "ack": {"step": _INT},
    "nack": {"step": _INT, "at": _INT},
    "acted": {"step": _INT},
    "ask": {"about": _STR},
    "left": {"why": _STR},
    "bye": {"why": _STR},
    "held": {},
}
_STANDING = {"done": _INT, "acted": _INT, "target": _INT_OR_NONE, "armed": _BOOL, "kind": _STR}
_JUDGED = {"about": _STR, "go": _BOOL}
_WISHES = ("settle", "save", "stop")


def check_word(message: dict[str, Any]) -> None:
    """Refuse a message that no member sends.

    Raises:
        HoldfastError: naming what is wrong with it.
    """
    what = message["do"]
    fields = _WORDS.get(what)
    if fields is None:
        raise HoldfastError(f"a message on the control channel is of an unknown kind, {what[:40]!a}")
    _check(what, message, fields)
    if what == "hello":
        _check("standing", message["standing"], _STANDING)
        if message["standing"].keys() - _STANDING:
            raise HoldfastError("a 'standing' on the control channel has unknown fields")
        if message.get("judged") is not None:
            _check("judged", message["judged"], _JUDGED)
    wish = message["standing"]["kind"] if what == "hello" else message.get("kind", "save")
    if wish not in _WISHES:
        raise HoldfastError(f"a {what!r} on the control channel wants {wish[:40]!a}")


def _check(what: str, message: dict[str, Any], fields: Mapping[str, _Kinds]) -> None:
    for name, kinds in fields.items():
        value = message.get(name)
        if type(value) not in kinds:
            raise HoldfastError(f"a {what!r} on the control channel has no good {name!r}")
