"""What others have saved becomes a checkpoint that loads into live objects, bit for bit, and is accounted for."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from interop_kit import Net, Odd, adamw, full_state, load_all, plain_state, trained
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import holdfast as hf
from holdfast.format.commit import PartSummary, commit
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.interop.blobs import DirectPartWriter
from holdfast.interop.unpickle import read_metadata
from holdfast.storage import LocalStorage
from holdfast.testing import assert_state_equal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def state():
    return full_state()


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    return hf.save(tmp_path_factory.mktemp("import") / "ck", state)


def check(path, state, keys=("model", "optimizer", "scheduler")) -> None:
    """The checkpoint at ``path`` is whole and loads into fresh objects."""
    assert hf.Checkpoint(path).verify().ok
    model, optimizer = trained(2, kind=Odd)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    live = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    live = {key: live[key] for key in keys}
    hf.load(path, live, only=list(keys))
    assert_state_equal(live, {key: state[key] for key in keys})


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_there_and_back(state, saved, tmp_path, to) -> None:
    """Exported and imported again, everything is what it was: objects, plain data, ties, odd tensors."""
    hf.export(saved, tmp_path / "out", to=to)
    done = hf.import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert (done.format, done.not_taken) == (to, ())
    live, rest = load_all(tmp_path / "back")
    assert_state_equal(live, {key: state[key] for key in live})
    wanted = plain_state()
    if to == "dcp":
        wanted["keys"] = {"1": "a", "None": {"True": 1}} if "1" not in rest["keys"] else rest["keys"]
        wanted["options"] = dict(wanted["options"])  # DCP has text keys and plain dicts only
    assert_state_equal(rest, wanted)


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_weights_there_and_back(state, saved, tmp_path, to) -> None:
    """Weights of one file and of shards load into a model with tied tensors, though these formats know no ties."""
    limit = "0.3KB" if to == "hf" else None
    hf.export(saved, tmp_path / "out", to=to, max_shard_size=limit)
    done = hf.import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert done.format in ("hf", "safetensors")
    check(tmp_path / "back", state, ["model"])


def test_plain_torch_files(state, tmp_path) -> None:
    """What scripts write with torch.save: nested dicts, or one state_dict, or a module's."""
    objects = {key: state[key].state_dict() for key in ("model", "optimizer", "scheduler")}
    torch.save({**objects, "epoch": 3, "step": 9, **plain_state()["options"]}, tmp_path / "all.pt")
    done = hf.import_checkpoint(tmp_path / "all.pt", tmp_path / "all")
    assert (done.format, done.checkpoint.step, done.checkpoint.manifest.epoch) == ("torch", 9, 3)
    check(tmp_path / "all", state)
    torch.save(objects["model"], tmp_path / "weights.bin")
    assert hf.import_checkpoint(tmp_path / "weights.bin", tmp_path / "weights").checkpoint.keys() == ["model"]
    check(tmp_path / "weights", state, ["model"])
    torch.save(torch.arange(3), tmp_path / "one.pt")
    hf.import_checkpoint(tmp_path / "one.pt", tmp_path / "one")
    assert hf.load(tmp_path / "one")["one"].tolist() == [0, 1, 2]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_optimizer_state_goes_by_name_where_that_is_certain(tmp_path) -> None:
    """If all shapes differ, or the file tells names, parameters may be given to the live optimizer in any order."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 2))
    optimizer = stepped(model, torch.optim.Adam([one for one in reversed(list(model.parameters())) if one.dim() > 1]))
    wrapped = OrderedDict((f"module._orig_mod.{name}", value) for name, value in model.state_dict().items())
    torch.save({"net": wrapped, "optim": optimizer.state_dict()}, tmp_path / "shapes.pt")
    alike = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = stepped(alike, torch.optim.Adam(reversed(list(alike.named_parameters()))))
    torch.save({"net": alike.state_dict(), "optim": named.state_dict()}, tmp_path / "names.pt")
    for name, net, optim in (("shapes", model, optimizer), ("names", alike, named)):
        done = hf.import_checkpoint(tmp_path / f"{name}.pt", tmp_path / name)
        assert ("optim", "optimizer state, by parameter name") in done.taken
        assert [path for path, _ in done.not_taken] == (["net"] if name == "shapes" else [])
        other = copy.deepcopy(net)
        pairs = list(zip(net.parameters(), other.parameters(), strict=True))
        others = torch.optim.Adam([{"params": [two]} for one, two in pairs if one in optim.state])
        hf.load(tmp_path / name, {"net": other, "optim": others})
        for one, two in pairs:
            assert_state_equal({"p": one, **optim.state.get(one, {})}, {"p": two, **others.state.get(two, {})})


def test_optimizer_state_stays_by_position_where_it_is_not(state, tmp_path) -> None:
    """Two groups, or layers that look alike: positions are kept, the account says so, the same script loads them."""
    objects = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}
    torch.save(objects, tmp_path / "two.pt")
    done = hf.import_checkpoint(tmp_path / "two.pt", tmp_path / "two")
    assert "by position" in dict(done.taken)["optimizer"]
    check(tmp_path / "two", state, ["model", "optimizer"])
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = stepped(layers, torch.optim.Adam(reversed(list(layers.parameters()))))
    torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "alike.pt")
    done = hf.import_checkpoint(tmp_path / "alike.pt", tmp_path / "alike")
    assert "by position" in dict(done.taken)["optimizer"]
    others = torch.optim.Adam(reversed(list(layers.parameters())))
    hf.load(tmp_path / "alike", {"model": layers, "optimizer": others})
    assert_state_equal(others.state_dict(), optimizer.state_dict())


def test_names_that_two_modules_have(tmp_path) -> None:
    """An optimizer of two modules names "weight" twice: its state stays by position, and all of it stays."""
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    both = nn.Sequential(one, two)
    state = stepped(both, torch.optim.Adam(both.parameters())).state_dict()
    state["param_groups"][0]["param_names"] = ["weight", "bias"] * 2  # as torch writes them for named_parameters()
    torch.save({"model": one.state_dict(), "optimizer": state}, tmp_path / "x.pt")
    done = hf.import_checkpoint(tmp_path / "x.pt", tmp_path / "ck")
    assert "by position" in dict(done.taken)["optimizer"]
    assert_state_equal(hf.load(done.checkpoint)["optimizer"], state)


@pytest.mark.parametrize("kept", [{"row": 5}, {"exp_avg_sq_row": 5, "exp_avg_sq_col": 4}, {"exp_avg": 5, "sum": 4}])
def test_factored_moments_are_no_certain_sign(tmp_path, kept) -> None:
    """The moments of rows have the shape of a frozen norm: nobody is said to be theirs; they stay by position."""
    moments = {key: torch.ones(size) for key, size in kept.items()}
    optimizer = {"state": {0: {"step": 1, **moments}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    model = {"w.weight": torch.ones(5, 4), "norm.weight": torch.ones(5)}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "x.pt")
    done = hf.import_checkpoint(tmp_path / "x.pt", tmp_path / "ck")
    assert "by position" in dict(done.taken)["optimizer"]
    assert_state_equal(hf.load(done.checkpoint)["optimizer"], optimizer)


def test_dcp_directories(state, tmp_path) -> None:
    """What dcp.save writes: whole tensors, strided ones, plain data, optimizers by name and by position."""
    model, optimizer = state["model"], state["optimizer"]
    nested = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": state["scheduler"],
        "turned": plain_state()["turned"],
    }
    dcp.save({**nested, "pair": (1, torch.ones(2)), "epoch": 4}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp/readme.txt").write_text("mine")
    done = hf.import_checkpoint(tmp_path / "dcp", tmp_path / "back")
    assert done.not_taken == (("readme.txt", "a file that .metadata does not name"),)
    check(tmp_path / "back", state)
    rest = hf.load(tmp_path / "back", only=["turned", "pair", "epoch"])
    assert_state_equal(rest, {"turned": plain_state()["turned"], "pair": (1, torch.ones(2)), "epoch": 4})


class _Hyper:
    """A class that only the training script of somebody has."""

    def __init__(self) -> None:
        self.lr = 0.1


def lightning(state) -> dict:
    """What Lightning 2 saves."""
    return {
        "epoch": 2,
        "global_step": 40,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state["model"].state_dict(),
        "loops": {"fit_loop": {"epoch_progress": {"current": {"ready": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "dirpath": "x"}},
        "optimizer_states": [state["optimizer"].state_dict()],
        "lr_schedulers": [state["scheduler"].state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 3, "config": _Hyper()},
    }


def test_dcp_directories_with_slashes_in_keys(tmp_path) -> None:
    """Keys that make the names of several tensors alike: each tensor is taken, under a name of its own."""
    state = {
        "a/b": torch.ones(2),
        "a": {"b": torch.zeros(2), "c": (torch.full((2,), 3.0), 4)},
        "a/c/0": torch.full((2,), 5.0),
        "a/b~2": torch.full((2,), 6.0),
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    done = hf.import_checkpoint(tmp_path / "theirs", tmp_path / "ck")
    assert done.checkpoint.verify(deep=True).ok
    assert_state_equal(hf.load(done.checkpoint), state)
    assert dict(done.taken) == {"a/b": "1 tensors", "a": "2 tensors", "a/c/0": "1 tensors", "a/b~2": "1 tensors"}


def test_lightning(state, tmp_path) -> None:
    """Model, optimizer, scheduler, counters and callbacks are taken; an object of the script is left out and named."""
    torch.save(lightning(state), tmp_path / "last.ckpt")
    done = hf.import_checkpoint(tmp_path / "last.ckpt", tmp_path / "back")
    assert (done.format, done.checkpoint.step, done.checkpoint.manifest.epoch) == ("lightning", 40, 2)
    assert [path for path, _ in done.not_taken] == ["['hyper_parameters']['config']"]
    check(tmp_path / "back", state)
    rest = hf.load(tmp_path / "back", skip=["model", "optimizer", "scheduler"])
    assert rest["hyper_parameters"] == {"width": 3}
    assert rest["callbacks"]["ModelCheckpoint{'monitor': None}"]["best_model_score"] == 0.5
    two = {**lightning(state), "hyper_parameters": {}}
    two["optimizer_states"] = two["optimizer_states"] * 2
    torch.save(two, tmp_path / "two.pt")
    done = hf.import_checkpoint(tmp_path / "two.pt", tmp_path / "two")
    assert done.format == "torch"
    optimizers = [adamw(trained(2, kind=Odd)[0]) for _ in range(2)]
    hf.load(tmp_path / "two", {"optimizers": optimizers}, only="optimizers")
    assert_state_equal(optimizers[1].state_dict(), state["optimizer"].state_dict())
    torch.save({"a": 1}, tmp_path / "other.ckpt")
    with pytest.raises(hf.UnsupportedStateError, match="no checkpoint of Lightning"):
        hf.import_checkpoint(tmp_path / "other.ckpt", tmp_path / "other")


def test_lightning_with_keys_of_our_names(state, tmp_path) -> None:
    """What a hook of a LightningModule has put under "model" does not come in the place of the weights."""
    torch.save({**lightning(state), "model": {"w": torch.ones(1)}, "global_step": -1}, tmp_path / "x.ckpt")
    done = hf.import_checkpoint(tmp_path / "x.ckpt", tmp_path / "new")
    assert ("model", "what Lightning itself keeps has this name here") in done.not_taken
    assert done.checkpoint.step is None
    assert_state_equal(dict(hf.load(done.checkpoint)["model"]), dict(state["model"].state_dict()))


def test_transformers_and_accelerate_folders(tmp_path) -> None:
    """Weights, optimizer, scheduler, generators and counters; configuration files are listed as not taken."""
    model, _ = trained(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(generators, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 500, "epoch": 1.5}))
    (folder / "config.json").write_text("{}")
    done = hf.import_checkpoint(folder, tmp_path / "back")
    assert (done.format, done.checkpoint.step) == ("hf", 500)
    assert "by position" in dict(done.taken)["optimizer"]
    assert [path for path, _ in done.not_taken] == ["config.json"]
    other = trained(2)[0]
    others = torch.optim.AdamW(other.parameters())
    hf.load(tmp_path / "back", {"model": other, "optimizer": others}, only=["model", "optimizer"])
    assert_state_equal({"m": other, "o": others.state_dict()}, {"m": model, "o": optimizer.state_dict()})
    assert_state_equal(hf.load(tmp_path / "back", only="rng_state")["rng_state"], generators)
    # Accelerate: .bin files, several ranks' generators, sharded pytorch_model.bin
    folder = tmp_path / "accelerate"
    folder.mkdir()
    names = list(model.state_dict())
    for number, part in enumerate((names[:3], names[3:])):
        torch.save({name: model.state_dict()[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    home = {name: f"pytorch_model-{int(name not in names[:3])}.bin" for name in names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": home}))
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(generators, folder / "random_states_0.pkl")
    done = hf.import_checkpoint(folder, tmp_path / "accelerated")
    assert {name for name, _ in done.taken} == {"model", "optimizer", "random_states_0"}
    other = Net()
    hf.load(tmp_path / "accelerated", {"model": other}, only="model")
    assert_state_equal(other, model)


@pytest.mark.parametrize("sharded", [False, True])
def test_accelerate_folders_of_fsdp(tmp_path, sharded) -> None:
    """What `save_state` leaves under FSDP: whole files or directories of DCP, the optimizer by parameter name."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    by_name = get_optimizer_state_dict(model, optimizer)
    folder = tmp_path / "state"
    folder.mkdir()
    if sharded:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": by_name}, checkpoint_id=folder / "optimizer_0")
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_1")
    else:
        torch.save(model.state_dict(), folder / "pytorch_model_fsdp.bin")
        torch.save(by_name, folder / "optimizer.bin")
    torch.save({"seen": 7}, folder / "custom_checkpoint_0.pkl")
    done = hf.import_checkpoint(folder, tmp_path / "taken")
    assert done.format == "hf"
    assert {name for name, _ in done.taken} == {"model", "optimizer", "custom_checkpoint_0"}
    assert [path for path, _ in done.not_taken] == (["pytorch_model_fsdp_1"] if sharded else [])
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    others = torch.optim.AdamW([{"params": [one]} for one in reversed(list(other.parameters()))])
    assert hf.load(tmp_path / "taken", {"model": other, "optimizer": others})["custom_checkpoint_0"] == {"seen": 7}
    assert_state_equal(other, model)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_state_equal(others.state[two], optimizer.state[one])


@pytest.fixture(params=["safetensors", "bin"])
def shards(request, tmp_path):
    """A folder of Hugging Face; writes its files, given their tensors, and its index."""
    folder, stem = tmp_path / "hf", "model" if request.param == "safetensors" else "pytorch_model"
    folder.mkdir()

    def write(*parts: dict, index: dict[str, int] | None = None, total: int = 2) -> Path:
        names = [f"{stem}-{number + 1:05d}-of-{total:05d}.{request.param}" for number in range(total)]
        for name, part in zip(names, parts, strict=False):
            tensors = {key: torch.full((2,), float(value)) for key, value in part.items()}
            save_file(tensors, folder / name) if request.param == "safetensors" else torch.save(tensors, folder / name)
        if index is not None:
            content = {"metadata": {"total_size": 99}, "weight_map": {key: names[at] for key, at in index.items()}}
            (folder / f"{stem}.{request.param}.index.json").write_text(json.dumps(content))
        return folder

    return write


def test_folders_of_shards(shards, tmp_path) -> None:
    """With an index or without; what a file has beside it is listed, also a tensor that the index has elsewhere."""
    folder = shards({"a": 1}, {"b": 2})
    assert hf.load(hf.import_checkpoint(folder, tmp_path / "0").checkpoint)["model"].keys() == {"a", "b"}
    shards({"a": 1, "old": 7}, {"b": 2, "a": 9}, index={"a": 0, "b": 1})
    done = hf.import_checkpoint(folder, tmp_path / "1")
    assert [path for path, _ in done.not_taken] == ["model/old", "model/a"]
    assert_state_equal(dict(hf.load(tmp_path / "1")["model"]), {"a": torch.ones(2), "b": torch.full((2,), 2.0)})
    (one,) = folder.glob("*-00001-of-*")
    done = hf.import_checkpoint(one, tmp_path / "2")
    assert (one.name, "one of 2 files, by its name: import their folder for all") in done.not_taken


@pytest.mark.parametrize(
    ("parts", "index", "match"),
    [
        (({"a": 1}, {"old": 1}), {"a": 0, "b": 1}, r"model-00002-of-00002\.\w+ lacks 'b'"),
        (({"a": 1},), {"a": 0, "b": 1}, r"names \w*model-00002-of-00002\.\w+, which is missing"),
        (({"a": 1},), None, r"1 of the 2 files of \w*model\.\w+; missing: \w*model-00002-of-00002"),
        (({"a": 1}, {"a": 2}), None, "two files have a tensor 'a'"),
    ],
)
def test_folders_that_are_not_whole(shards, tmp_path, parts, index, match) -> None:
    """A half-done download, a file of another version: an error that names what is missing, nothing is written."""
    folder = shards(*parts, index=index)
    with pytest.raises(hf.CorruptCheckpointError, match=match):
        hf.import_checkpoint(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    if any(folder.glob("*.safetensors")):
        with pytest.raises(hf.CorruptCheckpointError, match=match):
            hf.import_checkpoint(folder, tmp_path / "new", format="safetensors")


def test_a_shard_with_a_wrong_number(shards, tmp_path) -> None:
    """As many files as their names say, and one of them is another's: what is missing is named."""
    (second,) = shards({"a": 1}, {"b": 2}).glob("*-00002-of-*")
    second.rename(second.with_name(second.name.replace("-00002-", "-00003-")))
    with pytest.raises(hf.CorruptCheckpointError, match=rf"missing: {second.name}: fetch"):
        hf.import_checkpoint(second.parent, tmp_path / "new")


def test_parts_that_are_there_twice(tmp_path) -> None:
    """Of two files with the same part one is taken, and the other is said to be that; directories cannot overlap."""
    weights = {"w": torch.arange(4.0).reshape(2, 2)}
    other = {"w": torch.zeros(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    torch.save({"seen": 1}, tmp_path / "optimizer.bin")
    for name in ("pytorch_model.bin", "pytorch_model_fsdp.bin", "optimizer.pt"):
        torch.save(other, tmp_path / name)
    torch.save(hf.Keep(last=1), tmp_path / "scheduler.bin")  # is not taken, so nothing is the same as that
    torch.save({"last": 3}, tmp_path / "scheduler.pt")
    dcp.save({"model": other}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    done = hf.import_checkpoint(tmp_path, tmp_path / "taken")
    same = "the same part as {}, which was taken".format
    assert dict(done.not_taken) == {
        "optimizer.pt": same("optimizer.bin"),
        **dict.fromkeys(("pytorch_model.bin", "pytorch_model_fsdp.bin"), same("model.safetensors")),
        "pytorch_model_fsdp_0": same("model.safetensors"),
        "['scheduler']": "neither plain data nor a dense tensor, nor of a class that is looked up",
        "scheduler.pt": "no training state that is known here",
    }
    assert [name for name, _ in done.taken] == ["model", "optimizer"]
    assert_state_equal(hf.load(tmp_path / "taken"), {"model": weights, "optimizer": {"seen": 1}})


def test_directories_in_a_folder_that_overlap(tmp_path) -> None:
    """What a directory has beside its own part does not come in the place of what was taken before."""
    weights = {"w": torch.arange(4.0).reshape(2, 2)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    both = {"optimizer": {"m": torch.ones(3)}, "model": {"w": torch.zeros(2, 2)}}
    dcp.save(both, checkpoint_id=tmp_path / "optimizer_0")
    done = hf.import_checkpoint(tmp_path, tmp_path / "taken")
    assert [path for path, _ in done.not_taken] == ["optimizer_0/model"]
    assert_state_equal(hf.load(tmp_path / "taken"), {"model": weights, "optimizer": both["optimizer"]})


def test_sources_with_nothing_to_take(tmp_path) -> None:
    """An empty dict, a folder with an empty index: an error instead of a checkpoint without anything in it."""
    torch.save({}, tmp_path / "x.pt")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors.index.json").write_text('{"weight_map": {}}')
    for name, why in (("x.pt", "it is empty"), ("hf", r"index\.json: no training state")):
        with pytest.raises(hf.UnsupportedStateError, match=why):
            hf.import_checkpoint(tmp_path / name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_trainer_state(tmp_path) -> None:
    """JSON that is none is damage, and names the file."""
    torch.save({}, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": ')
    with pytest.raises(hf.CorruptCheckpointError, match=r"trainer_state\.json"):
        hf.import_checkpoint(tmp_path, tmp_path / "new")


def test_safetensors_of_others(tmp_path) -> None:
    """All dtypes that the package writes, in one file or a folder of them; linked files as in the hub's cache."""
    tensors = {
        str(dtype)[6:]: torch.ones(3).to(dtype)
        for dtype in (torch.bfloat16, torch.float8_e5m2, torch.bool, torch.int64, torch.complex64, torch.uint16)
    }
    tensors |= {"empty": torch.zeros(0, 2), "number": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "some.safetensors")
    hf.import_checkpoint(tmp_path / "some.safetensors", tmp_path / "one")
    assert_state_equal(dict(hf.load(tmp_path / "one")["model"]), tensors)
    hub = tmp_path / "hub/snapshots/5f2a"
    hub.mkdir(parents=True)
    (tmp_path / "hub/blobs").mkdir()
    (tmp_path / "some.safetensors").rename(tmp_path / "hub/blobs/9c1e")
    (hub / "a.safetensors").symlink_to("../../blobs/9c1e")
    save_file({"more": torch.ones(2)}, hub / "b.safetensors")
    done = hf.import_checkpoint(hub, tmp_path / "two")
    assert done.format == "safetensors"
    assert hf.load(tmp_path / "two")["model"].keys() == {*tensors, "more"}


def test_what_is_there_stays(tmp_path) -> None:
    """A committed checkpoint is replaced only if asked for; unknown things are said to be unknown."""
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "ck")
    with pytest.raises(hf.CheckpointExistsError, match="overwrite"):
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "ck")
    torch.save({"b": torch.ones(1)}, tmp_path / "a.pt")
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "ck", overwrite=True)
    assert hf.load(tmp_path / "ck")["model"].keys() == {"b"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/x").touch()
    (tmp_path / "trained/checkpoint-20").mkdir(parents=True)
    (tmp_path / "trained/checkpoint-20/optimizer.pt").touch()
    for source, options, match in (
        ("ck", {}, "is a checkpoint of Holdfast already"),
        ("empty", {}, "no format is recognised .* say which"),
        ("trained", {}, "no format is recognised .* name what is in it, as 'checkpoint-20'"),
        (".", {}, "no format is recognised .* name what is in it, as 'a.pt'"),
        ("a.pt", {"format": "dcp"}, "is a file"),
        ("empty", {"format": "torch"}, "is a directory"),
        ("a.pt", {"format": "onnx"}, "use one of auto, safetensors"),
    ):
        with pytest.raises(hf.ConfigError, match=match):
            hf.import_checkpoint(tmp_path / source, tmp_path / "new", **options)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.import_checkpoint(tmp_path / "nowhere", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_remote_there_and_back(tmp_path) -> None:
    """The new checkpoint may be in any storage, and so may the source."""
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    hf.import_checkpoint(tmp_path / "a.pt", "memory://interop-import/ck")
    hf.export("memory://interop-import/ck", "memory://interop-import/b.pt", to="torch")
    hf.import_checkpoint("memory://interop-import/b.pt", tmp_path / "ck")
    assert hf.load(tmp_path / "ck")["model"]["a"] == 1
    hf.Checkpoint("memory://interop-import/ck").storage.delete_tree("")


@pytest.mark.parametrize("fails", [False, True])
def test_an_import_beside_another_save(tmp_path, monkeypatch, fails) -> None:
    """Nobody holds a lease there: files that another save is about to commit go after a commit that shuts it out."""
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt")
    storage = LocalStorage(tmp_path)
    entry = FileEntry(path="state-deadbeef-1.json", size=2, digest=bytes_digest(b"{}"), role="state")
    storage.put("new/state-deadbeef-1.json", b"{}")
    if fails:
        monkeypatch.setattr(DirectPartWriter, "state", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "new")
        assert [path.name for path in (tmp_path / "new").iterdir()] == [entry.path]
        commit(storage, "new", {}, [PartSummary(writer=0, files=(entry,))])
    else:
        hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "new")
        assert not (tmp_path / "new" / entry.path).exists()
        with pytest.raises(hf.CheckpointExistsError):
            commit(storage, "new", {}, [PartSummary(writer=0, files=(entry,))])
    assert hf.Checkpoint(tmp_path / "new").verify().ok


def test_an_import_where_a_removal_was_cut_off(tmp_path) -> None:
    """What it had still to remove goes with the first commit there."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user/notes.txt").write_text("x")
    storage = LocalStorage(tmp_path)
    entry = FileEntry(path="notes.txt", size=1, digest=bytes_digest(b"x"), role="user")
    commit(storage, "user", {}, [PartSummary(writer=0, files=(entry,))])
    (tmp_path / "user/manifest.json").rename(tmp_path / "user/.removing.json")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt")
    hf.import_checkpoint(tmp_path / "old.pt", tmp_path / "user")
    assert not {"notes.txt", ".removing.json"} & {path.name for path in (tmp_path / "user").iterdir()}
    assert hf.Checkpoint(tmp_path / "user").verify().ok


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_paths_of_python_3_13(module, tmp_path):
    """Python 3.13 alone calls its paths `pathlib._local.PosixPath`: they are read like others (as text in DCP)."""
    torch.save({"p": tmp_path, "w": torch.ones(2)}, tmp_path / "usual.pt")
    with zipfile.ZipFile(tmp_path / "usual.pt") as usual, zipfile.ZipFile(tmp_path / "a.pt", "w") as named:
        for name in usual.namelist():
            named.writestr(name, re.sub(rb"cpathlib(\._local)?\n", b"c%s\n" % module, usual.read(name)))
    assert hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "taken").checkpoint.load()["p"] == tmp_path
    metadata = pickle.dumps(Metadata({}, planner_data={"p": PurePosixPath("a/b")}), protocol=2)
    named = re.sub(rb"cpathlib(\._local)?\n", b"c%s\n" % module, metadata)
    assert read_metadata(named).planner_data == {"p": "a/b"}
