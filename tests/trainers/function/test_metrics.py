"""Metrics as they are reported: what becomes a number, and what is refused by name."""

from __future__ import annotations

import decimal
import enum
import json
import math

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.errors import ConfigError
from holdfast.run.record import plain_metrics
from holdfast.trainers.function.transit import pack_checkpoint, unpack_checkpoint
from holdfast.trainers.function.worker.delivery import check_score, score_of


class Colour(enum.Enum):
    RED = 1


class Level(int, enum.Enum):
    HIGH = 3


def test_plain_metrics_are_copied_as_they_are():
    """The caller may change his dict afterwards."""
    given = {"loss": 0.5, "epoch": 3, "name": "a", "done": True, "none": None}
    plain = plain_metrics(given)
    assert plain == given
    assert plain is not given


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[3]]), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(True), True),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3),
        (np.array([7]), 7),
        (decimal.Decimal("0.5"), 0.5),
        (Level.HIGH, 3),
        ((1, 2), [1, 2]),
        ([torch.tensor(1.0), {"a": np.float32(2)}], [1.0, {"a": 2.0}]),
        ({"acc": torch.tensor(0.5), 3: {"deep": 1}}, {"acc": 0.5, "3": {"deep": 1}}),
        (10**30, 10**30),
    ],
)
def test_what_holds_one_number_becomes_that_number(value, expected):
    """Nested ones too, and all of it survives JSON."""
    plain = plain_metrics({"metric": value})["metric"]
    assert plain == expected
    assert type(plain) is type(expected)
    assert json.loads(json.dumps(plain)) == expected


def test_nan_and_infinities_stay_what_they_are():
    """They are reported as they are: training that diverges has to show."""
    plain = plain_metrics({"loss": float("nan"), "top": {"inf": torch.tensor(float("inf"))}})
    assert math.isnan(plain["loss"])
    assert plain["top"]["inf"] == math.inf


@pytest.mark.parametrize(
    ("metrics", "match"),
    [
        ({"val": {"logits": torch.zeros(2, 3)}}, r"'val/logits' is a Tensor of shape \(2, 3\)"),
        ({"list": [1, np.zeros(2)]}, r"'list/1' is a ndarray of shape \(2,\)"),
        ({"empty": torch.zeros(0)}, "'empty'"),
        ({"model": torch.nn.Linear(1, 1)}, r"'model' is Linear\("),
        ({"colour": Colour.RED}, "'colour'"),
        ({"complex": 1j}, "'complex'"),
        ({"when": np.datetime64("2024-01-01")}, "'when'"),
        ({"set": {1, 2}}, "'set'"),
        ({"a": {(1, 2): 3}}, r"below 'a' have the key \(1, 2\)"),
        ({None: 3}, "the key None"),
        ([("loss", 1)], "metrics are a dict"),
        (0.5, "metrics are a dict"),
    ],
)
def test_what_is_no_metric_is_refused_by_name(metrics, match):
    """The message says where it is, also deep inside."""
    with pytest.raises(ConfigError, match=match):
        plain_metrics(metrics)


def test_metrics_that_contain_themselves_are_refused():
    """No recursion without end, neither through dicts nor through lists."""
    loop: dict = {}
    loop["again"] = loop
    with pytest.raises(ConfigError, match="does it contain itself"):
        plain_metrics(loop)
    chain: list = []
    chain.append(chain)
    with pytest.raises(ConfigError, match="does it contain itself"):
        plain_metrics({"chain": chain})


def test_a_score_has_to_be_a_number():
    """Missing and NaN rank below everything; a string cannot rank at all."""
    for fine in ({"acc": 1}, {"acc": float("nan")}, {}, {"acc": None}, {"val": {"acc": 0.5}}):
        check_score(fine, "acc")
        check_score(fine, "val/acc")
    with pytest.raises(ConfigError, match=r"metric 'val/acc' is 'good' \(str\)"):
        check_score({"val": {"acc": "good"}}, "val/acc")


def test_the_score_of_values():
    """Tensors count; what is missing or no number is an error that names the attribute."""
    assert score_of({"acc": torch.tensor(0.5), "model": 1}, "acc", required=True) == 0.5
    assert score_of({}, "acc", required=False) is None
    with pytest.raises(ConfigError, match=r"got no 'acc'.*\['loss'\]"):
        score_of({"loss": 1}, "acc", required=True)
    for wrong in ("0.9", torch.zeros(2), [1], None):
        with pytest.raises(ValueError, match="has to be a number"):
            score_of({"acc": wrong}, "acc", required=True)


def test_a_packed_checkpoint_is_the_same_elsewhere():
    """What travels without a disk comes back with its types, and lives as long as its handle."""
    values = {"epoch": 3, "weights": torch.arange(5.0), "nested": {"a": (1, "b")}}
    found = unpack_checkpoint(pack_checkpoint(hf.Checkpoint.from_dict(values)))
    loaded = found.to_dict()
    assert torch.equal(loaded.pop("weights"), values.pop("weights"))
    assert loaded == values
    assert found.verify().ok
    assert "_timestamp" in found.get_metadata()
