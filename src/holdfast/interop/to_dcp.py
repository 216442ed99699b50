"""Export as a directory of torch.distributed.checkpoint: a file with the data, and ``.metadata`` with its layout."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.state.save.torch_file import MARK, TorchFileWriter

from .sink import ExportFolder
from .source import OpenedCheckpoint

__all__ = ["DATA_NAME", "METADATA_NAME", "flatten_for_dcp", "write_dcp"]

METADATA_NAME = ".metadata"
DATA_NAME = "__0_0.distcp"

Path = tuple[str | int, ...]


def write_dcp(folder: ExportFolder, source: OpenedCheckpoint) -> int:
    """Write the directory, metadata last; returns the number of tensors."""
    import torch.distributed.checkpoint.filesystem as theirs
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.check_free(METADATA_NAME, DATA_NAME)
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    values: list[Any] = []
    mappings: dict[str, Path] = {}
    offset = num_tensors = 0
    for key, path, item in flatten_for_dcp(source.plain(by_name=True)):
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


def flatten_for_dcp(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Path, Any]]:
    """Yield (key, path, value) as DCP's own planner does: dicts always open, lists if they hold dicts or tensors."""

    def walk(value: Any, path: Path) -> Iterator[tuple[str, Path, Any]]:
        if isinstance(value, Mapping) and MARK not in value:
            for key, item in value.items():
                yield from walk(item, (*path, str(key)))
        elif isinstance(value, list) and _opens(value):
            for number, item in enumerate(value):
                yield from walk(item, (*path, number))
        else:
            yield ".".join(map(str, path)), path, value

    yield from walk(tree, ())


def _opens(value: list[Any]) -> bool:
    return any(isinstance(item, (torch.Tensor, Mapping)) or (isinstance(item, list) and _opens(item)) for item in value)
