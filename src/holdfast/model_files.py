"""Small files that are committed with a checkpoint, so that its directory is what another library loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from .errors import ConfigError

__all__ = ["Content", "ModelFiles", "maker_of", "model_files_of"]

Content: TypeAlias = "bytes | str | Callable[[], bytes | str]"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_TOO_LONG = re.compile(r"[^/]{201}|.{801}")  # file systems take 255 bytes for a part, and add some for a temporary name
# Names that a save or a storage gives; see holdfast/format/names.py.
_OURS = re.compile(
    r"manifest\.json|(?:state|part|plan|staged|rank|index)-.*|.*-[0-9]{5}(?:\.part[0-9]+)?-[0-9a-f]{8,}-.*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What lies beside the tensors of a checkpoint, and under which names another library finds the tensors.

    `holdfast.transformers.model_files` makes one for a model of Hugging Face; a plain mapping of names to contents is
    enough for anything else.

    Attributes:
        files: name -> content, or a function without arguments that gives it at each save. Equal contents are written
            once and hard-linked afterwards (a store gets them with each checkpoint).
        indexes: name of a safetensors index (``model.safetensors.index.json``) -> item of the state, or path of a
            module in it ("policy/body"), whose tensors it names: the index says which file of the checkpoint holds
            which tensor, in the form that ``safetensors`` and Transformers define (a JSON object ``weight_map``).
        named: name of a safetensors file -> the tensors that it holds: path in the state -> name in the file. These
            tensors lie in a file of exactly this name, for libraries that read no index.

    Example:
        >>> ModelFiles(files={"config.json": "{}"}, indexes={"model.safetensors.index.json": "model"}).indexes
        {'model.safetensors.index.json': 'model'}
    """

    files: Mapping[str, Content] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [*self.files, *self.indexes, *self.named]
        for name in names:
            fits = isinstance(name, str) and _NAME.fullmatch(name) and not _TOO_LONG.search(name)
            if not fits or _OURS.fullmatch(name.rpartition("/")[2]):
                raise ConfigError(
                    f"model_files: {name!r} cannot be the name of a file in a checkpoint: use letters, digits, '.', "
                    "'_' and '-' (at most 200 in a part, 800 in all), folders separated by '/', and none of the names "
                    "that Holdfast gives itself"
                )
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"model_files: {', '.join(twice)} is given twice: each file has one content")
        for name in sorted(names):
            if any(other.startswith(f"{name}/") for other in names):
                raise ConfigError(f"model_files: {name} is a file and the folder of another one: rename one of them")
        for name, content in self.files.items():
            if not isinstance(content, (bytes, str)) and not callable(content):
                raise ConfigError(
                    f"model_files[{name!r}]: {type(content).__name__} is no content: give bytes, text, or a function "
                    "without arguments that returns one of them"
                )

    def wants(self, name: str) -> bool:
        """Tell whether other libraries look for a tensor of the state, so that it has to lie whole in one file."""
        items = tuple(f"{item}{end}" for item in self.indexes.values() for end in "/.")
        return name.startswith(items) or any(name in names for names in self.named.values())

    def resolve(self) -> ModelFiles:
        """Return this with the bytes of every file.

        Raises:
            ConfigError: a function returned something else.
        """
        if all(isinstance(content, bytes) for content in self.files.values()):
            return self
        return replace(self, files={name: _bytes(name, content) for name, content in self.files.items()})


def model_files_of(given: Any, state: Mapping[Any, Any]) -> ModelFiles | None:
    """Check the argument ``model_files`` of a front door, as `maker_of` does, and make them of what is saved."""
    make = maker_of(given)
    return None if make is None else make(state)


def maker_of(given: Any) -> Callable[[Mapping[Any, Any]], ModelFiles | None] | None:
    """Check the argument ``model_files`` where the state is not known yet; return what makes them of it.

    Args:
        given: None, a mapping of names to contents, a `ModelFiles`, or the name under which an installed package makes
            them of a state.

    Raises:
        ConfigError: it is something else, or there is no such package; later: the package cannot make them.
    """
    if given is None:
        return None
    if isinstance(given, str):
        from ._optional import MODEL_FILES, offered  # not above: only for one named by a package

        make = offered(MODEL_FILES, given, what="model_files")
        return lambda state: _checked(make(state))
    files = _checked(given)
    return lambda _: files


def _checked(given: Any) -> ModelFiles | None:
    if given is None or isinstance(given, ModelFiles):
        return given
    if isinstance(given, Mapping):
        return ModelFiles(files=dict(given))
    raise ConfigError(
        f"model_files={given!r}: give a dict {{file name: bytes, text or a function}}, what "
        "holdfast.transformers.model_files(model, tokenizer) returns, or the name that an installed package offers"
    )


def index_template(folder_depth: int, weights: Mapping[str, str], total_bytes: int) -> str:
    """Write a safetensors index as text.

    Args:
        folder_depth: how many folders the index lies below the checkpoint; the files of tensors lie directly in it.
        weights: tensor -> file.
        total_bytes: of all tensors.
    """
    up = "../" * folder_depth
    body = {"metadata": {"total_size": total_bytes}, "weight_map": {name: up + file for name, file in weights.items()}}
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def _bytes(name: str, content: Content) -> bytes:
    data = content() if callable(content) else content
    if isinstance(data, str):
        return data.encode()
    if not isinstance(data, bytes):
        raise ConfigError(f"model_files[{name!r}]: the function returned {type(data).__name__}: return bytes or text")
    return data
