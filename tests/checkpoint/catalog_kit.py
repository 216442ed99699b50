"""Fills catalogs as the writer does."""

from __future__ import annotations

from build import START, small

from holdfast.checkpoint.catalog import Catalog
from holdfast.config import Keep
from holdfast.storage.base import Storage


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
