"""A listing that is older than run.json hides no checkpoint: what the index names is asked for by name."""

from __future__ import annotations

import pytest
from catalog_kit import Far, begin, names, save

from holdfast.config import Keep
from holdfast.run.catalog import Catalog
from holdfast.storage import MemoryStorage


class Stale(Far):
    """A store whose listings do not show some directories yet."""

    def __init__(self, name: str, hidden: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.hidden = hidden

    def list(self, prefix="", *, recursive=True):
        for info in super().list(prefix, recursive=recursive):
            if not any(info.path.startswith(f"{name}/") for name in self.hidden):
                yield info


@pytest.fixture
def storage(tmp_path):
    return Stale(f"stale-{tmp_path.name}")


def test_the_newest_is_found_although_no_listing_shows_it(storage):
    """A start right after a save: the newest is what run.json says, not what the store lists."""
    catalog = begin(storage)
    for step in (1, 2, 3, 4):
        save(catalog, step)
    storage.hidden = ("step_0004", "step_0003")
    catalog = Catalog(storage)
    assert names(catalog) == ["step_0004", "step_0003", "step_0002", "step_0001"]
    assert catalog.latest().name == "step_0004"
    begin(storage, "00beef00")
    assert Catalog(storage).latest().name == "step_0004"


def test_what_is_gone_is_gone(storage):
    """Asked for by name and not there: its row goes, as ever."""
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    storage.delete_tree("step_0003")
    assert names(Catalog(storage)) == ["step_0002", "step_0001"]


def test_retention_is_not_misled(storage):
    """While a run trains, a stale listing takes no row away: what goes is the oldest, and nothing stays for ever."""
    keep = Keep(last=2)
    catalog = begin(storage)
    for step in range(1, 9):
        storage.hidden = (f"step_{step - 1:04d}", f"step_{step:04d}")
        save(catalog, step, keep=keep)
    storage.hidden = ()
    there = {path.split("/")[0] for path in (info.path for info in storage.list("")) if path.startswith("step_")}
    assert there == {"step_0007", "step_0008"}
    assert names(Catalog(storage)) == ["step_0008", "step_0007"]


def test_a_fresh_listing_costs_no_request_more(storage):
    """Nothing is asked for that a listing shows."""
    catalog = begin(storage)
    for step in (1, 2, 3):
        save(catalog, step)
    storage.log.clear()
    Catalog(storage)
    assert [line for line in storage.log if "manifest.json" in line] == []


def test_the_same_on_a_disk_of_memory(tmp_path):
    """Rows without a directory are dropped there too."""
    plain = MemoryStorage(f"plain-{tmp_path.name}")
    catalog = begin(plain)
    save(catalog, 1)
    save(catalog, 2)
    plain.delete_tree("step_0002")
    assert names(Catalog(plain)) == ["step_0001"]
