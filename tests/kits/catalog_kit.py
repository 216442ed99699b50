"""Fills the catalog of a run as the writer does, and says what stands in one."""

from __future__ import annotations

import os

from checkpoint_kit import START, small

from holdfast.config import Keep
from holdfast.run.catalog import Catalog
from holdfast.run.index import RunIndex
from holdfast.run.lease import Lease, make_owner
from holdfast.storage import LocalStorage, MemoryStorage, Storage, StorageTraits, resolve


class Far(MemoryStorage):
    """Memory that takes requests side by side, as a store does; `log` has what would be requests."""

    traits = StorageTraits(num_parallel=16, deletes_at_once=1000)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.log: list[str] = []

    def put(self, path, data, **conditions):
        self.log.append(f"put {path}")
        return super().put(path, data, **conditions)

    def open(self, path):
        self.log.append(f"get {path}")
        return super().open(path)

    def read_tagged(self, path):
        self.log.append(f"get {path}")
        with super().open(path) as reader:
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
        return bytes(data), super().stat(path).etag

    def stat(self, path):
        self.log.append(f"head {path}")
        return super().stat(path)

    def list(self, prefix="", *, recursive=True):
        found = [*super().list(prefix, recursive=recursive)]
        self.log += [f"list {prefix}"] * (1 + len(found) // 1000)
        yield from found

    def delete(self, path):
        self.delete_many([path])

    def delete_many(self, paths):
        paths = [*paths]
        self.log += [f"delete {' '.join(paths[begin : begin + 1000])}" for begin in range(0, len(paths), 1000)]
        for path in paths:
            super().delete(path)


def storage_of(kind: str, tmp_path) -> Storage:
    """Make a storage by its name: "far", "memory", or a disk."""
    name = f"catalog-{tmp_path.name}"
    return {"far": Far, "memory": MemoryStorage}[kind](name) if kind in ("far", "memory") else LocalStorage(tmp_path)


def begin(storage: Storage, start_id: str = START) -> Catalog:
    catalog = Catalog(storage)
    catalog.index.register_attempt(start_id, host="here", pid=1)
    return catalog


def save(catalog: Catalog, step: int, *, keep: Keep | None = None, name: str | None = None, **fields) -> str:
    """Commit a checkpoint of the current attempt and enter it, as the writer does."""
    name = name or f"step_{step:04d}"
    attempt = catalog.index.current.attempt
    manifest = small(catalog.storage, name, run_id=catalog.index.run_id, attempt=attempt, step=step, **fields)
    catalog.add(name, manifest)
    catalog.prune(keep or Keep())
    return name


def names(catalog: Catalog) -> list[str]:
    return [record.name for record in catalog.records()]


def catalog_of(place: str | os.PathLike[str] | Storage) -> Catalog:
    """The checkpoints of the run at a place, as they are now."""
    return Catalog(resolve(place))


def steps_of(place: str | os.PathLike[str] | Storage) -> list[int]:
    """Steps of the checkpoints of a run, in order."""
    return sorted(record.step for record in catalog_of(place).records())


def index_of(place: str | os.PathLike[str] | Storage) -> RunIndex:
    """What ``run.json`` says now: attempts, their ends, the history of metrics."""
    return RunIndex.load(resolve(place))


def hold(place: str | os.PathLike[str] | Storage, start_id: str = START) -> Lease:
    """Take the lease of a run, as a trainer does; its ``release`` gives it back."""
    return Lease.acquire(resolve(place), make_owner(start_id))
