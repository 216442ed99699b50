"""A checkpoint as nested dictionaries, and as one file: ``.pt`` for ``torch.load``, ``.safetensors`` for weights.

A file is laid out in memory: rank 0 gathers what every rank has for itself, copies the tensors to their places and puts
everything around them. The writer fills in digest and checksums and stores the file in one atomic step. What is known
about it (step, attempt, digest) stands in the file.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import nn

from holdfast._log import get_logger
from holdfast.errors import ConfigError, CorruptCheckpointError
from holdfast.format.digest import chunk_digests, file_digest
from holdfast.format.tensor_file import lay_out
from holdfast.state.data.seeding import generators_kept
from holdfast.state.load.match_plan import restore_derived
from holdfast.state.load.selection import covers
from holdfast.state.save.staging import stage
from holdfast.state.save.torch_file import TorchFileWriter, from_plain, to_plain
from holdfast.state.tree import arrays, objects, rng
from holdfast.state.tree.objects import canonical_keys, parameter_names, unwrap
from holdfast.state.tree.values import PerRank
from holdfast.storage.base import BLOCK, Storage
from holdfast.storage.wrapped import InputStream
from holdfast.writer.arena import Arena
from holdfast.writer.messages import DIGEST_DIGITS, SafetensorsFile, TorchFile

from ..training.ranks import Ranks

__all__ = [
    "FileImage",
    "IgnoreKeys",
    "as_torch_file",
    "check_ignore_keys",
    "emptied",
    "expand",
    "gathered",
    "ignored",
    "left_out_of",
    "of_rank",
    "plain_leaf",
    "read_note",
]


_LOG = get_logger("trainers.loop")
_LEFT_OUT = "ignored_keys"
IgnoreKeys = Sequence[str] | Callable[[dict[str, Any]], Any] | None


def check_ignore_keys(given: Any, what: str) -> IgnoreKeys:
    """Return globs as a list, or the function.

    Raises:
        ConfigError: it is neither.
    """
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    globs = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if isinstance(given, Mapping) or not all(isinstance(glob, str) and glob for glob in globs):
        raise ConfigError(f"{what}={given!r}: give globs such as 'state/optimizers/*', or a function")
    return globs


def expand(live: Mapping[str, Any]) -> dict[str, Any]:
    """Replace modules, optimizers and objects by their state, tensors live in it.

    Parameters keep the names that a checkpoint directory has, those of optimizers too ("state/model/fc.weight").
    Generators (`RNG`) and torchmetrics, which have no state of plain dictionaries, stay as they are.
    """
    names = parameter_names(live)

    def walk(value: Any) -> Any:
        if isinstance(value, nn.Module) and not objects.is_metric(value):
            module = unwrap(value)
            raw = module.state_dict()
            return OrderedDict(zip(canonical_keys(module, list(raw)), raw.values(), strict=True))
        if isinstance(value, torch.optim.Optimizer) and objects.is_plain(value):
            return objects.to_named(value, names)
        if isinstance(value, PerRank):
            return PerRank(walk(value.value))
        if isinstance(value, Mapping):
            return {key: walk(item) for key, item in value.items()}
        if not objects.is_metric(value) and callable(getattr(value, "load_state_dict", None)):
            return value.state_dict()
        return value

    return {key: walk(item) for key, item in live.items()}


def ignored(live: Mapping[str, Any], ignore: IgnoreKeys, *, what: str, looked: set[str]) -> dict[str, Any]:
    """Return ``live`` without what ``ignore`` names; its metadata say what that is, for whoever loads it.

    Args:
        live: a state in the anatomy of a checkpoint.
        ignore: globs over "/"-joined paths, or a function that changes the dictionary it is given.
        what: the argument it came from, for messages.
        looked: globs that were used before; of those that match nothing each is said once.
    """
    if not ignore:
        return dict(live)
    found = expand(live)
    if callable(ignore):
        every = list(paths(found))
        ignore(found)
        found.setdefault("state", {})
        kept, left_out = found, _roots(every, set(paths(found)))
    else:
        kept, left_out = _prune(found, ignore, what, looked), list(ignore)
    metadata = kept["state"].get("metadata")
    if isinstance(metadata, Mapping) and left_out:
        kept["state"]["metadata"] = {**metadata, _LEFT_OUT: left_out}
    return kept


def left_out_of(saved: Mapping[str, Any]) -> list[str]:
    """Return the globs of what a checkpoint was saved without.

    Args:
        saved: its "state".
    """
    metadata = saved.get("metadata")
    found = metadata.get(_LEFT_OUT) if isinstance(metadata, Mapping) else None
    return [glob for glob in found if isinstance(glob, str)] if isinstance(found, (list, tuple)) else []


def _roots(every: Iterable[str], kept: set[str]) -> list[str]:
    """Return the paths that are gone, each without what was below it."""
    roots: list[str] = []
    for path in every:  # what is in a container comes right after it
        if path not in kept and not (roots and path.startswith(f"{roots[-1]}/")):
            roots.append(path)
    return roots


def _prune(found: dict[str, Any], globs: Sequence[str], what: str, looked: set[str]) -> dict[str, Any]:
    """Take out of nested dictionaries what globs name."""
    new = [glob for glob in globs if glob not in looked]
    looked.update(new)
    every = list(paths(found)) if new else []
    for glob in new:
        if not any(covers((glob.rstrip("/"),), path) for path in every):
            _LOG.warning("%s: %r matches nothing; there are %s ...", what, glob, ", ".join(every[:8]))

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, PerRank):
            return PerRank(walk(value.value, path))
        if not isinstance(value, dict):
            return value
        kept = ((key, item, f"{path}/{key}" if path else str(key)) for key, item in value.items())
        return type(value)((key, walk(item, where)) for key, item, where in kept if not covers(globs, where))

    pruned: dict[str, Any] = walk(found, "")
    pruned.setdefault("state", {})
    return pruned


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the "/"-joined path of everything in nested dictionaries."""
    if path:
        yield path
    if isinstance(value, PerRank):
        value = value.value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from paths(item, f"{path}/{key}" if path else str(key))


def emptied(every: Iterable[str], globs: Sequence[str], among: Iterable[str]) -> set[str]:
    """Return those of ``among`` of which ``globs`` cover everything there is.

    Args:
        every: the "/"-joined path of everything in a checkpoint.
        globs: what is left out of it.
        among: some of those paths.
    """
    ordered = sorted({f"{path}/" for path in every})  # what is in a container comes right after it
    ends = [path[:-1] for path, after in zip(ordered, [*ordered[1:], ""], strict=True) if not after.startswith(path)]
    taken = [end for end in ends if not covers(globs, end)]
    return {path for path in among if not any(prefix == path or prefix.startswith(f"{path}/") for prefix in taken)}


_MODEL = "state/model/"


def as_torch_file(expanded: Mapping[str, Any]) -> Any:
    """Return what goes into a file for ``torch.load``: parameters of optimizers under the names the model has."""
    found = dict(expanded)
    state = dict(found["state"])
    if isinstance(state.get("optimizers"), Mapping):
        state["optimizers"] = renamed_optimizers(state["optimizers"], lambda name: name.removeprefix(_MODEL))
    return to_plain({**found, "state": state}, plain_leaf)


def from_torch_file(found: dict[str, Any]) -> dict[str, Any]:
    """Undo `as_torch_file`, apart from the generators."""
    state = found.get("state")
    if isinstance(state, dict) and isinstance(state.get("optimizers"), dict):

        def back(name: str) -> str:
            return name if name.startswith("param.") or "/" in name else _MODEL + name

        state["optimizers"] = renamed_optimizers(state["optimizers"], back)
    return found


def renamed_optimizers(optimizers: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Rename the parameters in the states of optimizers, where they are kept by name."""
    return {key: _renamed(state, rename) for key, state in optimizers.items()}


def _renamed(optimizer: Any, rename: Callable[[str], str]) -> Any:
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("param_groups"), list):
        return optimizer

    def each(names: Iterable[Any]) -> list[Any]:
        return [rename(name) if isinstance(name, str) else name for name in names]

    state = optimizer.get("state", {})
    groups = [{**group, "params": each(group.get("params", ()))} for group in optimizer["param_groups"]]
    return {**optimizer, "state": dict(zip(each(state), state.values(), strict=True)), "param_groups": groups}


def plain_leaf(value: Any, path: str) -> Any:
    """Say how what `expand` leaves as it is goes into a file."""
    if objects.is_metric(value):
        return to_plain(objects.metric_state(value), plain_leaf, path=path)
    return NotImplemented


_NOTE = "holdfast.json"
_FORMAT = "holdfast-file"
_DIGEST = "xxh3:" + "0" * DIGEST_DIGITS  # until the writer knows it
_ROW_BYTES = 24  # of the table of records


class FileImage:
    """One file in memory, reused from save to save. One owner, one file at a time.

    Attributes:
        arena: the memory, after the first file was taken.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self._container: SafetensorsFile | TorchFile | None = None

    def container(self, *, lease: str | None) -> SafetensorsFile | TorchFile:
        """Describe the file that was taken last to the writer, which stores it under a lease of its name."""
        assert self._container is not None
        return replace(self._container, lease=lease)

    def take(self, state: dict[str, Any], container: str, note: Mapping[str, Any]) -> None:
        """Copy a state of `gathered` for its container, "torch" or "safetensors", which takes the weights alone."""
        if container == "torch":
            self.take_torch(as_torch_file(state), note)
        else:
            weights = state["state"]["model"]
            self.take_weights({name: value for name, value in weights.items() if torch.is_tensor(value)}, note)

    def take_torch(self, value: Any, note: Mapping[str, Any]) -> None:
        """Copy a state for ``torch.load``; the caller may change its tensors when this returns.

        Args:
            value: nested plain data and tensors.
            note: what the file says about itself.
        """
        text = _note(note, _DIGEST)
        writer = TorchFileWriter(value, records={_NOTE: text})
        note_at = writer.place_of(_NOTE)
        records_at = -(-writer.size // BLOCK) * BLOCK  # the last page of the file is written whole
        table_bytes = _ROW_BYTES * writer.num_records
        arena = self._copy(writer.tensors, writer.offsets, records_at + table_bytes)
        arena.view[records_at : records_at + table_bytes] = writer.lay_out(arena.view)
        self._container = TorchFile(
            size=writer.size, lease=None, num_records=writer.num_records, records_at=records_at, digested=note_at,
            digest_at=note_at + _digits_at(text),
        )  # fmt: skip

    def take_weights(self, weights: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Copy the weights of a model for a safetensors file.

        Args:
            weights: tensors by name. Tied ones are stored under each of their names.
            note: what the file says about itself.
        """
        rows = [
            (name, arrays.dtype_name(t.dtype), tuple(t.shape), t.numel() * t.itemsize) for name, t in weights.items()
        ]
        text = _note(note, _DIGEST)
        file = lay_out(rows, {"holdfast": text.decode()})
        escaped = json.dumps(text.decode()).encode()  # as it stands in the header, before the names of tensors
        tensors = list(weights.values())
        arena = self._copy(
            [tensors[at].detach() for at in file.order], [file.offsets[at] for at in file.order], file.size
        )
        arena.view[: len(file.header)] = file.header
        self._container = SafetensorsFile(
            size=file.size, lease=None, data_at=len(file.header),
            digest_at=file.header.index(escaped) + _digits_at(escaped),
        )  # fmt: skip

    def _copy(self, tensors: list[torch.Tensor], offsets: Sequence[int], size: int) -> Arena:
        if self.arena is None or self.arena.size < size:
            self.close()
            self.arena = Arena.create(size)
        arena = self.arena
        stage(tensors, offsets, [tensor.numel() * tensor.itemsize for tensor in tensors], arena)
        arena.prefault()
        return arena

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._container = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None


def _digits_at(text: bytes) -> int:
    """Return where the digits of the digest begin in a note: they are the last thing that it says."""
    return text.rindex(_DIGEST.encode()) + len(_DIGEST) - DIGEST_DIGITS


def _note(note: Mapping[str, Any], digest: str) -> bytes:
    return json.dumps({"format": _FORMAT, "version": 1, **note, "digest": digest}, separators=(",", ":")).encode()


def read_note(storage: Storage, path: str, *, verify: bool = False) -> dict[str, Any] | None:
    """Return what a file says about itself; None for one that Holdfast did not write.

    Args:
        storage: where it is.
        path: its path.
        verify: read the whole file and compare it with its digest.

    Raises:
        CorruptCheckpointError: it is cut short, or differs from its digest.
        StorageNotFoundError: there is no file.
    """
    with storage.open(path) as reader:
        stream = cast("BinaryIO", io.BufferedReader(InputStream(reader), 1 << 20))
        where = f"{storage.uri}/{path}"
        if path.endswith(".safetensors"):
            return _weights_note(stream, reader.size, where, verify=verify)
        return _torch_note(stream, where, verify=verify)


def _torch_note(stream: BinaryIO, where: str, *, verify: bool) -> dict[str, Any] | None:
    try:
        with zipfile.ZipFile(stream) as archive:
            found = next((record for record in archive.infolist() if record.filename.endswith(f"/{_NOTE}")), None)
            if found is None:
                return None
            note = _parsed(archive.read(found), where)
            start = found.header_offset
    except (zipfile.BadZipFile, EOFError, struct.error, ValueError) as error:
        raise CorruptCheckpointError(f"{where} is no complete torch file: {error}", file=where) from error
    if verify:
        stream.seek(start)
        head = stream.read(30)
        end = start + 30 + sum(struct.unpack("<HH", head[26:30]))
        hasher = xxhash.xxh3_128()
        stream.seek(0)
        for data in _blocks(stream, end):
            hasher.update(data)
        _compare("xxh3:" + hasher.hexdigest(), note, where)
    return note


def _weights_note(stream: BinaryIO, size: int, where: str, *, verify: bool) -> dict[str, Any] | None:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or 8 + length > size:
        raise CorruptCheckpointError(f"{where} is no complete safetensors file: it has {size} bytes", file=where)
    try:
        header = json.loads(stream.read(length))
        text = header.get("__metadata__", {}).get("holdfast")
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise CorruptCheckpointError(f"{where}: not a sound safetensors header: {error}", file=where) from error
    if text is None:
        return None
    note = _parsed(text, where)
    if 8 + length + max(ends, default=0) != size:
        raise CorruptCheckpointError(f"{where} is cut short or has bytes too many: {size}", file=where)
    if verify:
        _compare(file_digest(b"".join(chunk_digests(data) for data in _blocks(stream, size - 8 - length))), note, where)
    return note


def _blocks(stream: BinaryIO, count: int) -> Any:
    while count:
        data = stream.read(min(count, 1 << 23))
        if not data:
            return
        count -= len(data)
        yield data


def _parsed(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        note = json.loads(text)
    except ValueError as error:
        raise CorruptCheckpointError(f"{where}: what the file says about itself is damaged", file=where) from error
    if not isinstance(note, dict) or note.get("format") != _FORMAT:
        raise CorruptCheckpointError(f"{where}: what the file says about itself is damaged", file=where)
    if note.get("version") != 1:
        raise ConfigError(f"{where} was written by a newer Holdfast (version {note.get('version')}): update it")
    return note


def _compare(found: str, note: Mapping[str, Any], where: str) -> None:
    if found != note.get("digest"):
        raise CorruptCheckpointError(
            f"{where} is damaged: its bytes have the digest {found}, it was written with {note.get('digest')}",
            file=where,
        )


_KEY = "of_ranks"  # {"of_ranks": [that of rank 0, ...]} stands for a value that each rank has for itself


def gathered(found: dict[str, Any], ranks: Ranks) -> dict[str, Any] | None:
    """Return a state in nested dictionaries with what all ranks have for themselves; None on other ranks than 0."""
    own = {path: per_rank.value for path, per_rank in _per_rank(found)}
    whole = found.get("rng") is rng.RNG
    mine = [{"values": to_plain(own, plain_leaf), "rng": to_plain(rng.capture()) if whole else None}]
    if ranks.world_size > 1 and (own or whole):
        every: list[dict[str, Any]] = []
        ranks.agree("file", lambda: _packed(mine[0]), lambda packed: every.extend(map(_unpacked, packed)))
        mine = every
    if not ranks.leads:
        return None
    single = ranks.world_size == 1

    def joined(path: str, _: PerRank) -> Any:
        return own[path] if single else {_KEY: [part["values"][path] for part in mine]}

    filled: dict[str, Any] = _replaced(found, joined)
    return {**filled, "rng": [part["rng"] for part in mine]} if whole else filled


def of_rank(found: dict[str, Any], rank: int, world_size: int, *, step: int | None) -> dict[str, Any]:
    """Undo `gathered` for one rank of ``world_size``; "rng" is what it is to have, or is left out."""
    generators = found.pop("rng", None)
    state: dict[str, Any] = _resolved(found, rank)
    metrics = state["state"].get("train_metrics")
    if metrics:
        # One process has gathered them for all; a rank that was not there has nothing.
        state["state"]["train_metrics"] = PerRank(metrics)
        saved_by = len(generators) if isinstance(generators, list) else 1
        if rank >= saved_by:
            del state["state"]["train_metrics"]
    if isinstance(generators, list) and generators:
        state["rng"] = (
            generators[rank] if len(generators) == world_size else _derived(generators, rank, world_size, step)
        )
    elif isinstance(generators, Mapping):
        state["rng"] = generators
    return state


def _derived(generators: list[Any], rank: int, world_size: int, step: int | None) -> dict[str, Any]:
    first, *others = generators
    with generators_kept():
        restore_derived(first, others, step=step, rank=rank, world_size=world_size)
        derived: dict[str, Any] = rng.capture(devices=False)
        return derived


def _per_rank(value: Any, path: str = "") -> Iterator[tuple[str, PerRank]]:
    if isinstance(value, PerRank):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _per_rank(item, f"{path}/{key}")


def _replaced(value: Any, by: Callable[[str, PerRank], Any], path: str = "") -> Any:
    if isinstance(value, PerRank):
        return by(path, value)
    if type(value) is dict:
        return {key: _replaced(item, by, f"{path}/{key}") for key, item in value.items()}
    return value


def _resolved(value: Any, rank: int) -> Any:
    if type(value) is dict:
        if value.keys() == {_KEY}:
            every = value[_KEY]
            return every[rank] if rank < len(every) else every[0]
        return {key: _resolved(item, rank) for key, item in value.items()}
    return value


def _packed(value: dict[str, Any]) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(text: str) -> dict[str, Any]:
    found: dict[str, Any] = from_plain(
        torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
    )
    return found
