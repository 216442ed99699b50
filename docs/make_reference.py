"""Writes docs/reference.md from the docstrings of the public names. `make reference` runs it.

python docs/make_reference.py
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holdfast

__all__ = ["PAGE", "reference"]

PAGE = Path(__file__).with_name("reference.md")
_HEAD = """\
# Reference

The public names of `holdfast` and of its modules that need no other framework, from their docstrings. The modules for
frameworks have guides of their own: [index](index.md). This page is generated: `make reference` writes it.
"""
# Names of `holdfast` in the order in which people meet them; those not listed here come under "More".
_PARTS = {
    "Your own loop": ["Checkpointer", "Keep", "Mirror", "attrs", "PerRank", "RNG"],
    "Save and load": ["save", "load", "save_async", "SaveHandle", "Checkpoint", "Verification"],
    "Other formats": ["export", "Exported", "import_checkpoint", "Imported"],
    "The function trainer": [
        "report", "get_checkpoint", "get_context", "get_all_reported_checkpoints", "save_checkpoint", "load_checkpoint",
        "ScalingConfig", "RunConfig", "CheckpointConfig", "CheckpointStrategy", "FailureConfig", "CheckpointUploadMode",
        "ReportedCheckpoint", "ReportedCheckpointStatus", "Result",
    ],
    "The loop trainer": ["Trainer"],
}  # fmt: skip
_MODULES = ("torch", "callbacks", "core", "loggers", "trackers", "dcp", "storage", "testing")
_HEADING = 90  # characters of a call that fit into a heading
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
_ENTRY = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*):\s*(.*)$")


def reference() -> str:
    """Return the page."""
    errors = [name for name in holdfast.__all__ if _is_error(getattr(holdfast, name))]
    placed = {name for names in _PARTS.values() for name in names}
    more = [name for name in holdfast.__all__ if name not in placed and name not in errors]
    parts = {**_PARTS, **({"More": more} if more else {})}
    lines = [_HEAD]
    for title, names in parts.items():
        lines.append(f"## {title}\n")
        for name in names:
            lines += _object(f"holdfast.{name}", getattr(holdfast, name))
    lines += ["## Errors\n", "Each is also the built-in error that people catch already.\n"]
    lines += [_error(getattr(holdfast, name)) for name in errors]
    shown = {id(getattr(holdfast, name)) for name in holdfast.__all__}
    for module in _MODULES:
        home = importlib.import_module(f"holdfast.{module}")
        lines.append(f"\n## holdfast.{module}\n")
        for name in home.__all__:
            value = getattr(home, name)
            if id(value) not in shown:
                shown.add(id(value))
                lines += _object(f"holdfast.{module}.{name}", value)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _object(name: str, value: Any) -> list[str]:
    if isinstance(value, type):
        return _class(name, value)
    if callable(value):
        return [f"### `{name}`\n", _code(name, value), *_text(value)]
    if type(value).__module__.startswith("holdfast"):
        return [f"### `{name}`\n", *_text(type(value))]
    return [f"### `{name}`\n", f"`{value!r}`\n"]


def _class(name: str, value: type) -> list[str]:
    if _is_error(value):
        return [f"### `{name}`\n", _error(value), ""]
    if issubclass(value, enum.Enum):
        return [f"### `{name}`\n", *_text(value), ", ".join(f"`{one.name}`" for one in value) + "\n"]
    bases = [base.__name__ for base in value.__bases__ if base in _public_classes()]
    known = [f"It is a `{bases[0]}`, with all of its methods.\n"] if bases else []
    lines = [f"### `{name}`\n", *([] if inspect.isabstract(value) else [_code(name, value)]), *_text(value), *known]
    for member, found in _members(value):
        label = f"{name.rpartition('.')[2]}.{member}"
        if isinstance(found, property):
            lines += [f"#### `{label}`\n", *_text(found)]
            continue
        function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
        bound = not isinstance(found, staticmethod)
        call = _call(label, function, bound=bound)
        short = len(call) <= _HEADING
        lines += [f"#### `{call if short else f'{label}()'}`\n", "" if short else _fenced(call), *_text(function)]
    return lines


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Give public methods and properties with a docstring; those of a public base class stand there."""
    seen: set[str] = set()
    for base in value.__mro__:
        if not base.__module__.startswith("holdfast") or (base is not value and base in _public_classes()):
            continue
        for name, found in vars(base).items():
            inner = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
            is_code = isinstance(found, property) or inspect.isfunction(inner)
            if name.startswith(("_", "test_")) or name in seen or not is_code:
                continue
            seen.add(name)
            if inner.__doc__:
                yield name, found


@functools.cache
def _public_classes() -> frozenset[type]:
    homes = [holdfast, *(importlib.import_module(f"holdfast.{module}") for module in _MODULES)]
    values = [getattr(home, name) for home in homes for name in home.__all__]
    return frozenset(value for value in values if isinstance(value, type))


def _code(name: str, value: Any) -> str:
    return _fenced(_call(name, value))


def _fenced(call: str) -> str:
    return f"```text\n{call}\n```\n" if call else ""


def _call(name: str, value: Any, *, bound: bool = False) -> str:
    """Return the call, one argument a line where it is long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    given = list(signature.parameters.values())[1 if bound else 0 :]
    words, before = [], None
    for one in given:
        if one.kind is one.KEYWORD_ONLY and before not in (one.KEYWORD_ONLY, one.VAR_POSITIONAL):
            words.append("*")
        before = one.kind
        words.append(_argument(one))
    returned = signature.return_annotation
    end = f") -> {returned}" if isinstance(returned, str) and not isinstance(value, type) else ")"
    line = f"{name}({', '.join(words)}{end}"
    if len(line) > 110:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + end
    return line


def _argument(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = f": {one.annotation}" if isinstance(one.annotation, str) else ""
    if one.default is one.empty:
        return f"{stars}{one.name}{kind}"
    return f"{stars}{one.name}{kind} = {_default(one.default)}"


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        usual = {field.name: field.default for field in dataclasses.fields(value)}
        given = {name: getattr(value, name) for name in usual if getattr(value, name) != usual[name]}
        return f"{type(value).__name__}({', '.join(f'{name}={inner!r}' for name, inner in given.items())})"
    text = value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def _text(value: Any) -> list[str]:
    """Return a docstring as Markdown."""
    documentation = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(value) or "")
    lines: list[str] = []
    section, body = "", []
    for line in [*documentation.splitlines(), "Args:"]:  # the last one ends what is before it
        found = _SECTION.match(line)
        if not found:
            body.append(line)
            continue
        lines += _section(section, body)
        section, body = found.group(1), []
    return lines


def _section(title: str, body: list[str]) -> list[str]:
    text = inspect.cleandoc("\n" + "\n".join(body)).strip("\n")
    if not text:
        return []
    if not title:
        return [text + "\n"]
    if title.startswith("Example"):
        return ["```text", re.sub(r" +# doctest: \+\w+", "", text), "```\n"]
    if title in ("Returns", "Yields"):
        return [f"{title}: {' '.join(text.split())}\n"]
    entries: list[str] = []
    for line in text.splitlines():
        found = None if line.startswith(" ") else _ENTRY.match(line)
        if found:
            entries.append(f"- `{found.group(1)}`: {found.group(2)}")
        elif line and entries:
            entries[-1] += f" {line.strip()}"
    name = {"Args": "Arguments"}.get(title, title)
    return [f"{name}:\n", *entries, ""]


def _error(value: type) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].replace("``", "`").split())
    return f"- `{value.__name__}` ({bases}): {text}"


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
