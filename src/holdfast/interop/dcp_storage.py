"""A StorageWriter and a StorageReader of torch.distributed.checkpoint for Holdfast checkpoints.

A checkpoint that DCP saves through `HoldfastWriter` is committed, has digests, and `holdfast.load` reads it.
`HoldfastReader` reads any Holdfast checkpoint, whether DCP saved it or not.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.checkpoint.handle import Checkpoint, newest_of_run
from holdfast.checkpointer.pending_saves import new_start_id
from holdfast.errors import ConfigError, UnsupportedStateError
from holdfast.format.codec import dumps
from holdfast.format.commit import PartSummary, Replaced, look_before
from holdfast.format.division import Box
from holdfast.format.index import Piece
from holdfast.run.names import check_free
from holdfast.state.load.reader import read_tensors
from holdfast.state.load.targets import ReadRequest, box_of, spans
from holdfast.state.save.torch_file import from_plain, tensor_bytes
from holdfast.state.tree.arrays import check_tensor, dtype_name, dtype_of, is_spread, local_tensor

from .blobs import Blob, DirectPartWriter, Row, commit_alone
from .export import flatten_for_dcp
from .gathered import nested, node_of, tensor_name, tensor_names
from .source import OpenedCheckpoint, paths_of_one_name

_Path = tuple[str | int, ...]
_Paths = Mapping[str, _Path]


class _Place:
    """The location of the checkpoint, for a StorageWriter or a StorageReader; a base class before that of DCP.

    Attributes:
        path: path or URI of the checkpoint; None until DCP's ``checkpoint_id`` gives it.
    """

    path: str | None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, at ``checkpoint_id`` if that is given."""
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """Path or URI of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a location."""
        try:
            Checkpoint(checkpoint_id)
        except ConfigError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankResult:
    """A rank's message to the coordinator with a result: the node of a plain value; in the first, its files."""

    node: Any = None
    part: Any = None


class HoldfastWriter(_Place, StorageWriter):
    """Makes ``dcp.save`` and ``dcp.async_save`` write Holdfast checkpoints.

    Each rank writes its own files, durably; the coordinator commits when all have. Until then there is no checkpoint.
    `holdfast.load` reads the result into live objects on any number of ranks, `HoldfastReader` into a state dict.

    Args:
        path: path or URI of the checkpoint; DCP's ``checkpoint_id`` replaces it.
        overwrite: replace a committed checkpoint there; the old checkpoint is readable until the new commits.
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
        """Take the rank from DCP.

        Raises:
            ConfigError: several ranks would save without collectives.
        """
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if many and not kwargs.get("use_collectives", True):
            raise ConfigError(
                "HoldfastWriter commits one checkpoint of all ranks: call dcp.save without use_collectives=False"
            )
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse to replace a checkpoint before anything is written.

        Raises:
            CheckpointExistsError: the path is committed already, and ``overwrite`` is false; or it is a run.
        """
        target = self._target()
        check_free(target.storage, target.directory, overwrite=self.overwrite, where=" in HoldfastWriter(...)")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Note the files of earlier saves, which the commit removes; no rank writes before this returns.

        Raises:
            ConfigError: two tensors would have one name.
        """
        paths = {
            _paths(plan).get(item.index.fqn, (item.index.fqn,))
            for plan in plans
            for item in plan.items
            if item.type != WriteItemType.BYTE_IO
        }
        _check_names((path, [tensor_name(path)]) for path in paths)
        target = self._target()
        self._replaced = look_before(target.storage, target.directory)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the state. On return the files are durable and the future is done."""
        target = self._target()
        paths = _paths(plan)
        tied = _ties(planner, paths)
        rows: list[Row] = []
        done_items: list[tuple[WriteItem, int, Any]] = []
        for item in plan.items:
            name = tensor_name(paths.get(item.index.fqn, (item.index.fqn,)))
            if item.type == WriteItemType.BYTE_IO:
                node, flat = node_of(_plain_value(planner, item), name)
                rows += [_row(key, tensor) for key, tensor in zip(flat.names, flat.tensors, strict=True)]
                done_items.append((item, 0, node))
            else:
                row = _row(name, planner.resolve_data(item), item)
                rows += [row] if name not in tied and (row.blob.nbytes or not all(row.shape)) else []
                done_items.append((item, row.blob.nbytes, None))
        writer = DirectPartWriter(target.storage, target.directory, f"{new_start_id()}-1", rank=self._rank)
        part = writer.write(rows, tied).to_json() if rows else None
        results = [
            WriteResult(item.index, size, _RankResult(node=node, part=None if number else part))
            for number, (item, size, node) in enumerate(done_items)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: write the structure, then the manifest.

        Raises:
            ConfigError: two tensors have one name; nothing is committed.
        """
        target = self._target()
        paths = _paths(metadata)
        every = [result for rank in results for result in rank]
        plain = {result.index.fqn: result.storage_data.node for result in every}
        nodes = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            path = paths.get(fqn, (fqn,))
            is_plain = isinstance(entry, BytesStorageMetadata)
            nodes[path] = plain[fqn] if is_plain else {"$": "tensor", "n": tensor_name(path)}
        _check_names((path, tensor_names(node)) for path, node in nodes.items())
        parts = [
            PartSummary.from_json(result.storage_data.part) for result in every if result.storage_data.part is not None
        ]
        keeper = DirectPartWriter(target.storage, target.directory, f"{new_start_id()}-1", rank=self._rank)
        state = keeper.state(dumps(nested(nodes)))
        own = next((part for part in parts if part.writer == self._rank), PartSummary(writer=self._rank))
        parts = [part for part in parts if part is not own]
        parts.append(PartSummary(writer=self._rank, files=(*own.files, state)))
        parts.sort(key=attrgetter("writer"))
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        commit_alone(
            target, parts, self._replaced, overwrite=self.overwrite, step=self.step, metrics=self.metrics,
            world_size=world_size,
        )  # fmt: skip

    def _target(self) -> Checkpoint:
        if self.path is None:
            raise ConfigError("HoldfastWriter needs a path: HoldfastWriter(path), or dcp.save(..., checkpoint_id=path)")
        return Checkpoint(self.path)


def _paths(plan: SavePlan | Metadata) -> _Paths:
    return plan.planner_data if isinstance(plan.planner_data, dict) else {}


def _check_names(tensors: Iterable[tuple[_Path, Iterable[str]]]) -> None:
    """Refuse names of tensors, by the path of what they belong to, that would occur twice in the checkpoint."""
    if twice := paths_of_one_name((name, path) for path, names in tensors for name in names):
        raise ConfigError(
            f"HoldfastWriter cannot store these tensors: {'; '.join(sorted(twice.values()))}: rename a key"
        )


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
    """Return a value that is no tensor. DCP would store it as a pickle; this asks the planner for the object."""
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
    """Find tensors that are the same memory: name -> name of the first tensor with that memory, which is stored."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    state: Mapping[str, Any] = getattr(planner, "state_dict", None) or {}
    for fqn, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = local_tensor(value) if is_spread(value) else value
        if not local.numel() or not local.data_ptr():
            continue
        seen = (local.data_ptr(), local.device, local.dtype, local.shape, local.stride())
        key = (*seen, local.is_conj(), local.is_neg(), tuple(value.shape))
        name = tensor_name(paths.get(fqn, (fqn,)))
        original = first.setdefault(key, name)
        if original != name:
            tied[name] = original
    return tied


class HoldfastReader(_Place, StorageReader):
    """Makes ``dcp.load`` read Holdfast checkpoints, also those of `holdfast.save` and of a `Checkpointer`.

    A tensor of a module saved as "model" is called "model.<its name>", the state of an optimizer
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
        self._twice: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from ``checkpoint_id`` if that is given."""
        super().reset(checkpoint_id)
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe the checkpoint as DCP's metadata; opens it."""
        if self.path is None:
            raise ConfigError("HoldfastReader needs a path: HoldfastReader(path), or dcp.load(..., checkpoint_id=path)")
        self._close()
        of = newest_of_run(Checkpoint(self.path))
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        source = self._source = OpenedCheckpoint(of.storage.child(of.directory), rank=rank, verify=self.verify)
        entries: dict[str, Any] = {}
        mappings: dict[str, Any] = {}
        flat = list(flatten_for_dcp(source.plain(by_name=True)))
        self._twice = paths_of_one_name((key, keys) for key, _, keys, _ in flat)
        for key, path, _, value in flat:
            mappings[key] = path
            if isinstance(value, torch.Tensor):
                entries[key] = self._tensor(key, source.name_of(value), source)
            else:
                entries[key], self._values[key] = BytesStorageMetadata(), value
        return Metadata(entries, planner_data=mappings, storage_data={}, storage_meta=StorageMeta(self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is.

        Raises:
            ConfigError: two values of the checkpoint have a key that is wanted.
        """
        if twice := {
            self._twice[item.storage_index.fqn] for item in plan.items if item.storage_index.fqn in self._twice
        }:
            raise ConfigError(f"HoldfastReader cannot tell: {'; '.join(sorted(twice))}: use holdfast.load")
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
        """Serialize a plain value with ``torch.save``, as the default planner expects it."""

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
