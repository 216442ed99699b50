"""A StorageWriter for torch.distributed.checkpoint whose checkpoints are ours: committed, digested, read by `load`."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.identity import manifest_fields, new_start_id
from holdfast.errors import CheckpointExistsError, ConfigError, UnsupportedStateError
from holdfast.format.boxes import Box
from holdfast.format.codec import dumps
from holdfast.format.commit import PartSummary, Replaced, commit, look_before
from holdfast.format.names import MANIFEST_NAME
from holdfast.state.save.torch_file import tensor_bytes
from holdfast.state.tree.arrays import check_tensor, dtype_name
from holdfast.state.tree.sharded import is_spread, local_tensor

from .blobs import Blob
from .dcp_place import DcpPlace
from .part import DirectPartWriter, Row
from .tree import nested, node_of, tensor_name

__all__ = ["HoldfastWriter"]

_Paths = Mapping[str, tuple[str | int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a rank tells the coordinator with a result: the node of a plain value, and once the files it wrote."""

    node: Any = None
    part: Any = None


class HoldfastWriter(DcpPlace, StorageWriter):
    """Makes ``dcp.save`` and ``dcp.async_save`` write Holdfast checkpoints.

    Each rank writes its own files, durably; the coordinator commits when all have. Until then there is no checkpoint.
    `holdfast.load` reads the result into live objects on any number of ranks, `HoldfastReader` into a state dict.

    Args:
        path: path or URI of the checkpoint; DCP's ``checkpoint_id`` replaces it.
        overwrite: replace a committed checkpoint there; the old one is readable until the new one commits.
        step: training step to record.
        metrics: numbers to record.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.overwrite, self.step, self.metrics = overwrite, step, dict(metrics or {})
        self._rank = 0
        self._replaced = Replaced()

    def storage_meta(self) -> StorageMeta | None:
        """Describe this save to the planner."""
        return StorageMeta(checkpoint_id=self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the rank."""
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if many and not kwargs.get("use_collectives", True):
            raise ConfigError(
                "HoldfastWriter commits one checkpoint of all ranks: call dcp.save without use_collectives=False"
            )
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse to replace a checkpoint before anything is written."""
        target = self._target()
        if not self.overwrite and target.storage.exists(f"{target.directory}/{MANIFEST_NAME}"):
            raise CheckpointExistsError(
                f"{target.uri} is a committed checkpoint already: HoldfastWriter(..., overwrite=True) replaces it, or "
                "use another name"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Look at what saves that died have left, which goes after the commit; no rank writes before this returns."""
        target = self._target()
        self._replaced = look_before(target.storage, target.directory)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has of the state; durable when the future is done, which it is on return."""
        target = self._target()
        paths: _Paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        tied = _ties(planner, paths)
        rows: list[Row] = []
        told: list[tuple[WriteItem, int, Any]] = []
        for item in plan.items:
            name = tensor_name(paths.get(item.index.fqn, (item.index.fqn,)))
            if item.type == WriteItemType.BYTE_IO:
                node, flat = node_of(_plain_value(planner, item), name)
                rows += [_row(key, tensor) for key, tensor in zip(flat.names, flat.tensors, strict=True)]
                told.append((item, 0, node))
            else:
                row = _row(name, planner.resolve_data(item), item)
                rows += [row] if name not in tied and (row.blob.nbytes or not all(row.shape)) else []
                told.append((item, row.blob.nbytes, None))
        writer = DirectPartWriter(target.storage, target.directory, f"{new_start_id()}-1", rank=self._rank)
        part = writer.write(rows, tied).to_json() if rows else None
        results = [
            WriteResult(item.index, size, _Told(node=node, part=None if number else part))
            for number, (item, size, node) in enumerate(told)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: write the structure, then the manifest."""
        target = self._target()
        paths: _Paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        told = [result for rank in results for result in rank]
        plain = {result.index.fqn: result.storage_data.node for result in told}
        nodes = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            path = paths.get(fqn, (fqn,))
            is_plain = isinstance(entry, BytesStorageMetadata)
            nodes[path] = plain[fqn] if is_plain else {"$": "tensor", "n": tensor_name(path)}
        parts = [
            PartSummary.from_json(result.storage_data.part) for result in told if result.storage_data.part is not None
        ]
        keeper = DirectPartWriter(target.storage, target.directory, f"{new_start_id()}-1", rank=self._rank)
        state = keeper.state(dumps(nested(nodes)))
        own = next((part for part in parts if part.writer == self._rank), PartSummary(writer=self._rank))
        parts = [part for part in parts if part is not own]
        parts.append(PartSummary(writer=self._rank, files=(*own.files, state)))
        fields = manifest_fields(
            run_id=None,
            checkpoint_id=uuid.uuid4().hex,
            parent=None,
            attempt=1,
            step=self.step,
            epoch=None,
            metrics=self.metrics,
        )
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        commit(
            target.storage,
            target.directory,
            {**fields, "world_size": world_size},
            sorted(parts, key=lambda part: part.writer),
            overwrite=self._replaced if self.overwrite or self._replaced.etag == "" else None,
        )

    def _target(self) -> Checkpoint:
        if self.path is None:
            raise ConfigError("HoldfastWriter needs a path: HoldfastWriter(path), or dcp.save(..., checkpoint_id=path)")
        return Checkpoint(self.path)


def _row(name: str, tensor: Any, item: WriteItem | None = None) -> Row:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedStateError(f"{name}: the planner gave a {type(tensor).__name__} where a tensor was planned")
    tensor = tensor.detach()
    check_tensor(tensor, name)
    shape = tuple(tensor.shape)
    blob = Blob(name, dtype_name(tensor.dtype), shape, partial(tensor_bytes, tensor), tensor.itemsize)
    if item is None or item.tensor_data is None:
        return Row(name, blob, shape)
    whole = tuple(item.tensor_data.size)
    box = Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
    return Row(name, blob, whole, None if box.shape == whole else box)


def _plain_value(planner: SavePlanner, item: WriteItem) -> Any:
    """Return a value that is no tensor. DCP would store it as a pickle; the object itself is what we want."""
    if (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise UnsupportedStateError(f"{item.index.fqn}: the planner gave a {type(data).__name__}")
    data.seek(0)
    return torch.load(data, weights_only=True)


def _ties(planner: SavePlanner, paths: _Paths) -> dict[str, str]:
    """Find tensors that are the same memory: name -> name of the first, which is the one that is stored."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    state: Mapping[str, Any] = getattr(planner, "state_dict", None) or {}
    for fqn, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = local_tensor(value) if is_spread(value) else value
        if not local.numel() or not local.data_ptr():
            continue
        key = (local.data_ptr(), local.device, local.dtype, tuple(value.shape), local.shape, local.stride())
        name = tensor_name(paths.get(fqn, (fqn,)))
        original = first.setdefault(key, name)
        if original != name:
            tied[name] = original
    return tied
