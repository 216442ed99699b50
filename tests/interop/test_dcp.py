"""`holdfast.dcp` in one process: DCP's own calls write and read our checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from interop_kit import Odd, adamw, full_state, plain_state, trained
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast as hf
from holdfast.dcp import HoldfastReader, HoldfastWriter
from holdfast.testing import assert_state_equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def state():
    return full_state()


def nested(state) -> dict:
    return {key: state[key] for key in ("model", "optimizer", "scheduler")}


def fresh() -> dict:
    model, optimizer = trained(2, kind=Odd)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
    }


def test_dcp_save_makes_our_checkpoint(state, tmp_path) -> None:
    """Committed and digested; objects load by hf.load, ties are ties, plain data keeps its types."""
    plain = {key: plain_state()[key] for key in ("queue", "array", "pair", "options", "turned", "loose", "none")}
    writer = HoldfastWriter(tmp_path / "ck", step=5, metrics={"loss": 0.5})
    dcp.save({**nested(state), **plain}, storage_writer=writer)
    checkpoint = hf.Checkpoint(tmp_path / "ck")
    assert checkpoint.verify().ok
    assert (checkpoint.step, checkpoint.metrics) == (5, {"loss": 0.5})
    live = fresh()
    hf.load(checkpoint, live, only=list(live))
    assert_state_equal(live, nested(state))
    wanted = {**plain, "options": {**plain["options"]}}  # DCP opens dicts and gives plain ones back
    assert_state_equal(hf.load(checkpoint, skip=list(live)), wanted)
    names = {file.path.split("-")[0] for file in checkpoint.manifest.files}
    assert {"model", "optimizer", "index", "state", "digests"} <= names


def test_async_save_and_names_of_parameters(state, tmp_path) -> None:
    """async_save commits as well; an optimizer's state by name loads into one of other groups and order."""
    weights, moments = get_state_dict(state["model"], state["optimizer"])
    future = dcp.async_save({"model": weights, "optimizer": moments}, storage_writer=HoldfastWriter(tmp_path / "ck"))
    future.result()
    model, _ = trained(2, kind=Odd)
    optimizer = torch.optim.AdamW([{"params": [one]} for one in reversed(list(model.parameters()))])
    hf.load(tmp_path / "ck", {"model": model, "optimizer": optimizer})
    for one, two in zip(state["model"].parameters(), model.parameters(), strict=True):
        assert_state_equal({"p": one, **state["optimizer"].state[one]}, {"p": two, **optimizer.state[two]})


def test_dcp_load_reads_what_holdfast_saved(state, tmp_path) -> None:
    """A checkpoint of hf.save fills a model, an optimizer, loose tensors and plain values of dcp.load."""
    hf.save(tmp_path / "ck", {**state, "own": hf.PerRank(3)})
    model, optimizer = trained(2, kind=Odd)
    weights, moments = get_state_dict(model, optimizer)
    target = {"model": weights, "optimizer": moments, "turned": torch.zeros(6, 4), "own": 0, "pair": None, "queue": 0}
    target["loose"] = [torch.zeros(2), {"a": 0}, torch.zeros(2, 3)]
    dcp.load(target, storage_reader=HoldfastReader(tmp_path / "ck"))
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert_state_equal(model, state["model"])
    assert_state_equal(optimizer.state_dict()["state"], state["optimizer"].state_dict()["state"])
    wanted = {key: plain_state()[key] for key in ("turned", "pair", "queue", "loose")}
    assert_state_equal({key: target[key] for key in wanted}, wanted)
    assert target["own"] == 3


@pytest.mark.parametrize("saved_by", ["dcp", "holdfast"])
def test_a_part_is_loaded_into_a_part(state, tmp_path, saved_by) -> None:
    """Less than is stored, and with allow_partial_load more: what both have is read, the rest stays as it was."""
    weights, moments = get_state_dict(state["model"], state["optimizer"])
    if saved_by == "dcp":
        dcp.save({"model": weights, "optimizer": moments}, storage_writer=HoldfastWriter(tmp_path / "ck"))
    else:
        hf.save(tmp_path / "ck", state)
    name, other, *_ = weights
    few = {"model": {name: torch.zeros_like(weights[name])}}
    dcp.load(few, storage_reader=HoldfastReader(tmp_path / "ck"))
    assert_state_equal(few, {"model": {name: weights[name]}})
    kept = {"weight": torch.full((3,), 7.0), "step": 9}
    more = {"model": {name: torch.zeros_like(weights[name])}, "another": dict(kept)}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: another"):
        dcp.load(more, storage_reader=HoldfastReader(tmp_path / "ck"))
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(more, storage_reader=HoldfastReader(tmp_path / "ck"), planner=planner)
    assert_state_equal(more, {"model": {name: weights[name]}, "another": kept})
    model, _ = trained(2, kind=Odd)
    half = torch.optim.AdamW(list(model.parameters())[:2])  # without state, and with fewer parameters
    hf.load(tmp_path / "ck", {"model": model, "optimizer": half}, strict=False)
    assert_state_equal(model, state["model"])
    for one, stored in list(zip(model.parameters(), state["model"].parameters(), strict=True))[:2]:
        assert torch.equal(half.state[one]["exp_avg"], state["optimizer"].state[stored]["exp_avg"])
    rest = {"model": {other: torch.zeros_like(weights[other])}}
    hf.load(tmp_path / "ck", rest, strict=False)
    assert_state_equal(rest, {"model": {other: weights[other]}})


def test_reading_checks_digests(tmp_path) -> None:
    """A flipped bit is an error that names the tensor; without verify it is read as it is."""
    hf.save(tmp_path / "ck", {"model": {"a": torch.ones(300)}})
    (path,) = (tmp_path / "ck").glob("model-*")
    body = bytearray(path.read_bytes())
    body[-4] ^= 4
    path.write_bytes(body)
    target = {"model": {"a": torch.zeros(300)}}
    with pytest.raises(CheckpointException, match=r"model\.a.*digest differs"):
        dcp.load(target, storage_reader=HoldfastReader(tmp_path / "ck"))
    dcp.load(target, storage_reader=HoldfastReader(tmp_path / "ck", verify=False))
    assert target["model"]["a"][0] == 1


def test_checkpoints_are_replaced_only_if_asked_for(tmp_path) -> None:
    """One committed checkpoint stays unless overwrite=True; what a save that died left behind goes."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/model-00000-deadbeef-1.safetensors").write_bytes(b"remains")
    writer = HoldfastWriter()
    dcp.save({"a": torch.ones(1)}, storage_writer=writer, checkpoint_id=tmp_path / "ck")
    assert not (tmp_path / "ck/model-00000-deadbeef-1.safetensors").exists()
    with pytest.raises(CheckpointException, match="is a committed checkpoint already"):
        dcp.save({"a": torch.zeros(1)}, storage_writer=writer, checkpoint_id=tmp_path / "ck")
    assert hf.load(tmp_path / "ck")["a"] == 1
    dcp.save({"a": torch.zeros(1)}, storage_writer=HoldfastWriter(tmp_path / "ck", overwrite=True))
    assert hf.load(tmp_path / "ck")["a"] == 0
    with pytest.raises(CheckpointException, match="needs a path"):
        dcp.save({"a": torch.zeros(1)}, storage_writer=HoldfastWriter())
    with pytest.raises(CheckpointException, match="needs a path"):
        dcp.load({"a": torch.zeros(1)}, storage_reader=HoldfastReader())


def test_cached_plans_and_other_planners(tmp_path) -> None:
    """Plans that DCP keeps from save to save work, and so does a planner that changes values on the way."""

    class Halved(DefaultSavePlanner):
        def transform_object(self, write_item, object):  # noqa: A002 - the name that DCP gives it
            value = super().transform_object(write_item, object)
            return value / 2 if isinstance(value, torch.Tensor) else value

    for step in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        path = tmp_path / f"step_{step}"
        dcp.save({"a": torch.full((3,), step), "n": step}, storage_writer=HoldfastWriter(path), planner=planner)
        found = hf.load(path)
        assert (found["a"].tolist(), found["n"]) == ([step] * 3, step)
    dcp.save({"a": torch.ones(2), "n": 1}, storage_writer=HoldfastWriter(tmp_path / "half"), planner=Halved())
    assert hf.load(tmp_path / "half")["a"].tolist() == [0.5, 0.5]
    assert hf.load(tmp_path / "half")["n"] == 1


def test_views_of_one_memory(tmp_path) -> None:
    """Tensors of one memory are one only if they have the same values: not a number and its conjugate."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"z": z, "same": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag, "part": z[:1]}
    dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "ck"))
    found = hf.load(tmp_path / "ck")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in state.items()
    }
    assert found["same"].data_ptr() == found["z"].data_ptr()


def test_what_cannot_be_saved_is_refused(tmp_path) -> None:
    """An object of no known kind is an error with its path; nothing is committed."""
    with pytest.raises(CheckpointException, match=r"deep.*object cannot be saved"):
        dcp.save({"deep": {"x": object()}}, storage_writer=HoldfastWriter(tmp_path / "ck"))
    assert not (tmp_path / "ck/manifest.json").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}},
        {"a/0": torch.ones(2), "a": (torch.zeros(2),)},  # a tuple is a plain value to DCP
    ],
)
def test_two_tensors_of_one_name_are_refused(tmp_path, state) -> None:
    """Keys with "/" in them can make the names of two tensors alike: an error names both, nothing is committed."""
    with pytest.raises(CheckpointException, match=r"\['a', 'b'\] and \['a/b'\].*rename a key|'a/0': give one"):
        dcp.save(state, storage_writer=HoldfastWriter(tmp_path / "ck"))
    assert not (tmp_path / "ck").exists()
    dcp.save({"a/b": torch.ones(2), "a": {"b": 1}}, storage_writer=HoldfastWriter(tmp_path / "ck"))
    assert_state_equal(hf.load(tmp_path / "ck"), {"a/b": torch.ones(2), "a": {"b": 1}})


def test_remote_storages(tmp_path) -> None:
    """Any storage: DCP's checkpoint_id is a URI."""
    dcp.save({"a": torch.ones(2)}, storage_writer=HoldfastWriter(), checkpoint_id="memory://interop-dcp/ck")
    target = {"a": torch.zeros(2)}
    dcp.load(target, storage_reader=HoldfastReader(), checkpoint_id="memory://interop-dcp/ck")
    assert target["a"].tolist() == [1, 1]
    assert HoldfastWriter.validate_checkpoint_id("memory://x/y")
    assert not HoldfastReader.validate_checkpoint_id("gopher://x/y")
    hf.Checkpoint("memory://interop-dcp/ck").storage.delete_tree("")


def test_positions_that_became_text(state, tmp_path) -> None:
    """optimizer.state_dict() given to DCP as it is: its numbers come back as text and still fit."""
    dcp.save({"optimizer": state["optimizer"].state_dict()}, storage_writer=HoldfastWriter(tmp_path / "ck"))
    optimizer = adamw(trained(2, kind=Odd)[0])
    hf.load(tmp_path / "ck", {"optimizer": optimizer})
    assert_state_equal(optimizer.state_dict(), state["optimizer"].state_dict())
