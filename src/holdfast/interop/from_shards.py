"""Import what many ranks have written: directories of torch.distributed.checkpoint, and of DeepSpeed.

No code in pickles is run, and no tensors are held. Of `DeepSpeedEngine.save_checkpoint` the float32 weights are taken
by name. With ZeRO they lie flat in the optimizer files, a piece in the file of each rank; the model files give their
order and shapes. Stages 1 and 2 cut one vector of all parameters into equal pieces, stage 3 cuts each parameter. The
source of this layout is DeepSpeed's ``zero_to_fp32.py``.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

import torch

from holdfast.errors import CorruptCheckpointError, StorageNotFoundError, UnsupportedStateError
from holdfast.format.division import Box
from holdfast.format.names import MANIFEST_NAME, UNLISTED, check_links, check_path
from holdfast.state.save.torch_file import from_plain, tensor_bytes
from holdfast.state.tree.arrays import dtype_name
from holdfast.storage.base import FileReader
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.wrapped import InputStream

from .blobs import METADATA_NAME, Blob, BoxReader, Row, assemble
from .gathered import Gathered, mapped_ranges, nested, node_of, own_file, streamed, tensor_name, tensor_names
from .unpickle import MAX_METADATA, Opaque, read_metadata, read_torch, read_torch_stream


def from_dcp(folder: str, stack: ExitStack) -> Gathered:
    """Read a directory; its files stay open in ``stack``.

    Raises:
        CorruptCheckpointError: the metadata is damaged or hostile, or points outside of the files.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    files = _DcpFiles(folder, stack)
    metadata = read_metadata(files.small(METADATA_NAME))
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    gathered = Gathered()
    nodes: dict[tuple[str | int, ...], Any] = {}
    names: set[str] = set()
    for fqn, entry in metadata.state_dict_metadata.items():
        path = _path(paths.get(fqn), fqn)
        if path in nodes:
            raise CorruptCheckpointError(f"{folder}: .metadata has two entries at {list(path)}", file=METADATA_NAME)
        name = tensor_name(path, names)
        if isinstance(entry, TensorStorageMetadata):
            blob = _tensor(name, entry, fqn, places, files)
            gathered.rows.append(Row(name, blob, blob.shape))
            names.add(name)
            nodes[path] = {"$": "tensor", "n": name}
        elif isinstance(entry, BytesStorageMetadata):
            value = from_plain(read_torch_stream(files.part(_place(places, fqn, ())).stream(), name), where=name)
            if isinstance(value, Opaque):
                gathered.not_taken.append((name, f"an object of {value.name}, which is not made here"))
                continue
            node, flat = node_of(value, name, unsupported="drop", taken=names)
            names.update(flat.names)
            gathered.not_taken += [(dropped, "no plain data") for dropped in flat.dropped]
            gathered.add(flat)
            nodes[path] = node
        else:
            raise CorruptCheckpointError(f"{folder}: .metadata describes {fqn!r} as a {type(entry).__name__}")
    gathered.tree.update(nested(nodes))
    counts = Counter(str(path[0]) for path, node in nodes.items() for _ in tensor_names(node))
    gathered.taken += [(key, f"{counts[key]} tensors" if counts[key] else "plain data") for key in gathered.tree]
    known = {METADATA_NAME, MANIFEST_NAME, *files.used}  # the manifest of a reported directory is Holdfast's
    gathered.not_taken += [
        (name, "a file that .metadata does not name") for name in sorted(set(os.listdir(folder)) - known)
    ]
    return gathered


class _DcpFiles:
    """The data files of a directory."""

    def __init__(self, folder: str, stack: ExitStack) -> None:
        self._storage, self._stack = LocalStorage(folder), stack
        self._open: dict[str, FileReader] = {}

    @property
    def used(self) -> set[str]:
        return set(self._open)

    def small(self, name: str) -> bytes:
        reader = self._reader(name)
        if reader.size > MAX_METADATA:
            raise CorruptCheckpointError(f"{name} has {reader.size} bytes: refused", file=name)
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
        return bytes(data)

    def part(self, info: Any) -> _Slice:
        """Open the part of a file that belongs to one item."""
        name, offset, length = (getattr(info, key, None) for key in ("relative_path", "offset", "length"))
        if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
            raise CorruptCheckpointError(f".metadata has the range {str(info)[:200]}", file=METADATA_NAME)
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f".metadata says that items of {name} were transformed ({info.transform_descriptors}): load them with "
                "the extension that wrote them, and save again",
                file=METADATA_NAME,
            )
        reader = self._reader(check_path(name, where=METADATA_NAME))
        if offset + length > reader.size:
            message = f"{name} has {reader.size} bytes, .metadata points to {offset + length}"
            raise CorruptCheckpointError(message, file=name)
        return _Slice(reader, offset, length)

    def _reader(self, name: str) -> FileReader:
        reader = self._open.get(name)
        if reader is None:
            check_links(self._storage, "", (name,))
            try:
                reader = self._open[name] = self._stack.enter_context(self._storage.open(name))
            except StorageNotFoundError as error:
                raise CorruptCheckpointError(f"{name} is gone: this checkpoint is damaged", file=name) from error
        return reader


class _Slice(FileReader):
    """A range of a file as a file of its own; closing it leaves the file open."""

    def __init__(self, reader: FileReader, offset: int, length: int) -> None:
        self._reader, self._offset, self.size = reader, offset, length

    def stream(self) -> io.BufferedReader:
        return io.BufferedReader(InputStream(self), 1 << 16)

    def read_into(self, offset: int, view: memoryview) -> None:
        self._reader.read_into(self._offset + offset, view)

    def close(self) -> None:
        pass


def _path(path: Any, fqn: str) -> tuple[str | int, ...]:
    if isinstance(path, tuple) and path and all(type(step) in (str, int) for step in path):
        return path
    return (fqn,)


def _place(places: dict[Any, Any], fqn: str, start: tuple[int, ...]) -> Any:
    info = places.get((fqn, start))
    if info is None:
        raise CorruptCheckpointError(f".metadata does not say where {fqn!r} {list(start)} is", file=METADATA_NAME)
    return info


def _tensor(name: str, entry: Any, fqn: str, places: dict[Any, Any], files: _DcpFiles) -> Blob:
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f".metadata gives {name!r} the dtype {str(dtype)[:80]}", file=METADATA_NAME)
    parts = []
    for chunk in entry.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        inside = len(box.start) == len(box.shape) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(box.start, box.shape, shape, strict=True)
        )
        if not inside:
            raise CorruptCheckpointError(f".metadata gives {name!r} a box outside of its shape", file=METADATA_NAME)
        if prod(box.shape):
            info = _place(places, fqn, box.start)
            parts.append(BoxReader(box, _Chunk(name, box, dtype, info, files).read))
    return Blob(name, dtype_name(dtype), shape, partial(assemble, name, shape, dtype.itemsize, parts), dtype.itemsize)


class _Chunk:
    """A stored box: a file of ``torch.save`` within a file. The first read finds out where its elements are."""

    def __init__(self, name: str, box: Box, dtype: torch.dtype, info: Any, files: _DcpFiles) -> None:
        self._name, self._box, self._dtype = name, box, dtype
        self._part = files.part(info)
        self._start: int | None = None  # first byte of the elements within the part
        self._data: memoryview | None = None  # the elements, if they are not contiguous in the file

    def read(self, offset: int, view: memoryview) -> None:
        if self._start is None and self._data is None:
            self._find()
        if self._data is None:
            self._part.read_into((self._start or 0) + offset, view)
            return
        view[:] = self._data[offset : offset + len(view)]
        if offset + len(view) == len(self._data):
            self._data = None  # read to its end; a further pass reads it again

    def _find(self) -> None:
        # On the "meta" device torch reads the structure only, which says where in the file the elements are.
        tensor = read_torch_stream(self._part.stream(), self._name, map_location="meta")
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != self._box.shape
            or tensor.dtype != self._dtype
        ):
            raise CorruptCheckpointError(
                f"tensor {self._name!r}: its file does not hold what .metadata says", tensor=self._name
            )
        place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if place is not None and tensor.is_contiguous():
            start = place + tensor.storage_offset() * tensor.itemsize
            if start + tensor.nbytes > self._part.size:
                raise CorruptCheckpointError(f"tensor {self._name!r}: its file ends too early", tensor=self._name)
            self._start = start
        else:  # strided, or an older torch: read the whole box at once
            whole = read_torch_stream(self._part.stream(), self._name)
            self._data = memoryview(b"".join(tensor_bytes(whole)))


# ---- DeepSpeed


_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Files with other parts of a model: mixtures of experts, and pipelines.
_ELSEWHERE = re.compile(r"layer_\d+.*model_states\.pt|expp_rank_\d+_.*optim_states\.pt")
_LATEST = "latest"
# Files without state: the name of the newest tag, DeepSpeed's script, and Holdfast's files in a reported directory.
_ABOUT = frozenset({_LATEST, "zero_to_fp32.py", *UNLISTED})
# Keys of a model file that describe the shards, or that only the live engine can use.
_OWN = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"shared_params", "sparse_tensor_module_names"}
)

Mapped = list[tuple[int, int]]
Piece = tuple[torch.Tensor, Mapped]  # a flat tensor, and the addresses at which its file is mapped


def is_deepspeed(folder: str) -> bool:
    """Tell whether this is a folder of DeepSpeed, or the folder of one tag in it."""
    try:
        return any(map(_MODEL.fullmatch, os.listdir(_tag_folder(folder))))
    except (OSError, CorruptCheckpointError):
        return False


def from_deepspeed(folder: str, *, trusted: bool = False) -> Gathered:
    """Read the weights of any ZeRO stage and the plain data of the client; leave out the moments of the optimizer.

    Raises:
        UnsupportedStateError: no checkpoint of DeepSpeed, or with experts, pipeline stages or model-parallel ranks.
        CorruptCheckpointError: files of ranks are missing, or have another layout.
    """
    given, folder = folder, _tag_folder(folder)
    names = sorted(os.listdir(folder))
    if parts := [name for name in names if _ELSEWHERE.fullmatch(name)]:
        raise UnsupportedStateError(
            f"{folder} has files of experts or of pipeline layers ({parts[0]}): only the model knows how these "
            "belong together. Load it with its engine and save from there, or convert it with DeepSpeed's "
            "ds_to_universal"
        )
    models = _by_rank(folder, names, _MODEL)
    if not models:
        raise UnsupportedStateError(f"{folder} has no *_model_states.pt: it is no checkpoint of DeepSpeed")
    optimizers = _by_rank(folder, names, _OPTIMIZER)
    heads = [read_torch(own_file(folder, name), trusted=trusted) for name in models]
    gathered = Gathered()
    head = heads[0]
    if not isinstance(head, Mapping):
        raise CorruptCheckpointError(f"{folder}/{models[0]} is no state of a model", file=models[0])
    try:
        weights = _weights(folder, heads, models, optimizers, trusted=trusted)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{folder}: its files are not laid out as those of DeepSpeed ({type(error).__name__}: {error})"
        ) from error
    gathered.weights("model", weights)
    gathered.not_taken += [(name, "no file of DeepSpeed's ranks") for name in _others(given, folder)]
    rest = {key: value for key, value in head.items() if key not in _OWN and value is not None}
    if "lr_scheduler" in rest and "scheduler" not in rest:
        rest["scheduler"] = rest.pop("lr_scheduler")
    gathered.values(rest, mapped=mapped_ranges(own_file(folder, models[0])))
    gathered.position(head.get("global_steps"))
    if optimizers or head.get("optimizer") is not None:
        gathered.not_taken.append(("optimizer", "its moments: DeepSpeed alone restores them (engine.load_checkpoint)"))
    return gathered


def _tag_folder(folder: str) -> str:
    """Return the folder of the tag that ``latest`` names; ``folder`` itself if there is no ``latest``."""
    path = os.path.join(folder, _LATEST)
    if not os.path.exists(path):
        return folder
    with open(own_file(folder, _LATEST), encoding="utf-8", errors="replace") as file:
        tag = file.read(4096).strip()
    tag_path = os.path.join(folder, tag)
    if os.path.isabs(tag) or ".." in tag.split("/") or not os.path.isdir(tag_path):
        raise CorruptCheckpointError(f"{path} names {tag!r}, and there is no such folder beside it", file=_LATEST)
    return own_file(folder, tag)


def _others(given: str, folder: str) -> list[str]:
    """Return the files in the folder of a tag, and beside it, that are not taken."""
    inside = [name for name in os.listdir(folder) if not (_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))]
    files = {os.path.relpath(os.path.join(folder, name), given) for name in inside}
    used = os.path.relpath(folder, given).split("/")[0]
    if used != ".":
        files |= {name for name in os.listdir(given) if name != used}
    return sorted(name for name in files if os.path.basename(name) not in _ABOUT)


def _by_rank(folder: str, names: list[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the files of a kind in the order of ranks."""
    files = [(int(match[1] or 0), int(match[2]), name) for name in names if (match := pattern.fullmatch(name))]
    if any(part for _, part, _ in files):
        raise UnsupportedStateError(
            f"{folder} is of several model-parallel ranks (mp_rank_01): only the model knows how their "
            "tensors belong together. Load it with its engine and save from there, or convert it with DeepSpeed's "
            "ds_to_universal"
        )
    if [rank for rank, _, _ in sorted(files)] != list(range(len(files))):
        raise CorruptCheckpointError(f"{folder}: the file of a rank is missing among {[name for *_, name in files]}")
    return [name for *_, name in sorted(files)]


def _weights(
    folder: str, heads: list[Any], models: list[str], optimizers: list[str], *, trusted: bool
) -> dict[str, Blob]:
    head, blobs = heads[0], dict[str, Blob]()
    of_model = [mapped_ranges(own_file(folder, name)) for name in models]
    module, buffers = head.get("module") or {}, frozenset(head.get("buffer_names") or ())
    shapes = head.get("param_shapes")
    if not optimizers or not shapes:  # without ZeRO the module has the weights
        wanted = {name: tuple(shape) for group in shapes or () for name, shape in group.items()}
        if cut := [name for name, shape in wanted.items() if tuple(module[name].shape) != shape]:
            raise CorruptCheckpointError(f"{folder}: {cut[0]} is cut, and no rank's *_optim_states.pt is here")
        buffers, shapes = frozenset(module), []
    for name, tensor in module.items():
        if name in buffers:
            blobs[name] = _blob(name, tuple(tensor.shape), [(tensor, of_model[0])])
    groups, stage = _flat_groups(folder, optimizers, trusted=trusted) if shapes else ([], 0)
    for name, shape in (head.get("frozen_param_shapes") or {}).items():
        parts = zip(heads, of_model, strict=True) if stage == 3 else [(head, of_model[0])]
        blobs[name] = _blob(
            name, tuple(shape), [(part["frozen_param_fragments"][name], where) for part, where in parts]
        )
    if stage == 3:
        merged = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        blobs.update(
            _cut_each(merged, [[(tensor.reshape(-1), where) for tensor, where in of_rank] for of_rank in groups])
        )
    else:
        for number, group in enumerate(shapes):
            pieces = [rank_groups[number] for rank_groups in groups]
            blobs.update(_cut_once({name: tuple(shape) for name, shape in group.items()}, pieces))
    for alias, name in dict(head.get("shared_params") or {}).items():
        if name in blobs and alias not in blobs:
            blobs[alias] = blobs[name]  # a tied tensor: its bytes are stored once
    return blobs


def _flat_groups(folder: str, names: list[str], *, trusted: bool) -> tuple[list[list[Piece]], int]:
    """Return the flat float32 groups of each rank, and the stage."""
    groups, stage = [], 0
    for name in names:
        path = own_file(folder, name)
        state = read_torch(path, trusted=trusted).get("optimizer_state_dict")
        if not isinstance(state, Mapping):
            raise CorruptCheckpointError(f"{path} holds no state of ZeRO", file=name)
        key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
        if key not in state:
            raise UnsupportedStateError(f"{path} has no float32 groups: this optimizer of DeepSpeed is not known")
        count = state.get("partition_count", len(names))
        if (max(count) if isinstance(count, (list, tuple)) else count) != len(names):
            raise CorruptCheckpointError(f"{folder} has {len(names)} files of ranks, {path} says {count}", file=name)
        stage = 3 if key == "fp32_flat_groups" else 2
        where = mapped_ranges(path)
        groups.append([(tensor, where) for tensor in state[key]])
    return groups, stage


def _cut_once(shapes: dict[str, tuple[int, ...]], pieces: list[Piece]) -> Iterator[tuple[str, Blob]]:
    """Stages 1 and 2: one vector, cut into pieces anywhere."""
    start = 0
    for name, shape in shapes.items():
        size = prod(shape)
        yield name, _blob(name, shape, _range(name, pieces, start, size))
        start += size


def _cut_each(shapes: dict[str, tuple[int, ...]], ranks: list[list[Piece]]) -> Iterator[tuple[str, Blob]]:
    """Stage 3: each parameter is cut, its last piece padded; the groups of a rank follow one another."""
    start = 0
    for name, shape in shapes.items():
        size = prod(shape)
        share = -(-size // len(ranks))
        parts: list[Piece] = []
        for rank, groups in enumerate(ranks):
            wanted = max(0, min(share, size - rank * share))
            parts += _range(name, groups, start, wanted)
        yield name, _blob(name, shape, parts)
        start += share


def _range(name: str, pieces: list[Piece], start: int, size: int) -> list[Piece]:
    """Return elements [start, start + size) of pieces that follow one another."""
    parts, at, left = [], 0, size
    for tensor, where in pieces:
        count = tensor.numel()
        first = max(0, start - at)
        if left and first < count:
            taken = min(left, count - first)
            parts.append((tensor[first : first + taken], where))
            left -= taken
            start += taken
        at += count
    if left:
        raise CorruptCheckpointError(f"the files of DeepSpeed end {left} elements before {name} does", tensor=name)
    return parts


def _blob(name: str, shape: tuple[int, ...], pieces: list[Piece]) -> Blob:
    if not pieces:
        pieces = [(torch.empty(0, device="cpu"), [])]
    first = pieces[0][0]
    have = sum(tensor.numel() for tensor, _ in pieces)
    if have < prod(shape):
        raise CorruptCheckpointError(f"{name}: {have} elements in the files of DeepSpeed, {shape} wanted", tensor=name)
    flat = _range(name, [(tensor.reshape(-1), where) for tensor, where in pieces], 0, prod(shape))
    return Blob(name, dtype_name(first.dtype), shape, partial(_parts, flat), first.itemsize)


def _parts(pieces: list[Piece]) -> Iterator[memoryview]:
    for tensor, where in pieces:
        yield from streamed(tensor, where)
