"""`export`: a Holdfast checkpoint in the format of another library.

That is one file for ``torch.load``; a directory of torch.distributed.checkpoint, which is a file with the data, and
``.metadata`` with its layout; or weights as safetensors, one file, or shards with an index, as Hugging Face
Transformers lays them out.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast._units import parse_bytes
from holdfast.checkpoint.handle import Checkpoint, newest_of_run
from holdfast.errors import ConfigError
from holdfast.format.tensor_file import DTYPES, lay_out, split_by_size
from holdfast.state.save.torch_file import MARK, TorchFileWriter
from holdfast.state.tree.values import ObjectNode, TensorRef

from .blobs import METADATA_NAME, WEIGHTS_NAME, Blob, ExportFolder, rows_of
from .source import OpenedCheckpoint, paths_of_one_name

FORMATS = ("safetensors", "torch", "dcp", "hf")
_HF_SHARD = 5_000_000_000  # bytes; the default of transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export.

    Attributes:
        destination: URI of what was written.
        format: one of `FORMATS`.
        files: names relative to the destination (its own name if it is one file), and their bytes.
        num_tensors: number of tensors stored; a tied tensor counts as often as it is stored.
        left_out: (path in the state, why) of what the destination lacks.
        too_large: names of tensors with finite values beyond what ``dtype`` holds; they are infinite there, or the
            largest value that it has.
    """

    destination: str
    format: str
    files: tuple[tuple[str, int], ...]
    num_tensors: int
    left_out: tuple[tuple[str, str], ...] = ()
    too_large: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)


def export(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    to: str,
    only: str | Iterable[str] | None = None,
    item: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> Exported:
    """Write a checkpoint in another format, tensor by tensor: needs about 50 MB of memory, no model and no accelerator.

    The checkpoint may be of any number of ranks; parts of a tensor are put together. The files are durable on return,
    and a file has its name only when it is whole.

    Args:
        checkpoint: path, URI or `Checkpoint`; for a run, its newest checkpoint is taken.
        destination: path or URI: a file for "torch" and (if it ends with ".safetensors") "safetensors", else a
            directory.
        to: "safetensors" (weights of one item under their names), "hf" (the same in the layout of Hugging Face
            Transformers: shards of 5 GB, tied tensors once), "torch" (everything, for
            ``torch.load(weights_only=True)``), "dcp" (everything, for ``torch.distributed.checkpoint.load``).
        only: names or globs over "/"-joined paths; None takes everything.
        item: for safetensors and hf, the item of the state whose tensors are written; None: "model", or the only item
            with tensors.
        dtype: floating tensors are converted to it; ``too_large`` of the result names those it cannot hold.
        max_shard_size: for safetensors and hf, bytes or text such as "2GB"; larger weights make several files and an
            index.
        overwrite: replace existing files.
        verify: check every byte that is read against its digest.

    Raises:
        ConfigError: the arguments contradict each other, or the format cannot hold the values to write.
        CheckpointExistsError: the destination exists, and ``overwrite`` is false; or it is a run or a checkpoint.
        CorruptCheckpointError: stored bytes are damaged.

    Example:
        >>> import tempfile, torch, holdfast
        >>> folder = tempfile.mkdtemp()
        >>> saved = holdfast.save(f"{folder}/mine", {"model": {"weight": torch.ones(3)}, "step": 5})
        >>> export(saved, f"{folder}/mine.pt", to="torch").num_tensors
        1
        >>> torch.load(f"{folder}/mine.pt", weights_only=True)
        {'model': {'weight': tensor([1., 1., 1.])}, 'step': 5}
    """
    return watched_export(
        checkpoint, destination, to=to, only=only, item=item, dtype=dtype, max_shard_size=max_shard_size,
        overwrite=overwrite, verify=verify,
    )  # fmt: skip


def watched_export(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    to: str,
    only: str | Iterable[str] | None = None,
    item: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Callable[[int | None, int], object] = lambda total, done: None,
) -> Exported:
    """Do what `export` does; ``progress`` gets (bytes to be read, 0), then (None, bytes just read)."""
    if to not in FORMATS:
        raise ConfigError(f"cannot export to {to!r}: use one of {', '.join(FORMATS)}")
    if to in ("torch", "dcp") and (item is not None or max_shard_size is not None):
        raise ConfigError(f"item and max_shard_size are for safetensors and hf, not for {to}: use only=... (--only)")
    of = newest_of_run(checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint))
    target = Checkpoint(destination)
    text = os.fspath(destination)
    is_file = to == "torch" or (to == "safetensors" and text.endswith(".safetensors"))
    if is_file:
        folder = ExportFolder(target.storage, target.directory.rpartition("/")[0], overwrite=overwrite)
        folder.check_free(target.name)
    else:
        folder = ExportFolder(target.storage, target.directory, overwrite=overwrite)
        folder.check_foreign()
    storage = of.storage.child(of.directory)
    report = partial(progress, None)
    with OpenedCheckpoint(storage, only=only, dtype=_dtype(dtype), verify=verify, progress=report) as source:
        left_out = _ranks_left_out(source)
        if to == "torch":
            progress(source.nbytes, 0)
            writer = TorchFileWriter(source.plain())
            with folder.create(target.name, writer.size) as sink:
                writer.write(sink, (source.blob(tensor).parts() for tensor in writer.tensors))
            count = len(writer.tensors)
        elif to == "dcp":
            progress(source.nbytes, 0)
            count = _write_dcp(folder, source)
        else:
            tensors, without = _weights(source, item, keep_ties=to == "safetensors")
            progress(sum(source.named(blob.name).nbytes for blob in tensors.values()), 0)
            limit = _bytes(max_shard_size) if max_shard_size is not None else (_HF_SHARD if to == "hf" else None)
            name = target.name if is_file else WEIGHTS_NAME
            _write_safetensors(folder, tensors, name=name, max_shard_bytes=limit)
            count, left_out = len(tensors), without
    return Exported(
        destination=target.uri,
        format=to,
        files=tuple(folder.written),
        num_tensors=count,
        left_out=tuple(left_out),
        too_large=tuple(sorted(source.too_large)),
    )


def _ranks_left_out(source: OpenedCheckpoint) -> list[tuple[str, str]]:
    """Return (path, why) of values of single ranks: only those of rank 0 are written."""
    ranks = sum(entry.role == "rank" for entry in source.stored.manifest.files)
    if ranks < 2:
        return []
    return [
        (key, f"the values of {ranks - 1} other ranks: only that of rank 0 is written")
        for key in source.stored.per_rank or ()
    ]


def _dtype(dtype: torch.dtype | str | None) -> Any:
    if dtype is None:
        return None
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}: give a floating dtype of torch, such as 'bfloat16' or 'float16'")
    return resolved


def _bytes(size: int | str) -> int:
    found = parse_bytes(size) if isinstance(size, str) else size
    if not isinstance(found, int) or found <= 0:
        raise ConfigError(f"max_shard_size={size!r}: give bytes, or a text such as '500MB' or '5GB'")
    return found


# ---- torch.distributed.checkpoint


_DATA_NAME = "__0_0.distcp"

Path = tuple[str | int, ...]


def _write_dcp(folder: ExportFolder, source: OpenedCheckpoint) -> int:
    """Write the directory, metadata last; returns the number of tensors.

    Raises:
        ConfigError: two values would have one key.
    """
    import torch.distributed.checkpoint.filesystem as theirs
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    flat = list(flatten_for_dcp(source.plain(by_name=True)))
    if twice := paths_of_one_name((key, keys) for key, _, keys, _ in flat):
        raise ConfigError(f"dcp cannot hold both: {'; '.join(sorted(twice.values()))}: export to 'torch'")
    folder.check_free(METADATA_NAME, _DATA_NAME)
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    values: list[Any] = []
    mappings: dict[str, Path] = {}
    offset = num_tensors = 0
    for key, path, _, item in flat:
        mappings[key] = path
        value = item.detach() if isinstance(item, torch.Tensor) else item
        size = TorchFileWriter(value).size
        if isinstance(value, torch.Tensor):
            origin = torch.Size([0] * value.dim())
            chunks = [ChunkStorageMetadata(offsets=origin, sizes=value.shape)]
            entries[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)
            place = MetadataIndex(key, origin)
            num_tensors += 1
        else:
            entries[key] = BytesStorageMetadata()
            place = MetadataIndex(key)
        storage[place] = theirs._StorageInfo(_DATA_NAME, offset, size)
        offset += size
        values.append(value)
    with folder.create(_DATA_NAME, offset) as sink:
        for value in values:
            writer = TorchFileWriter(value)  # made again: 100 000 kept writers would fill the memory
            writer.write(sink, (source.blob(tensor).parts() for tensor in writer.tensors))
    version = getattr(theirs, "CURRENT_DCP_VERSION", None)  # torch 2.4 has no versions
    versioned = {} if version is None else {"version": version}
    metadata = Metadata(entries, planner_data=mappings, storage_data=storage, **versioned)
    folder.put(METADATA_NAME, pickle.dumps(metadata))
    return num_tensors


def flatten_for_dcp(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Path, tuple[Any, ...], Any]]:
    """Yield (key, path, path in the state, value) as DCP's own planner does.

    Dicts open, lists if they hold dicts or tensors. Keys of dicts become text, so the keys of two values can be the
    same. Plain dicts that would lose an item so are one value, and so are empty dicts: DCP refuses those, and forgets
    these.
    """

    def walk(value: Any, path: Path, keys: tuple[Any, ...]) -> Iterator[tuple[str, Path, tuple[Any, ...], Any]]:
        if isinstance(value, Mapping) and MARK not in value and not (path and _is_one_value(value)):
            for key, item in value.items():
                yield from walk(item, (*path, str(key)), (*keys, key))
        elif isinstance(value, list) and _opens(value):
            for number, item in enumerate(value):
                yield from walk(item, (*path, number), (*keys, number))
        else:
            yield ".".join(map(str, path)), path, keys, value

    yield from walk(tree, (), ())


def _is_one_value(value: Mapping[Any, Any]) -> bool:
    return not value or (len(set(map(str, value))) < len(value) and not _has_tensors(value))


def _has_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, torch.Tensor) or any(map(_has_tensors, items))


def _opens(value: list[Any]) -> bool:
    return any(isinstance(item, (torch.Tensor, Mapping)) or (isinstance(item, list) and _opens(item)) for item in value)


# ---- safetensors


def _weights(
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


def _write_safetensors(
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
