"""Import files of ``torch.save`` and safetensors, and the folders of Hugging Face Transformers and Accelerate.

Among the torch files are checkpoints of PyTorch Lightning; the state of optimizers is taken by parameter names.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import torch

from holdfast._units import listed
from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedStateError
from holdfast.format.names import check_path
from holdfast.format.strict_json import loads
from holdfast.format.tensor_file import DTYPES, item_size, read_header
from holdfast.state.save.torch_file import from_plain
from holdfast.state.tree.objects import renamed
from holdfast.storage.local.local_storage import LocalStorage

from .blobs import INDEX_NAME, METADATA_NAME, WEIGHTS_NAME, Blob
from .from_shards import from_dcp
from .gathered import Gathered, mapped_ranges, own_file, ranges
from .unpickle import Opaque, read_torch

_WRAPPERS = ("module.", "_orig_mod.")
# What optimizers of torch and those modelled on them keep for each element of a parameter, so in its shape. Other state
# may have another: factored moments (Adafactor) have that of rows and columns, where a norm may have the same.
_ELEMENTWISE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size", "ax"}
)
_LIGHTNING = (("optimizer_states", "optimizer", "optimizers"), ("lr_schedulers", "scheduler", "schedulers"))


def from_torch(path: str, *, trusted: bool = False) -> Gathered:
    """Read one file; a Lightning checkpoint is recognised."""
    content = read_torch(path, trusted=trusted)
    if is_lightning(content):
        return _lightning(content, path)
    return _plain(content, path)


def from_lightning(path: str, *, trusted: bool = False) -> Gathered:
    """Read a checkpoint of Lightning."""
    content = read_torch(path, trusted=trusted)
    if not isinstance(content, Mapping) or "state_dict" not in content:
        raise UnsupportedStateError(f"{path} is no checkpoint of Lightning: it has no 'state_dict'")
    return _lightning(content, path)


def is_lightning(value: Any) -> bool:
    """Tell whether this is what Lightning saves."""
    return isinstance(value, Mapping) and "state_dict" in value and "pytorch-lightning_version" in value


def _plain(content: Any, path: str) -> Gathered:
    gathered = Gathered()
    if isinstance(content, torch.nn.Module):
        content = {"model": content}
    if isinstance(content, Opaque):
        raise UnsupportedStateError(
            f"{path} holds one object of {content.name}, which is not made here: if you trust who wrote it, import it "
            "with trusted=True (--trusted)"
        )
    if _is_weights(content):
        content = {"model": content}  # the state_dict of a model
    elif not isinstance(content, Mapping):
        content = {os.path.basename(path).partition(".")[0] or "value": content}
    elif not all(isinstance(key, str) for key in content):
        content = {"value": content}
    state = {key: _without_wrappers(value, key, gathered) for key, value in from_plain(content, where=path).items()}
    state, labels = take_optimizers(state, gathered)
    gathered.values(state, labels=labels, mapped=mapped_ranges(path))
    gathered.position(state.get("step", state.get("global_step")), state.get("epoch"))
    return gathered


def _lightning(content: Mapping[str, Any], path: str) -> Gathered:
    gathered = Gathered()
    state: dict[str, Any] = {"model": _without_wrappers(content["state_dict"], "model", gathered)}
    for key, singular, plural in _LIGHTNING:
        values = content.get(key) or []
        if len(values) == 1:
            state[singular] = values[0]
        elif values:
            state[plural] = list(values)
    renamed = {"state_dict", *(key for key, _, _ in _LIGHTNING)}
    rest = {key: value for key, value in content.items() if key not in renamed and value is not None}
    gathered.not_taken += [(key, "what Lightning itself keeps has this name here") for key in rest if key in state]
    state.update((key, value) for key, value in rest.items() if key not in state)
    state, labels = take_optimizers(state, gathered)
    gathered.values(state, labels=labels, mapped=mapped_ranges(path))
    gathered.position(content.get("global_step"), content.get("epoch"))
    return gathered


def take_optimizers(state: dict[str, Any], gathered: Gathered) -> tuple[dict[str, Any], dict[str, str]]:
    """Key state of optimizers by parameter names where these are certain; returns the state, and labels of items."""
    labels: dict[str, str] = {}
    models = {key: value for key, value in state.items() if _is_weights(value)}

    def by_name(value: Any) -> Any:
        fitting = [keyed for key, model in models.items() if (keyed := named(value, model, f"{key}/")) is not None]
        return fitting[0] if len(fitting) == 1 else None

    for key, value in list(state.items()):
        values = value if isinstance(value, list) else [value]
        if not values or not all(map(_is_optimizer, values)):
            continue
        keyed = [by_name(item) for item in values]
        if all(item is not None for item in keyed):
            state[key] = keyed if isinstance(value, list) else keyed[0]
            labels[key] = "optimizer state, by parameter name"
        else:
            labels[key] = "optimizer state, by position: fits an optimizer made with its parameters in the same order"
    return state, labels


def _is_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items())
    )


def _without_wrappers(value: Any, key: str, gathered: Gathered) -> Any:
    """Strip prefixes of DDP and torch.compile that all names of a state dict have."""
    if not _is_weights(value):
        return value
    names, stripped = list(value), ""
    while prefix := next((prefix for prefix in _WRAPPERS if all(name.startswith(prefix) for name in names)), ""):
        names, stripped = [name[len(prefix) :] for name in names], stripped + prefix
    if not stripped:
        return value
    gathered.not_taken.append((key, f"the prefix {stripped!r} of all its names: wrappers are not part of stored names"))
    return OrderedDict(zip(names, value.values(), strict=True))


def _is_optimizer(value: Any) -> bool:
    """Tell whether a value looks like a result of ``Optimizer.state_dict``."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in value["param_groups"])
    )


def named(optimizer: Mapping[str, Any], model: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """Return the same state keyed by parameter name (``prefix`` and the name in the model); None if uncertain.

    ``Optimizer.state_dict`` numbers parameters in the order in which the script gave them. The file names that order
    (``param_names``, or names in place of numbers), or it does not matter, because each state has a different shape (by
    tensors that are known to have that of their parameter) that exactly one parameter of the model has. A wrong guess
    would mix up states silently, so all other state stays by position: an optimizer made in the same way takes it
    unchanged.
    """
    groups, states = optimizer["param_groups"], optimizer["state"]
    keys = [key for group in groups for key in group["params"]]
    listed = [name for group in groups for name in group.get("param_names", ())]
    if len(listed) == len(keys) and keys:
        names: list[str] | None = listed if all(name in model for name in listed) else None
    elif keys and all(isinstance(key, str) for key in keys):  # FSDP, torch.distributed.checkpoint.state_dict
        names = keys if all(key in model for key in keys) else None
    else:
        names = _by_shape([_shape(states.get(key)) for key in keys], _parameters(model))
    if names is None or len(set(names)) < len(names) or not states.keys() <= set(keys):
        return None
    name_of = dict(zip(keys, names, strict=True))
    if not all(isinstance(kept, Mapping) for kept in states.values()):
        return None
    return renamed(optimizer, lambda key: prefix + name_of[key])


def _parameters(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of what may be parameters in a ``state_dict``: floating tensors, tied tensors once."""
    shapes = {}
    seen = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        memory = (value.data_ptr(), value.shape, value.stride())
        if memory[0] and memory in seen:  # 0: no memory at all (empty, or only the shape is known)
            continue
        seen.add(memory)
        shapes[name] = tuple(value.shape)
    return shapes


def _shape(kept: Any) -> tuple[int, ...] | None:
    """Return the shape that an optimizer's state gives to its parameter; None if it gives none for certain."""
    tensors = kept.items() if isinstance(kept, Mapping) else ()
    shapes = {
        tuple(value.shape)
        for key, value in tensors
        if key in _ELEMENTWISE and isinstance(value, torch.Tensor) and value.dim()
    }
    return shapes.pop() if len(shapes) == 1 else None


def _by_shape(wanted: list[tuple[int, ...] | None], shapes: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """Return the parameter of each wanted shape; None unless each shape belongs to exactly one parameter."""
    homes: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        homes.setdefault(shape, []).append(name)
    candidates = [homes.get(shape, []) if shape is not None else [] for shape in wanted]
    if len(set(wanted)) != len(wanted) or any(len(names) != 1 for names in candidates):
        return None
    return [names[0] for names in candidates]


# ---- safetensors, and the folders of Hugging Face


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
_INDEX_END = ".index.json"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.[a-z]+)")
_NAMED = 5
# Files with tensors -> the tensors that an index says they have; None takes what they have.
_Files = dict[str, "set[str] | None"]
# Files with the first model, or a shard of it.
_FIRST_MODEL = re.compile(r"(?:pytorch_)?model(?:-\d+(?:-of-\d+)?)?\.(?:safetensors|bin)(?:\.index\.json)?")
# Other torch files of a folder; each is an item of the state under the name of the file.
_STATES = re.compile(
    r"(?:optimizer|scheduler|scaler|sampler|dl_state_dict)(?:_\d+)?\.(?:pt|bin)"
    r"|(?:random_states|rng_state|custom_checkpoint)(?:_\d+)?\.(?:pkl|pth)"
)


def is_hf(folder: str) -> bool:
    """Tell whether a folder looks like a folder of Transformers or Accelerate."""
    known = (WEIGHTS_NAME, INDEX_NAME, _BIN, _BIN + _INDEX_END, "optimizer.bin", "optimizer.pt", *_SHARDED)
    return any(os.path.exists(os.path.join(folder, name)) for name in known) or bool(
        _shards(os.listdir(folder), WEIGHTS_NAME) or _shards(os.listdir(folder), _BIN)
    )


def shard_of(name: str) -> int:
    """Return of how many files, by its name, a file is one: 2 for ``model-00001-of-00002.safetensors``, else 1."""
    found = _SHARD.fullmatch(name)
    return int(found[3]) if found else 1


def from_safetensors(path: str, stack: ExitStack) -> Gathered:
    """Read a file, or all files of a folder (those of its index if there is one), as the item "model".

    Raises:
        CheckpointNotFoundError: the folder has no such file.
        CorruptCheckpointError: a file is damaged or missing, lacks what the index says, or two files have a tensor of
            the same name.
    """
    gathered = Gathered()
    if os.path.isdir(path):
        every = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        indexes = [name for name in os.listdir(path) if name.endswith(f".safetensors{_INDEX_END}")]
        index = indexes[0] if len(indexes) == 1 else INDEX_NAME
        files = _indexed(path, index) or dict.fromkeys(every)
        if not files:
            raise CheckpointNotFoundError(f"there is no .safetensors file in {path}")
        _check_families(path, files)
        gathered.weights("model", _blobs(path, files, stack, gathered))
        gathered.not_taken += [(name, f"a file that {index} does not name") for name in every if name not in files]
    else:
        folder, name = os.path.split(os.path.abspath(path))
        gathered.weights("model", _blobs(folder, {name: None}, stack, gathered))
    return gathered


def from_hf(folder: str, stack: ExitStack, *, trusted: bool = False) -> Gathered:
    """Read a folder of Transformers' `Trainer` or of `Accelerator.save_state`.

    Raises:
        CorruptCheckpointError: a file is damaged or missing, lacks what the index says, or two files have a tensor of
            the same name.
    """
    gathered = Gathered()
    names = sorted(os.listdir(folder))
    used: set[str] = set()
    source: dict[str, str] = {}  # part of the state -> the file it was taken from
    state: dict[str, Any] = {}
    mapped: list[tuple[int, int]] = []
    models: dict[str, dict[str, Blob]] = {}
    for whole in (WEIGHTS_NAME, _BIN):
        index = whole + _INDEX_END
        files = _indexed(folder, index) or dict.fromkeys([whole] if whole in names else _shards(names, whole))
        if not files:
            continue
        _check_families(folder, files)
        used |= {index, *(file.partition("/")[0] for file in files)}
        source["model"] = index if index in names else next(iter(files))
        if whole == WEIGHTS_NAME:
            models["model"] = _blobs(folder, files, stack, gathered)
        else:
            state["model"] = _torch_files(folder, files, mapped, gathered, trusted=trusted)
        break
    for name in names:
        label = _part_of(name)
        if not (_OTHER_MODEL.fullmatch(name) or _STATES.fullmatch(name)) or label is None or label in source:
            continue
        used.add(name)
        if name.endswith(".safetensors"):
            models[label] = _blobs(folder, {name: None}, stack, gathered, label)
        else:
            _take(state, label, own_file(folder, name), mapped, gathered, trusted=trusted)
        if label in models or label in state:
            source[label] = name
    if "trainer_state.json" in names:
        used.add("trainer_state.json")
        state["trainer_state"] = trainer = _json(own_file(folder, "trainer_state.json"))
        step = trainer.get("global_step") if isinstance(trainer, dict) else None
        gathered.position(step)
    _finish(gathered, state, models, mapped)
    for name, key in _SHARDED.items():
        if key not in gathered.tree and os.path.isfile(os.path.join(folder, name, METADATA_NAME)):
            used.add(name)
            gathered.join(from_dcp(own_file(folder, name), stack), inside=name)
            source[key] = name
    source = {part: name for part, name in source.items() if part in gathered.tree}
    gathered.not_taken += [(name, _why_not(os.path.join(folder, name), source)) for name in names if name not in used]
    return gathered


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


def _torch_files(
    folder: str, files: _Files, mapped: list[tuple[int, int]], gathered: Gathered, *, trusted: bool
) -> Any:
    """Read one torch file, or the tensors of several."""
    merged: dict[str, Any] = {}
    for file, wanted in files.items():
        content = _torch_file(own_file(folder, file), mapped, trusted=trusted)
        if wanted is None and len(files) == 1:
            return content
        if not isinstance(content, Mapping):
            raise CorruptCheckpointError(
                f"{folder}/{file} holds a {type(content).__name__}, no tensors by name", file=file
            )
        for name in _taken(folder, file, content, wanted, "model", gathered):
            _check_new(folder, file, name, merged)
            merged[name] = content[name]
    return merged


def _torch_file(path: str, mapped: list[tuple[int, int]], *, trusted: bool) -> Any:
    content = read_torch(path, trusted=trusted)
    mapped += mapped_ranges(path)
    return content


def _indexed(folder: str, name: str) -> _Files | None:
    """Return the files that an index names, and their tensors; None if there is no index.

    Raises:
        CorruptCheckpointError: the index is damaged, or a file that it names is missing.
    """
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return None
    with open(own_file(folder, name), "rb") as file:
        body = loads(file.read(_MAX_INDEX), max_bytes=_MAX_INDEX, where=path)
    file_of = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(file_of, dict):
        raise CorruptCheckpointError(f"{path} has no weight_map", file=name)
    tensors: dict[str, set[str]] = {}
    for tensor, shard in file_of.items():
        tensors.setdefault(check_path(shard, where=path), set()).add(tensor)
    for shard in sorted(tensors):
        if not os.path.exists(os.path.join(folder, shard)):
            raise CorruptCheckpointError(f"{path} names {shard}, which is missing: fetch it again", file=shard)
    return {shard: tensors[shard] for shard in sorted(tensors)}


def _shards(names: Iterable[str], whole: str) -> list[str]:
    """Return the files that are named as parts of ``whole`` ("model.safetensors"), for a folder without an index."""
    stem, ending = os.path.splitext(whole)
    return sorted(
        name for name in names if (found := _SHARD.fullmatch(name)) and (found[1], found[4]) == (stem, ending)
    )


def _check_families(folder: str, files: _Files) -> None:
    """Refuse files of ``-00001-of-00003`` and the like that are not all there; an index says itself what there is."""
    families: dict[tuple[str, str, str], set[int]] = {}
    for name, wanted in files.items():
        if wanted is None and (found := _SHARD.fullmatch(name)):
            families.setdefault((found[1], found[3], found[4]), set()).add(int(found[2]))
    for (stem, total, ending), numbers in sorted(families.items()):
        first = 0 if 0 in numbers else 1
        gone = (number for number in range(first, first + int(total)) if number not in numbers)
        if missing := list(islice(gone, _NAMED)):
            names = ", ".join(f"{stem}-{number:0{len(total)}d}-of-{total}{ending}" for number in missing)
            raise CorruptCheckpointError(
                f"{folder} has {len(numbers)} of the {int(total)} files of {stem}{ending}; missing: {names}"
                f"{' and more' if next(gone, None) is not None else ''}: fetch them again"
            )


def _taken(
    folder: str, file: str, have: Collection[str], wanted: set[str] | None, item: str, gathered: Gathered
) -> list[str]:
    """Return the tensors to take of a file, in its order; what the index does not name there goes to ``not_taken``.

    Raises:
        CorruptCheckpointError: the file lacks tensors that the index names there.
    """
    if wanted is None:
        return list(have)
    if missing := sorted(wanted.difference(have)):
        raise CorruptCheckpointError(
            f"{folder}: {file} lacks {listed(map(repr, missing), _NAMED)}, which the index says it has: "
            "one of them is of another version; fetch both again",
            file=file,
            tensor=missing[0],
        )
    gathered.not_taken += [
        (f"{item}/{name}", f"{file} has it, and the index does not name it there")
        for name in have
        if name not in wanted
    ]
    return [name for name in have if name in wanted]


def _check_new(folder: str, file: str, name: str, known: Collection[str]) -> None:
    if name in known:
        raise CorruptCheckpointError(f"{folder}: two files have a tensor {name!r}", file=file, tensor=name)


def _blobs(folder: str, files: _Files, stack: ExitStack, gathered: Gathered, item: str = "model") -> dict[str, Blob]:
    blobs: dict[str, Blob] = {}
    for file, wanted in files.items():
        head, tail = os.path.split(own_file(folder, file))
        reader = stack.enter_context(LocalStorage(head).open(tail))
        entries = read_header(reader, os.path.join(folder, file)).entries
        for name in _taken(folder, file, entries, wanted, item, gathered):
            entry = entries[name]
            dtype = _TORCH.get(entry.dtype)
            if dtype is None:
                gathered.not_taken.append(
                    (f"{item}/{name}", f"the dtype {entry.dtype} of safetensors is not known here")
                )
                continue
            _check_new(folder, file, name, blobs)
            parts = partial(ranges, reader, entry.offset, entry.nbytes)
            blobs[name] = Blob(name, dtype, entry.shape, parts, item_size(dtype) or 1)
    return blobs
