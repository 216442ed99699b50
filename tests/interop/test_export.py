"""What is exported is, bit for bit, what was saved, as the other program reads it."""

from __future__ import annotations

import contextlib
import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from interop_kit import Odd, adamw, full_state, plain_state, trained
from parts_kit import Tied, save_parts, train
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast as hf
from holdfast.dcp import HoldfastReader
from holdfast.errors import StorageError
from holdfast.interop.blobs import ExportFolder
from holdfast.state.save.torch_file import from_plain
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.testing import assert_state_equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def state():
    return full_state()


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    extra = {"rng": hf.RNG, "own": hf.PerRank({"cache": torch.ones(2)})}
    return hf.save(tmp_path_factory.mktemp("export") / "ck", {**state, **extra}, step=7)


def weights(model) -> dict:
    return dict(model.state_dict())


def test_torch_file_has_everything(state, saved, tmp_path) -> None:
    """One file for torch.load, whose dicts are those of the objects' own state_dict(); mapped and weights-only."""
    done = hf.export(saved, tmp_path / "all.pt", to="torch")
    found = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    for key in ("model", "optimizer", "scheduler"):
        assert_state_equal(found[key], state[key].state_dict())
    assert_state_equal({key: from_plain(found[key]) for key in plain_state()}, plain_state())
    assert found["own"] == {"cache": found["own"]["cache"]}
    assert found["model"]["emb.weight"].data_ptr() == found["model"]["head.weight"].data_ptr()
    assert (done.format, done.files, done.left_out) == (
        "torch",
        (("all.pt", (tmp_path / "all.pt").stat().st_size),),
        (),
    )
    optimizer = adamw(trained(2, kind=Odd)[0])
    optimizer.load_state_dict(found["optimizer"])
    assert_state_equal(optimizer.state_dict(), state["optimizer"].state_dict())


def test_safetensors_has_every_name(state, saved, tmp_path) -> None:
    """One file with the weights; a tied tensor is there under each of its names."""
    wanted = weights(state["model"])
    done = hf.export(saved, tmp_path / "all.safetensors", to="safetensors")
    assert_state_equal(load_file(tmp_path / "all.safetensors"), wanted)
    assert done.num_tensors == len(wanted)
    assert ("optimizer", "not weights") in done.left_out
    hf.export(saved, tmp_path / "folder", to="safetensors", only="model/lin.*")
    assert_state_equal(
        load_file(tmp_path / "folder/model.safetensors"), {key: wanted[key] for key in ("lin.weight", "lin.bias")}
    )


@pytest.mark.parametrize(
    ("state", "both"),
    [
        (
            {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
            r"\['model', 'a', 'b'\] and \['model', 'a.b'\] .* 'MODELa.b'",
        ),
        ({1: torch.ones(1), "1": torch.zeros(1)}, r"\['model', '1'\] and \['model', 1\] .* 'MODEL1'"),
    ],
)
def test_names_that_meet_in_the_other_format(tmp_path, state, both) -> None:
    """Two tensors that would have one name are refused, both paths named and nothing written; torch holds them."""
    hf.save(tmp_path / "ck", {"model": state, "more": {"x": torch.ones(1), 1: 5, "1": 6}})
    for to, above in (("safetensors", ""), ("hf", ""), ("dcp", "model.")):
        with pytest.raises(hf.ConfigError, match=both.replace("MODEL", above)):
            hf.export(tmp_path / "ck", tmp_path / to, to=to)
        assert not (tmp_path / to).exists()
    with pytest.raises(hf.ConfigError, match=r"\['more', '1'\] and \['more', 1\]"):
        hf.export(tmp_path / "ck", tmp_path / "dcp", to="dcp", only="more")
    plain = {"plain": {1: [5], "1": 6, None: {"None": 7}}, "empty": {}, "inside": {"of": {}, "list": []}}
    hf.save(tmp_path / "plain", plain)
    hf.export(tmp_path / "plain", tmp_path / "plain-dcp", to="dcp")
    back = hf.import_checkpoint(tmp_path / "plain-dcp", tmp_path / "back").checkpoint
    assert hf.load(back) == plain
    hf.export(tmp_path / "ck", tmp_path / "all.pt", to="torch")
    assert_state_equal(torch.load(tmp_path / "all.pt", weights_only=True)["model"], state)
    fits = {"more": {"x": torch.zeros(1)}}
    dcp.load(fits, storage_reader=HoldfastReader(tmp_path / "ck"))
    assert fits["more"]["x"] == 1
    key = next(iter(state))
    with pytest.raises(CheckpointException, match=both.replace("MODEL", "model.")):
        dcp.load({"model": {key: torch.zeros(1)}}, storage_reader=HoldfastReader(tmp_path / "ck"))


def test_hugging_face_layout(state, saved, tmp_path) -> None:
    """Shards with an index; tied tensors once, under their first name; the format that transformers looks for."""
    wanted = weights(state["model"])
    del wanted["head.weight"]
    one = hf.export(saved, tmp_path / "one", to="hf")
    assert ("model/head.weight", "tied to emb.weight") in one.left_out
    assert [name for name, _ in one.files] == ["model.safetensors"]
    assert_state_equal(load_file(tmp_path / "one/model.safetensors"), wanted)
    many = hf.export(saved, tmp_path / "many", to="hf", max_shard_size="0.3KB")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    assert sorted(set(index["weight_map"].values())) == [name for name, _ in many.files[:-1]]
    found: dict = {}
    for name in set(index["weight_map"].values()):
        assert b'"format":"pt"' in (tmp_path / "many" / name).read_bytes()[:200]
        found |= load_file(tmp_path / "many" / name)
    assert_state_equal(found, wanted)
    assert all(tensor in load_file(tmp_path / "many" / name) for tensor, name in index["weight_map"].items())


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_floating_tensors_are_converted(state, saved, tmp_path, to) -> None:
    """dtype= rounds as torch does, in windows; integers and booleans stay."""
    path = tmp_path / ("x.pt" if to == "torch" else "x.safetensors")
    hf.export(saved, path, to=to, dtype="bfloat16")
    found = torch.load(path, weights_only=True)["model"] if to == "torch" else load_file(path)
    wanted = {
        key: value.to(torch.bfloat16) if value.is_floating_point() else value
        for key, value in weights(state["model"]).items()
    }
    assert_state_equal(dict(found), wanted)


def test_values_beyond_the_range_of_the_dtype(tmp_path) -> None:
    """The result names tensors that are infinite now and were not; what was infinite before is as it was."""
    model = {"big": torch.tensor([1e30, 1.0]), "fits": torch.tensor([6e4, 1.0]), "mask": torch.tensor([-torch.inf])}
    hf.save(tmp_path / "ck", {"model": model})
    for to in ("torch", "safetensors", "hf", "dcp"):
        path = tmp_path / ("x.pt" if to == "torch" else to)
        assert hf.export(tmp_path / "ck", path, to=to, dtype="float16").too_large == ("model/big",)
    assert hf.export(tmp_path / "ck", tmp_path / "y.pt", to="torch", dtype="bfloat16").too_large == ()
    assert torch.load(tmp_path / "x.pt")["model"]["fits"].tolist() == [6e4, 1.0]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_packed_numbers_are_not_converted(tmp_path) -> None:
    """dtype= leaves a tensor as it is that has two numbers in an element."""
    packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    hf.save(tmp_path / "ck", {"model": {"packed": packed, "w": torch.ones(2)}})
    hf.export(tmp_path / "ck", tmp_path / "x.pt", to="torch", dtype="bfloat16")
    found = torch.load(tmp_path / "x.pt", weights_only=True)["model"]
    assert found["packed"].view(torch.uint8).tolist() == [0, 1, 2, 3]
    assert found["w"].dtype == torch.bfloat16


def test_dcp_reads_it_into_live_objects(state, saved, tmp_path) -> None:
    """Plain dcp.load fills a model and an optimizer; dcp_to_torch_save takes all of it."""
    hf.export(saved, tmp_path / "dcp", to="dcp")
    model, optimizer = trained(2, kind=Odd)
    found, moments = get_state_dict(model, optimizer)
    target = {"model": found, "optimizer": moments, "step": 0, "turned": torch.zeros(6, 4)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert_state_equal(model, state["model"])
    assert_state_equal(optimizer.state_dict()["state"], state["optimizer"].state_dict()["state"])
    assert target["step"] == 7
    assert_state_equal({"a": target["turned"]}, {"a": plain_state()["turned"]})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "from_dcp.pt")
    whole = torch.load(tmp_path / "from_dcp.pt", weights_only=True)
    assert_state_equal(dict(whole["model"]), weights(state["model"]))
    assert_state_equal({"q": from_plain(whole["queue"])}, {"q": plain_state()["queue"]})


def test_optimizer_state_of_no_parameter(tmp_path) -> None:
    """What torch keeps under keys that are no parameters: torch.load has it there, and every way back brings it."""

    def made(seed: int) -> dict:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    state = made(0)
    wanted = state["optimizer"]
    wanted.state.update({"k": 3, "mean": torch.ones(2), "more": {"x": torch.zeros(1)}})
    saved = hf.save(tmp_path / "ck", state)
    hf.export(saved, tmp_path / "all.pt", to="torch")
    hf.export(saved, tmp_path / "dcp", to="dcp")
    assert_state_equal(torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"], wanted.state_dict())
    for name in ("all.pt", "dcp"):
        hf.import_checkpoint(tmp_path / name, tmp_path / f"from {name}")
        other = made(1)
        hf.load(tmp_path / f"from {name}", other)
        assert_state_equal(other["optimizer"].state_dict(), wanted.state_dict())


def test_loose_state_dicts_export_too(tmp_path) -> None:
    """A checkpoint of nothing but tensors, or of one item under another name, needs no item=."""
    hf.save(tmp_path / "flat", {"a": torch.ones(2), "b": torch.zeros(3)})
    hf.export(tmp_path / "flat", tmp_path / "flat.safetensors", to="safetensors")
    assert load_file(tmp_path / "flat.safetensors").keys() == {"a", "b"}
    hf.save(tmp_path / "net", {"net": torch.nn.Linear(2, 2), "epoch": 1})
    hf.export(tmp_path / "net", tmp_path / "net.safetensors", to="safetensors")
    assert load_file(tmp_path / "net.safetensors").keys() == {"weight", "bias"}
    hf.save(tmp_path / "two", {"one": {"x": torch.ones(2)}, "two": {"deep": [{"y": torch.ones(2)}]}})
    with pytest.raises(hf.ConfigError, match=r"several that hold tensors \(one, two\)"):
        hf.export(tmp_path / "two", tmp_path / "two.safetensors", to="safetensors")
    hf.export(tmp_path / "two", tmp_path / "two.safetensors", to="safetensors", item="two")
    assert load_file(tmp_path / "two.safetensors").keys() == {"deep.0.y"}


def test_other_storages(saved, tmp_path) -> None:
    """From and to any storage; a file is visible only when it is whole."""
    storage = MemoryStorage("interop-export")
    hf.save("memory://interop-export/ck", {"model": {"a": torch.ones(2)}})
    hf.export("memory://interop-export/ck", "memory://interop-export/out/x.safetensors", to="safetensors")
    hf.export("memory://interop-export/ck", tmp_path / "x.pt", to="torch")
    assert torch.load(tmp_path / "x.pt", weights_only=True)["model"]["a"].tolist() == [1, 1]
    assert storage.exists("out/x.safetensors")
    storage.delete_tree("")


def test_what_is_there_stays(saved, tmp_path) -> None:
    """Nothing is replaced without `overwrite`; other files of a folder are nobody's business."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    for to, path in (("torch", "x.pt"), ("safetensors", "x.safetensors"), ("dcp", "dcp"), ("hf", "hf")):
        hf.export(saved, tmp_path / path, to=to)
        with pytest.raises(hf.CheckpointExistsError, match="overwrite"):
            hf.export(saved, tmp_path / path, to=to)
        hf.export(saved, tmp_path / path, to=to, overwrite=True, only=["model", "step"])
    assert torch.load(tmp_path / "x.pt", weights_only=True).keys() == {"model", "step"}
    assert (tmp_path / "hf/config.json").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"to": "onnx"}, "use one of safetensors, torch, dcp, hf"),
        ({"to": "torch", "item": "model"}, "are for safetensors and hf"),
        ({"to": "dcp", "max_shard_size": 5}, "are for safetensors and hf"),
        ({"to": "hf", "max_shard_size": "5 apples"}, "max_shard_size='5 apples'"),
        ({"to": "hf", "max_shard_size": 0}, "max_shard_size=0"),
        ({"to": "hf", "item": "nothing"}, "no item 'nothing': it has model"),
        ({"to": "hf", "item": "step"}, "step has no tensors"),
        ({"to": "hf", "dtype": "int8"}, "floating dtype"),
        ({"to": "safetensors", "item": "complex"}, "no dtype complex64"),
        ({"to": "torch", "only": "misspelt"}, "nothing in the checkpoint matches"),
    ],
)
def test_wrong_calls_are_refused(saved, tmp_path, options, match) -> None:
    """With a message that says what to do, and nothing at the destination."""
    with pytest.raises(hf.ConfigError, match=match):
        hf.export(saved, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_export(tmp_path) -> None:
    """A wrong path is said to be one."""
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.export(tmp_path / "none", tmp_path / "x.pt", to="torch")


def test_dcp_folder_is_what_dcp_itself_would_plan(state, saved, tmp_path) -> None:
    """Keys and kinds of entries equal those of dcp.save of the same nested dicts."""
    model, optimizer = state["model"], state["optimizer"]
    found, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": found, "optimizer": moments, "loose": plain_state()["loose"]}, checkpoint_id=tmp_path / "theirs"
        )
    hf.export(saved, tmp_path / "ours", to="dcp", only=["model", "optimizer", "loose"])
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, entry in theirs.state_dict_metadata.items():
        other = ours.state_dict_metadata[key]
        assert type(other) is type(entry)
        assert getattr(other, "size", None) == getattr(entry, "size", None), key
    assert ours.planner_data == theirs.planner_data


def test_checkpoints_of_several_ranks(tmp_path) -> None:
    """What three ranks have divided comes out whole; of what each keeps for itself that of rank 0, and it says so."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    states = [
        {"model": model, "optimizer": optimizer, "own": hf.PerRank({"cache": torch.full((2,), rank)})}
        for rank in range(3)
    ]
    save_parts(LocalStorage(tmp_path), "ck", states)
    done = hf.export(tmp_path / "ck", tmp_path / "x.pt", to="torch")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_state_equal(found["model"], model.state_dict())
    assert_state_equal(found["optimizer"], optimizer.state_dict())
    assert found["own"]["cache"].tolist() == [0, 0]
    assert done.left_out == (("own", "the values of 2 other ranks: only that of rank 0 is written"),)
    hf.export(tmp_path / "ck", tmp_path / "hf", to="hf")
    hf.import_checkpoint(tmp_path / "hf", tmp_path / "back")
    other = Tied()
    hf.load(tmp_path / "back", {"model": other})
    assert_state_equal(other, model)


@pytest.mark.parametrize("sizes", [(1300, None), (None, 1300)])
def test_a_replaced_export_leaves_nothing_behind(tmp_path, sizes) -> None:
    """One file where there were shards, or the other way round: asked for, and then no reader finds the old weights."""
    old, new = (
        hf.save(tmp_path / str(value), {"model": {"w": torch.full((300,), value), "v": torch.full((300,), value)}})
        for value in (0.0, 1.0)
    )
    hf.export(old, tmp_path / "out", to="hf", max_shard_size=sizes[0])
    with pytest.raises(hf.CheckpointExistsError, match="overwrite"):
        hf.export(new, tmp_path / "out", to="hf", max_shard_size=sizes[1])
    done = hf.export(new, tmp_path / "out", to="hf", max_shard_size=sizes[1], overwrite=True)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(name for name, _ in done.files)
    back = hf.import_checkpoint(tmp_path / "out", tmp_path / "back").checkpoint
    assert hf.load(back)["model"]["w"].tolist() == [1.0] * 300


def test_a_directory_swapped_for_a_link_while_a_file_is_written(tmp_path) -> None:
    """Its last rename stays in the directory that the file was begun in: nothing behind the link is replaced."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "w.bin").write_bytes(b"precious")
    folder = ExportFolder(LocalStorage(tmp_path / "top"), "deep")
    with contextlib.suppress(StorageError), folder.create("w.bin", 3) as sink:
        sink(memoryview(b"abc"))
        partial = next((tmp_path / "top/deep").iterdir()).name
        (tmp_path / "top/deep").rename(tmp_path / "top/away")
        (tmp_path / "top/deep").symlink_to(outside)
        (outside / partial).write_bytes(b"theirs")
    assert (outside / "w.bin").read_bytes() == b"precious"
