"""Import safetensors, and the folders of Hugging Face Transformers and Accelerate."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedStateError
from ..format.layout import DTYPES, item_size, read_header
from ..format.names import check_path
from ..format.strict_json import loads
from ..storage.base import FileReader
from ..storage.local import LocalStorage
from .blobs import Blob
from .boxes import WINDOW
from .from_torch import take_optimizers
from .gathered import Gathered, mapped_ranges
from .to_safetensors import INDEX_NAME, WEIGHTS_NAME
from .unpickle import read_torch

__all__ = ["from_hf", "from_safetensors", "is_hf"]

# Every name that safetensors has had; ours are those of version 0.5.
_TORCH = {
    **{short: name for name, (short, _) in DTYPES.items()},
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_BIN = "pytorch_model.bin"
# What Accelerate calls the second model and those after it.
_OTHER_MODEL = re.compile(r"(?:model|pytorch_model)_(\d+)\.(safetensors|bin)")
_MAX_INDEX = 256 << 20
# Files of a folder that are torch files, and what they are called in the state.
_TORCH_FILES = {
    "optimizer": ("optimizer.pt", "optimizer.bin"),
    "scheduler": ("scheduler.pt", "scheduler.bin"),
    "scaler": ("scaler.pt",),
}


def is_hf(folder: str) -> bool:
    """Tell whether a folder looks like one of Transformers or Accelerate."""
    return any(
        os.path.exists(os.path.join(folder, name))
        for name in (WEIGHTS_NAME, INDEX_NAME, _BIN, f"{_BIN}.index.json", "optimizer.bin", "optimizer.pt")
    )


def from_safetensors(path: str, stack: ExitStack) -> Gathered:
    """Read one file, or all files of a folder (or of the index in it), as the item "model"."""
    gathered = Gathered()
    if os.path.isdir(path):
        files = _indexed(path, INDEX_NAME) or sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        if not files:
            raise CheckpointNotFoundError(f"there is no .safetensors file in {path}")
        gathered.weights("model", _blobs(path, files, stack, gathered))
    else:
        folder, name = os.path.split(os.path.abspath(path))
        gathered.weights("model", _blobs(folder, [name], stack, gathered))
    return gathered


def from_hf(folder: str, stack: ExitStack, *, trusted: bool = False) -> Gathered:
    """Read what a folder of Transformers' `Trainer` or of `Accelerator.save_state` has."""
    gathered = Gathered()
    names = sorted(os.listdir(folder))
    used: set[str] = set()
    state: dict[str, Any] = {}
    mapped: list[tuple[int, int]] = []
    files = _indexed(folder, INDEX_NAME) or [name for name in (WEIGHTS_NAME,) if name in names]
    models: dict[str, dict[str, Blob]] = {}
    if files:
        used |= {*files, INDEX_NAME}
        models["model"] = _blobs(folder, files, stack, gathered)
    else:
        weights = _indexed(folder, f"{_BIN}.index.json") or [name for name in (_BIN,) if name in names]
        used |= {*weights, f"{_BIN}.index.json"}
        for name in weights:
            state.setdefault("model", {}).update(_torch_file(os.path.join(folder, name), mapped, trusted=trusted))
    for name in names:
        if found := _OTHER_MODEL.fullmatch(name):
            used.add(name)
            label = f"model_{found[1]}"
            if found[2] == "safetensors":
                models[label] = _blobs(folder, [name], stack, gathered)
            else:
                _take(state, label, os.path.join(folder, name), mapped, gathered, trusted=trusted)
    for key, choices in _TORCH_FILES.items():
        for name in names:
            stem, _, number = name.partition("_")
            plain = name if name in choices else f"{stem}{os.path.splitext(name)[1]}" if number else ""
            if plain in choices and name not in used:
                used.add(name)
                label = key if name == plain else os.path.splitext(name)[0]
                _take(state, label, os.path.join(folder, name), mapped, gathered, trusted=trusted)
    for name in names:
        if (name.startswith(("random_states_", "rng_state"))) and name not in used:
            used.add(name)
            _take(state, os.path.splitext(name)[0], os.path.join(folder, name), mapped, gathered, trusted=trusted)
    if "trainer_state.json" in names:
        used.add("trainer_state.json")
        with open(os.path.join(folder, "trainer_state.json"), "rb") as file:
            state["trainer_state"] = told = json.load(file)
        step = told.get("global_step") if isinstance(told, dict) else None
        gathered.step = step if type(step) is int else None
    _finish(gathered, state, models, mapped)
    gathered.not_taken += [(name, "a file that is no training state") for name in names if name not in used]
    return gathered


def _finish(
    gathered: Gathered, state: dict[str, Any], models: dict[str, dict[str, Blob]], mapped: list[tuple[int, int]]
) -> None:
    """Put everything together; the shapes of safetensors tell whose state an optimizer holds."""
    import torch

    shapes: dict[str, Any] = {
        label: {
            name: torch.empty(blob.shape, dtype=getattr(torch, blob.dtype), device="meta")
            for name, blob in blobs.items()
        }
        for label, blobs in models.items()
    }
    state, what = take_optimizers({**shapes, **state}, gathered)
    for label, blobs in models.items():
        del state[label]
        gathered.weights(label, blobs)
    gathered.values(state, what=what, mapped=mapped)


def _take(
    state: dict[str, Any], key: str, path: str, mapped: list[tuple[int, int]], gathered: Gathered, *, trusted: bool
) -> None:
    try:
        state[key] = _torch_file(path, mapped, trusted=trusted)
    except UnsupportedStateError as error:
        gathered.not_taken.append((os.path.basename(path), str(error)))


def _torch_file(path: str, mapped: list[tuple[int, int]], *, trusted: bool) -> Any:
    found = read_torch(path, trusted=trusted)
    mapped += mapped_ranges(path)
    return found


def _indexed(folder: str, name: str) -> list[str] | None:
    """Return the files that an index names; None if there is none."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        body = loads(file.read(_MAX_INDEX), max_bytes=_MAX_INDEX, where=path)
    home = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(home, dict):
        raise CorruptCheckpointError(f"{path} has no weight_map", file=name)
    return sorted({check_path(one, where=path) for one in home.values()})


def _blobs(folder: str, files: list[str], stack: ExitStack, gathered: Gathered) -> dict[str, Blob]:
    storage = LocalStorage(folder)
    found: dict[str, Blob] = {}
    for file in files:
        reader = stack.enter_context(storage.open(file))
        for name, entry in read_header(reader, os.path.join(folder, file))[1].items():
            dtype = _TORCH.get(entry.dtype)
            if dtype is None:
                gathered.not_taken.append(
                    (f"model/{name}", f"the dtype {entry.dtype} of safetensors is not known here")
                )
                continue
            if name in found:
                raise CorruptCheckpointError(f"{folder}: two files have a tensor {name!r}", file=file, tensor=name)
            parts = partial(ranges, reader, entry.offset, entry.nbytes)
            found[name] = Blob(name, dtype, entry.shape, parts, item_size(dtype) or 1)
    return found


def ranges(reader: FileReader, offset: int, size: int) -> Iterator[memoryview]:
    """Yield a range of a file, window by window."""
    buffer = memoryview(bytearray(min(WINDOW, size)))
    for start in range(0, size, WINDOW):
        view = buffer[: min(WINDOW, size - start)]
        reader.read_into(offset + start, view)
        yield view
