"""Export as a directory of torch.distributed.checkpoint: a file with the data, and ``.metadata`` with its layout."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.state.save.torch_file import MARK, TorchFileWriter

from .sink import ExportFolder
from .source import OpenedCheckpoint, paths_of_one_name

__all__ = ["DATA_NAME", "METADATA_NAME", "flatten_for_dcp", "write_dcp"]

METADATA_NAME = ".metadata"
DATA_NAME = "__0_0.distcp"

Path = tuple[str | int, ...]


def write_dcp(folder: ExportFolder, source: OpenedCheckpoint) -> int:
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
    folder.check_free(METADATA_NAME, DATA_NAME)
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
        storage[place] = theirs._StorageInfo(DATA_NAME, offset, size)
        offset += size
        values.append(value)
    with folder.create(DATA_NAME, offset) as sink:
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
