"""Builds checkpoints with format-level code only: no writer process, no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count

from holdfast.format.commit import PartSummary, commit, look_before
from holdfast.format.digest import bytes_digest, chunk_digests, file_digest
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.format.strict_json import dumps
from holdfast.storage import Storage

START = "00c0ffee"
_saves = count()


def save_id(start: str = START) -> str:
    return f"{start}-{next(_saves):x}"


@dataclass
class Shape:
    """One tensor of a built checkpoint: float32, zeros unless ``data`` says otherwise."""

    name: str
    shape: tuple[int, ...]
    data: bytes = b""
    aliases: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        size = 4
        for one in self.shape:
            size *= one
        return size


MODEL = (
    Shape("model/head.weight", (4, 8), bytes(range(128)), aliases=("model/embedding.weight",)),
    Shape("model/norm.bias", (200, 200)),
    Shape("optimizer/state/head.weight/exp_avg", (4, 8)),
)
TREE = {
    "model": {"$": "tensors", "at": "model/", "k": ["head.weight", "norm.bias", "embedding.weight"], "o": True},
    "optimizer": {"$": "object", "type": "AdamW", "kind": "object",
                  "state": {"lr": 0.001, "betas": {"$": "tuple", "v": [0.9, 0.95]}}},
    "note": "first try",
    "holdfast": {"progress": {"step": 7}, "rng": {"$": "rng", "key": "holdfast/rng"}},
}  # fmt: skip


def build(
    storage: Storage,
    name: str,
    *,
    tensors: tuple[Shape, ...] = MODEL,
    tree: object = TREE,
    start: str = START,
    overwrite: bool = False,
    finish: bool = True,
    reused: bool = False,
    sparse: bool = False,
    user: dict[str, bytes] | None = None,
    **fields: object,
) -> Manifest | None:
    """Write a whole checkpoint as a writer does; ``finish=False`` dies before the manifest."""
    sid = save_id(start)
    if tree is TREE and not {one.name for one in MODEL} <= {one.name for one in tensors}:
        tree = {}  # a structure must not name tensors that no index has
    replaced = look_before(storage, name) if overwrite else None
    files, table, offsets = [], b"", {}
    digests = f"digests-00000-{sid}.bin"
    for item in dict.fromkeys(tensor.name.split("/")[0] for tensor in tensors):
        path = f"{item}-00000-{sid}.safetensors"
        mine = [tensor for tensor in tensors if tensor.name.startswith(f"{item}/")]
        size, body = 4096, b"\0" * 4096
        for tensor in mine:
            offsets[tensor.name] = (path, size)
            size += tensor.nbytes
            body += b"" if sparse else tensor.data.ljust(tensor.nbytes, b"\0")
        if sparse:
            target = storage.local_root / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                os.truncate(file.fileno(), size)
            chunks, place = b"", None
        else:
            with storage.create(f"{name}/{path}", size) as writer:
                writer.write(memoryview(body))
            chunks, place = chunk_digests(body), (digests, len(table))
        table += chunks
        files.append(FileEntry(path=path, size=size, digest=file_digest(chunks), role="tensors", chunks=place,
                               reused_from="before" if reused and item == "model" else None))  # fmt: skip
    stored = {path: path.replace(sid, "{save_id}") for path, _ in offsets.values()}
    entries = {}
    for tensor in tensors:
        path, offset = offsets[tensor.name]
        piece = Piece(file=stored[path], offset=offset, nbytes=tensor.nbytes)
        entries[tensor.name] = TensorEntry(name=tensor.name, dtype="float32", shape=tensor.shape, pieces=(piece,))
    aliases = {alias: tensor.name for tensor in tensors for alias in tensor.aliases}
    index = Index(writer=0, files=tuple(stored.values()), tensors=entries, aliases=aliases)
    small = {f"index-00000-{sid}.json": ("index", index.to_bytes()), f"state-{sid}.json": ("state", dumps(tree))}
    small |= {digests: ("digests", table)} if table else {}
    small |= {path: ("user", data) for path, data in (user or {}).items()}
    for path, (role, data) in small.items():
        storage.put(f"{name}/{path}", data)
        files.append(FileEntry(path=path, size=len(data), digest=bytes_digest(data), role=role))
    if not finish:
        return None
    fields.setdefault("versions", {"holdfast": "0.1.0", "torch": "2.13.0"})
    fields.setdefault("checkpoint_id", sid)
    part = PartSummary(writer=0, files=tuple(files))
    return commit(storage, name, fields, [part], overwrite=replaced)


def small(storage: Storage, name: str, **fields: object) -> Manifest:
    """Write a checkpoint with next to nothing in it."""
    made = build(storage, name, tensors=(), **fields)
    assert made is not None
    return made
