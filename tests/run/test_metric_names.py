"""Metrics: looking nested ones up, spreading them out, and keeping NaN in them."""

from __future__ import annotations

import json
import math

from checkpoint_kit import small
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import Keep
from holdfast.run.catalog import Catalog
from holdfast.run.record import Record, flat_metrics, from_plain, metric_value, to_plain
from holdfast.run.retention import decide, rank
from holdfast.storage import MemoryStorage

names = st.text("ab/", min_size=1, max_size=4)
trees = st.recursive(
    st.dictionaries(names, st.integers(0, 9), max_size=3),
    lambda inner: st.dictionaries(names, st.integers(0, 9) | inner, max_size=3),
    max_leaves=8,
)


def test_lookup() -> None:
    """The exact name wins, then each "/" may lead into a mapping; what is not there is None."""
    metrics = {"val": {"acc": 0.5, "top/1": 0.4, "deep": {"er": 1}}, "val/acc": 0.7, "a/b": {"c": 2}, "loss": 3}
    assert metric_value(metrics, "val/acc") == 0.7
    assert metric_value(metrics, "val/top/1") == 0.4
    assert metric_value(metrics, "val/deep/er") == 1
    assert metric_value(metrics, "a/b/c") == 2
    assert metric_value(metrics, "loss/x") is None
    assert metric_value(metrics, "val/none") is None
    assert metric_value(metrics, "val") is None, "a mapping is no metric"
    assert metric_value({}, "/") is None


@given(trees)
def test_every_spread_name_finds_a_value(metrics: dict) -> None:
    """What `flat_metrics` lists, `metric_value` finds, and an exact name of the top level is never shadowed."""
    for name, value in flat_metrics(metrics).items():
        found = metric_value(metrics, name)
        assert found is not None
        if name in metrics and not isinstance(metrics[name], dict):
            assert found == value


def test_nan_and_infinities_survive_at_any_depth() -> None:
    """The stored form is strict JSON; what comes back is what was there."""
    metrics = {"a": math.nan, "b": {"c": [math.inf, {"d": -math.inf}], "e": 1.5}, "f": "text", "g": None, "h": True}
    text = json.dumps(to_plain(metrics), allow_nan=False)
    back = from_plain(json.loads(text))
    assert math.isnan(back["a"])
    assert {**back, "a": 0} == {**metrics, "a": 0}


def test_nested_metrics_rank_and_give_reasons() -> None:
    """Retention reads nested names like others."""
    records = [
        Record(name=f"c{step}", attempt=1, step=step, metrics={"val": {"acc": value}})
        for step, value in enumerate([0.3, 0.9, math.nan, 0.1], start=1)
    ]
    assert [record.step for record in rank(records, "val/acc", "max")] == [2, 1, 4, 3]
    why = {one.name: one.why for one in decide(Keep(best=1, metric="val/acc", mode="max"), records) if one.keep}
    assert why == {"c4": "newest", "c2": "best 1 by val/acc (rank 1: 0.9)"}


def test_best_of_a_catalog_by_a_nested_metric(tmp_path) -> None:
    """`Catalog.best` looks into nested metrics, from manifests and from what was added later."""
    storage = MemoryStorage(tmp_path.name)
    for step, value in ((1, 0.5), (2, 0.2)):
        small(storage, f"c{step}", run_id="r", attempt=1, step=step, metrics={"val": {"loss": value}})
    catalog = Catalog(storage)
    best = catalog.best("val/loss", "min")
    assert best is not None
    assert best.name == "c2"
    catalog.set_metrics("c1", {"val/loss": 0.1})
    best = catalog.best("val/loss", "min")
    assert best is not None
    assert best.name == "c1"
    assert catalog.best("val", "min") is None
