"""Import safetensors, and the folders of Hugging Face Transformers and Accelerate."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from functools import partial
from typing import Any

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedStateError
from holdfast.format.names import check_path
from holdfast.format.strict_json import loads
from holdfast.format.tensor_file import DTYPES, item_size, read_header
from holdfast.storage.local.local_storage import LocalStorage

from .blobs import Blob
from .from_dcp import from_dcp
from .from_torch import take_optimizers
from .gathered import Gathered, mapped_ranges, own_file, ranges
from .to_dcp import METADATA_NAME
from .to_safetensors import INDEX_NAME, WEIGHTS_NAME
from .unpickle import read_torch

__all__ = ["from_hf", "from_safetensors", "is_hf"]

# Names of dtypes in all versions of safetensors -> those of torch; `DTYPES` has the names of version 0.5.
_TORCH = {
    **{short: name for name, (short, _) in DTYPES.items()},
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_BIN = "pytorch_model.bin"
# Files of Accelerate: the second and further models, and models of FSDP with full state dicts.
_OTHER_MODEL = re.compile(r"(?:model|pytorch_model)_(\d+)\.(safetensors|bin)|pytorch_model_fsdp(?:_(\d+))?\.(bin)")
# Directories of torch.distributed.checkpoint with the sharded state of FSDP.
_SHARDED = {"pytorch_model_fsdp_0": "model", "optimizer_0": "optimizer"}
_MAX_INDEX = 256 << 20
# Files with the first model, or a shard of it.
_FIRST_MODEL = re.compile(r"(?:pytorch_)?model(?:-\d+(?:-of-\d+)?)?\.(?:safetensors|bin)(?:\.index\.json)?")
# Other torch files of a folder; each is an item of the state under the name of the file.
_STATES = re.compile(
    r"(?:optimizer|scheduler|scaler|sampler|dl_state_dict)(?:_\d+)?\.(?:pt|bin)"
    r"|(?:random_states|rng_state|custom_checkpoint)(?:_\d+)?\.(?:pkl|pth)"
)


def is_hf(folder: str) -> bool:
    """Tell whether a folder looks like a folder of Transformers or Accelerate."""
    return any(
        os.path.exists(os.path.join(folder, name))
        for name in (WEIGHTS_NAME, INDEX_NAME, _BIN, f"{_BIN}.index.json", "optimizer.bin", "optimizer.pt", *_SHARDED)
    )


def from_safetensors(path: str, stack: ExitStack) -> Gathered:
    """Read a file, or all files of a folder (those of its index if there is one), as the item "model".

    Raises:
        CheckpointNotFoundError: the folder has no such file.
        CorruptCheckpointError: a file is damaged, or two have a tensor of the same name.
    """
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
    """Read a folder of Transformers' `Trainer` or of `Accelerator.save_state`."""
    gathered = Gathered()
    names = sorted(os.listdir(folder))
    used: set[str] = set()
    source: dict[str, str] = {}  # part of the state -> the file it was taken from
    state: dict[str, Any] = {}
    mapped: list[tuple[int, int]] = []
    files = _indexed(folder, INDEX_NAME) or [name for name in (WEIGHTS_NAME,) if name in names]
    models: dict[str, dict[str, Blob]] = {}
    if files:
        used |= {*files, INDEX_NAME}
        models["model"] = _blobs(folder, files, stack, gathered)
        source["model"] = _first_of((INDEX_NAME, WEIGHTS_NAME), names)
    else:
        weights = _indexed(folder, f"{_BIN}.index.json") or [name for name in (_BIN,) if name in names]
        used |= {*weights, f"{_BIN}.index.json"}
        for name in weights:
            state.setdefault("model", {}).update(_torch_file(own_file(folder, name), mapped, trusted=trusted))
            source["model"] = _first_of((f"{_BIN}.index.json", _BIN), names)
    for name in names:
        label = _part_of(name)
        if not (_OTHER_MODEL.fullmatch(name) or _STATES.fullmatch(name)) or label is None or label in source:
            continue
        used.add(name)
        if name.endswith(".safetensors"):
            models[label] = _blobs(folder, [name], stack, gathered)
        else:
            _take(state, label, own_file(folder, name), mapped, gathered, trusted=trusted)
        if label in models or label in state:
            source[label] = name
    if "trainer_state.json" in names:
        used.add("trainer_state.json")
        state["trainer_state"] = trainer = _json(own_file(folder, "trainer_state.json"))
        step = trainer.get("global_step") if isinstance(trainer, dict) else None
        gathered.step = step if type(step) is int else None
    _finish(gathered, state, models, mapped)
    for name, key in _SHARDED.items():
        if key not in gathered.tree and os.path.isfile(os.path.join(folder, name, METADATA_NAME)):
            used.add(name)
            gathered.join(from_dcp(own_file(folder, name), stack), inside=name)
            source[key] = name
    source = {part: name for part, name in source.items() if part in gathered.tree}
    gathered.not_taken += [(name, _why_not(os.path.join(folder, name), source)) for name in names if name not in used]
    return gathered


def _first_of(wanted: tuple[str, ...], names: list[str]) -> str:
    return next(name for name in wanted if name in names)


def _part_of(name: str) -> str | None:
    """Return the item of the state that a file or directory of this name holds; None for an unknown name."""
    if found := _OTHER_MODEL.fullmatch(name):
        number = found[1] or found[3]
        return f"model_{number}" if number else "model"
    if _FIRST_MODEL.fullmatch(name):
        return "model"
    return os.path.splitext(name)[0] if _STATES.fullmatch(name) else _SHARDED.get(name)


def _why_not(path: str, source: dict[str, str]) -> str:
    if other := source.get(_part_of(os.path.basename(path)) or ""):
        return f"the same part as {other}, which was taken"
    if os.path.isfile(os.path.join(path, METADATA_NAME)):
        return "a directory of torch.distributed.checkpoint: import it by itself"
    return "no training state that is known here"


def _json(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is no JSON: {error}", file=os.path.basename(path)) from error


def _finish(
    gathered: Gathered, state: dict[str, Any], models: dict[str, dict[str, Blob]], mapped: list[tuple[int, int]]
) -> None:
    """Add all items; the shapes in safetensors files help to name the parameters of an optimizer."""
    import torch

    shapes: dict[str, Any] = {
        label: {
            name: torch.empty(blob.shape, dtype=getattr(torch, blob.dtype), device="meta")
            for name, blob in blobs.items()
        }
        for label, blobs in models.items()
    }
    state, labels = take_optimizers({**shapes, **state}, gathered)
    for label, blobs in models.items():
        del state[label]
        gathered.weights(label, blobs)
    gathered.values(state, labels=labels, mapped=mapped)


def _take(
    state: dict[str, Any], key: str, path: str, mapped: list[tuple[int, int]], gathered: Gathered, *, trusted: bool
) -> None:
    try:
        state[key] = _torch_file(path, mapped, trusted=trusted)
    except UnsupportedStateError as error:
        gathered.not_taken.append((os.path.basename(path), str(error)))


def _torch_file(path: str, mapped: list[tuple[int, int]], *, trusted: bool) -> Any:
    content = read_torch(path, trusted=trusted)
    mapped += mapped_ranges(path)
    return content


def _indexed(folder: str, name: str) -> list[str] | None:
    """Return the files that an index names; None if there is no index."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return None
    with open(own_file(folder, name), "rb") as file:
        body = loads(file.read(_MAX_INDEX), max_bytes=_MAX_INDEX, where=path)
    file_of = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(file_of, dict):
        raise CorruptCheckpointError(f"{path} has no weight_map", file=name)
    return sorted({check_path(shard, where=path) for shard in file_of.values()})


def _blobs(folder: str, files: list[str], stack: ExitStack, gathered: Gathered) -> dict[str, Blob]:
    blobs: dict[str, Blob] = {}
    for file in files:
        head, tail = os.path.split(own_file(folder, file))
        reader = stack.enter_context(LocalStorage(head).open(tail))
        for name, entry in read_header(reader, os.path.join(folder, file))[1].items():
            dtype = _TORCH.get(entry.dtype)
            if dtype is None:
                gathered.not_taken.append(
                    (f"model/{name}", f"the dtype {entry.dtype} of safetensors is not known here")
                )
                continue
            if name in blobs:
                raise CorruptCheckpointError(f"{folder}: two files have a tensor {name!r}", file=file, tensor=name)
            parts = partial(ranges, reader, entry.offset, entry.nbytes)
            blobs[name] = Blob(name, dtype, entry.shape, parts, item_size(dtype) or 1)
    return blobs
