"""A StorageReader for torch.distributed.checkpoint that reads checkpoints of ours, whoever saved them."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.newest import newest_of_run
from holdfast.errors import ConfigError
from holdfast.format.boxes import Box
from holdfast.format.index import Piece
from holdfast.state.load.read_request import ReadRequest
from holdfast.state.load.reader import read_tensors
from holdfast.state.load.spans import spans
from holdfast.state.load.targets import box_of
from holdfast.state.save.torch_plain import from_plain
from holdfast.state.tree.arrays import dtype_of

from .dcp_place import DcpPlace
from .source import OpenedCheckpoint
from .to_dcp import flatten_for_dcp

__all__ = ["HoldfastReader"]


class HoldfastReader(DcpPlace, StorageReader):
    """Makes ``dcp.load`` read Holdfast checkpoints, also those of `holdfast.save` and of a `Checkpointer`.

    A tensor of a module saved as "model" is called "model.<its name>", what an optimizer keeps
    "optimizer.state.<parameter>.<key>", as in ``torch.distributed.checkpoint.state_dict``. Any layout is read into any
    other; each rank reads the bytes it needs, straight into its tensors, checked against their digests.

    Args:
        path: path or URI of the checkpoint; DCP's ``checkpoint_id`` replaces it.
        verify: check digests.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, verify: bool = True) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.verify = verify
        self._source: OpenedCheckpoint | None = None
        self._values: dict[str, Any] = {}
        self._pieces: dict[tuple[str, tuple[int, ...]], tuple[Piece, torch.dtype, Box]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from ``checkpoint_id`` if that is given."""
        super().reset(checkpoint_id)
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe the checkpoint in DCP's terms."""
        if self.path is None:
            raise ConfigError("HoldfastReader needs a path: HoldfastReader(path), or dcp.load(..., checkpoint_id=path)")
        self._close()
        of = newest_of_run(Checkpoint(self.path))
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        source = self._source = OpenedCheckpoint(of.storage.child(of.directory), rank=rank, verify=self.verify)
        entries: dict[str, Any] = {}
        mappings: dict[str, Any] = {}
        for key, path, value in flatten_for_dcp(source.plain(by_name=True)):
            mappings[key] = path
            if isinstance(value, torch.Tensor):
                entries[key] = self._tensor(key, source.name_of(value), source)
            else:
                entries[key], self._values[key] = BytesStorageMetadata(), value
        return Metadata(entries, planner_data=mappings, storage_data={}, storage_meta=StorageMeta(self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: everything is known from `read_metadata`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything of this rank's plan.

        Raises:
            CorruptCheckpointError: stored bytes are damaged.
        """
        source = self._source
        if source is None:
            raise ConfigError("read_data without read_metadata: use this reader through dcp.load")
        requests: list[ReadRequest] = []
        targets = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes(item.storage_index.fqn, source))
                continue
            target = planner.resolve_tensor(item).detach()
            targets.append((item, target))
            requests += self._requests(item.storage_index, item.storage_offsets, item.lengths, target)
        stored = source.stored
        with torch.no_grad():
            read_tensors(stored.storage, requests, stored.digests if self.verify else None)
        for item, target in targets:
            planner.commit_tensor(item, target)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, key: str, name: str, source: OpenedCheckpoint) -> TensorStorageMetadata:
        entry = source.stored.entry(name)
        dtype, chunks = dtype_of(entry.dtype), []
        for piece in entry.pieces:
            box = box_of(piece, entry.shape)
            self._pieces[key, box.start] = piece, dtype, box
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape)))
        return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry.shape), chunks)

    def _requests(
        self, index: MetadataIndex, offsets: torch.Size, lengths: torch.Size, target: torch.Tensor
    ) -> list[ReadRequest]:
        piece, dtype, box = self._pieces[index.fqn, tuple(index.offset or ())]
        wanted = Box(tuple(a + b for a, b in zip(box.start, offsets, strict=True)), tuple(lengths))
        return list(spans(index.fqn, piece, box, wanted, target, dtype)) if target.numel() else []

    def _bytes(self, key: str, source: OpenedCheckpoint) -> io.BytesIO:
        """Serialize a plain value as the default planner expects it: it reads its own pickle, made of our data."""

        def read(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return source.read(value)
            if isinstance(value, dict):
                return type(value)((name, read(item)) for name, item in value.items())
            return type(value)(map(read, value)) if type(value) in (list, tuple) else value

        data = io.BytesIO()
        torch.save(from_plain(read(self._values[key])), data)
        data.seek(0)
        return data

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source, self._values, self._pieces = None, {}, {}
