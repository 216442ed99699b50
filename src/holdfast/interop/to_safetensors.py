"""Export weights as safetensors: one file, or shards with an index, as Hugging Face Transformers lays them out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import ConfigError
from holdfast.format.tensor_file import DTYPES, lay_out, split_by_size
from holdfast.state.tree.values import ObjectNode, TensorRef

from .blobs import Blob, rows_of
from .sink import ExportFolder
from .source import OpenedCheckpoint, paths_of_one_name

__all__ = ["INDEX_NAME", "WEIGHTS_NAME", "weights", "write_safetensors"]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def weights(
    source: OpenedCheckpoint, item: str | None, *, keep_ties: bool
) -> tuple[dict[str, Blob], list[tuple[str, str]]]:
    """Return the tensors of one item of the state by name, and (path, why) of what is left out.

    Args:
        source: the checkpoint.
        item: name of the item; None takes "model", or the only item with tensors.
        keep_ties: store a tied tensor under each of its names; otherwise under its first.

    Raises:
        ConfigError: there is no such item, or safetensors cannot hold its tensors.
    """
    tree = source.stored.tree
    item = _item(tree, item)
    value = tree if item == "" else tree[item]
    found = [((item,), value)] if isinstance(value, TensorRef) else list(_tensors(value, ()))
    names = [".".join(map(str, path)) for path, _ in found]
    above = (item,) if item else ()
    if twice := paths_of_one_name((name, above + path) for name, (path, _) in zip(names, found, strict=True)):
        raise ConfigError(f"safetensors cannot hold both: {'; '.join(sorted(twice.values()))}: export to 'torch'")
    rows = dict(zip(names, (ref for _, ref in found), strict=True))
    left_out = [(str(key), "not weights") for key in tree if item not in ("", key)]
    left_out += [(path, "no tensor") for path in _plain(value, item)]
    blobs: dict[str, Blob] = {}
    first: dict[str, str] = {}
    for name, ref in rows.items():
        original = source.stored.aliases.get(ref.name, ref.name)
        kept = first.setdefault(original, name)
        if kept != name and not keep_ties:
            left_out.append((f"{item}/{name}" if item else name, f"tied to {kept}"))
            continue
        blobs[name] = source.exported(ref)
    if not blobs:
        raise ConfigError(f"{item or 'the state'} has no tensors: name another item (item=..., --item)")
    odd = sorted(name for name, blob in blobs.items() if blob.dtype not in DTYPES)
    if odd:
        raise ConfigError(
            f"safetensors has no dtype {blobs[odd[0]].dtype} (tensor {odd[0]!r}"
            + (f" and {len(odd) - 1} more" if len(odd) > 1 else "")
            + "): export to 'torch' or 'dcp', or leave it out with only=... (--only)"
        )
    if "__metadata__" in blobs:
        raise ConfigError("safetensors cannot hold a tensor called '__metadata__': export to 'torch' or 'dcp'")
    return blobs, left_out


def write_safetensors(
    folder: ExportFolder, tensors: Mapping[str, Blob], *, name: str = WEIGHTS_NAME, max_shard_bytes: int | None = None
) -> None:
    """Write one file, or several files and then their index."""
    names = list(tensors)
    parts = split_by_size([blob.nbytes for blob in tensors.values()], max_shard_bytes)
    shards = [{names[number]: tensors[names[number]] for number in part} for part in parts]
    if len(shards) == 1:
        folder.check_free(name, f"{name}.index.json")
        _write(folder, name, shards[0])
        _clear(folder, name, {name})
        return
    stem = name.removesuffix(".safetensors")
    files = [f"{stem}-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    folder.check_free(name, *files, f"{name}.index.json")
    for shard, file in zip(shards, files, strict=True):
        _write(folder, file, shard)
    home = {tensor: file for shard, file in zip(shards, files, strict=True) for tensor in shard}
    total = sum(blob.nbytes for blob in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": home}
    folder.put(f"{name}.index.json", json.dumps(index, indent=2).encode() + b"\n")
    _clear(folder, name, {*files, f"{name}.index.json"})


def _clear(folder: ExportFolder, name: str, written: set[str]) -> None:
    """Remove other files of a replaced export: readers would take the old weights from them."""
    if not folder.overwrite:
        return
    stem = re.escape(name.removesuffix(".safetensors"))
    family = re.compile(rf"{stem}(-[0-9]{{5}}-of-[0-9]{{5}}\.safetensors|\.safetensors(\.index\.json)?)")
    files = [info.path.rpartition("/")[2] for info in folder.storage.list(folder.prefix, recursive=False)]
    # The index first: without it no reader looks for its shards.
    for file in sorted(files, key=lambda file: not file.endswith(".json")):
        if family.fullmatch(file) and file not in written:
            folder.storage.delete(folder.path(file))


def _write(folder: ExportFolder, name: str, tensors: Mapping[str, Blob]) -> None:
    blobs = list(tensors.values())
    file = lay_out(rows_of(tensors.items()))
    with folder.create(name, file.size) as sink:
        sink(memoryview(file.header))
        for number in file.order:
            for part in blobs[number].parts():
                sink(part)


def _item(tree: Mapping[Any, Any], item: str | None) -> str:
    """Choose the item; "" means that the state itself is a dict of tensors."""
    if item is not None:
        if item in tree:
            return item
        raise ConfigError(f"the checkpoint has no item {item!r}: it has {', '.join(map(str, tree)) or 'nothing'}")
    if "model" in tree:
        return "model"
    holding = [key for key, value in tree.items() if any(True for _ in _tensors(value, ()))]
    modules = [key for key in holding if isinstance(tree[key], ObjectNode) and tree[key].kind == "module"]
    if holding and all(isinstance(tree[key], TensorRef) for key in holding):
        return ""
    if len(modules) == 1 or len(holding) == 1:
        return str((modules or holding)[0])
    raise ConfigError(
        f"the checkpoint has no item 'model' and several that hold tensors ({', '.join(map(str, holding))}): say which "
        "one (item=..., --item)"
    )


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], TensorRef]]:
    value = value.state if isinstance(value, ObjectNode) else value
    if isinstance(value, TensorRef):
        if value.kind != "array":
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(item, (*path, number))


def _plain(value: Any, path: str) -> Iterator[str]:
    value = value.state if isinstance(value, ObjectNode) else value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _plain(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        if not any(True for _ in _tensors(value, ())):
            yield path
    elif not isinstance(value, TensorRef) or value.kind == "array":
        yield path
