"""Snapshots: one arena and one layout for each structure, windows that give the same bytes, files that make sense."""

import itertools
import json
import random
import time
from functools import partial

import pytest
import torch
from process_kit import Background
from safetensors.torch import load_file
from state_kit import assert_same, bits, net, train
from torch import nn

import holdfast as hf
from holdfast.checkpointer.pending_saves import manifest_fields
from holdfast.state.save import snapshot, staging
from holdfast.state.save.plan import plan, signature
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree.flatten import flatten
from holdfast.storage import LocalStorage
from holdfast.writer.arena import Arena
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveJob

_numbers = itertools.count(1)
MIB = 1 << 20


@pytest.fixture
def client():
    with WriterClient.start(thread=True) as one:
        yield one


def fields():
    return manifest_fields(run_id=None, checkpoint_id="c", parent=None, attempt=1, step=1, epoch=None, metrics={})


def save(snapshotter, client, storage, state, name="one", save_id=None, **arguments):
    """Save with a snapshotter of the test's own; returns the directory."""
    save_id = save_id or f"abcdabcd-{next(_numbers):x}"
    job = SaveJob(directory=name, save_id=save_id, manifest=fields())
    snapshotter.submit(state, client, storage, job, **arguments).result(60)
    return storage.local_root / name


def odd_state():
    """Give tensors larger than a window, non-contiguous ones, many small ones, all dtypes' widths."""
    torch.manual_seed(0)
    big = torch.randn(1500, 700)
    return {
        "turned": big.t(),
        "sliced": big[::3, 1::2],
        "expanded": torch.randn(1, 700).expand(900, 700),
        "conj": torch.randn(300, 1000, dtype=torch.complex64).conj(),
        "flat": torch.randn(1_234_567, dtype=torch.float64),
        "bytes": torch.randint(0, 255, (3 * MIB + 17,), dtype=torch.uint8),
        "column": torch.randn(2 * MIB)[::2],
        "half": torch.randn(333, 777).half().permute(1, 0),
        "row": torch.randn(1, 900_000)[:, 1:],
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 5),
        "small": [torch.full((number % 7 + 1,), number, dtype=torch.int16) for number in range(500)],
    }


def test_windows_give_the_same_files(tmp_path, client):
    """A state that streams through 2 MiB leaves byte for byte the files of one that is copied as a whole."""
    state = odd_state()
    storage = LocalStorage(tmp_path)
    whole, windowed = Snapshotter(), Snapshotter(max_staging_bytes=2 << 20)
    first = save(whole, client, storage, state, "whole", "aaaaaaaa-1")
    second = save(windowed, client, storage, state, "windowed", "aaaaaaaa-1")
    assert windowed.arena.size == 2 << 20
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        if name != "manifest.json":
            assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert_same(hf.load(second), state)
    again = save(windowed, client, storage, state, "again", "aaaaaaaa-2")
    assert_same(hf.load(again), hf.load(first))
    whole.close()
    windowed.close()


def test_a_window_below_two_mebibytes_is_refused():
    """Too small a bound is a ConfigError that says the least one."""
    with pytest.raises(hf.ConfigError, match=str(2 << 20)):
        Snapshotter(max_staging_bytes=MIB)


def test_a_failed_save_frees_the_snapshotter(tmp_path, client):
    """After a save that failed (the name is taken) the next one with the same windows works."""
    snapshotter = Snapshotter(max_staging_bytes=2 << 20)
    state = {"w": torch.randn(2 * MIB)}
    storage = LocalStorage(tmp_path)
    save(snapshotter, client, storage, state)
    with pytest.raises(hf.CheckpointExistsError):
        save(snapshotter, client, storage, state)
    assert_same(hf.load(save(snapshotter, client, storage, state, "two")), state)
    snapshotter.close()


def test_an_interrupted_copy_leaves_nobody_copying(monkeypatch):
    """After Ctrl-C in the middle no helper thread writes to the arena: the next save, or nobody, owns that memory."""
    flat = flatten({"w": torch.randn(64, 16384)})
    layout = plan(signature(flat))
    copied, copy = [], staging.move

    def slow(target, source, size):
        time.sleep(0.02)
        copied.append(target)
        copy(target, source, size)

    def interrupt(_):
        raise KeyboardInterrupt

    for name, value in (("move", slow), ("_SHARE", 0), ("_NOTIFY", 0), ("_CHUNK", 1 << 16)):
        monkeypatch.setattr(staging, name, value)
    with Arena.create(layout.arena_bytes) as arena:
        with pytest.raises(KeyboardInterrupt):
            staging.stage(flat.tensors, layout.offsets, layout.sizes, arena, filled=interrupt)
        seen = len(copied)
        time.sleep(0.1)
        assert len(copied) == seen < 64


def test_no_ctrl_c_is_too_many_for_the_helper(monkeypatch):
    """It has the last piece, and Ctrl-C comes again and again: the arena is the caller's when that is copied."""
    flat = flatten({"w": torch.randn(4, 16384)})
    layout = plan(signature(flat))
    other, copy = Background(), staging.move
    monkeypatch.setattr(staging, "move", lambda *piece: other.work(partial(copy, *piece)))
    monkeypatch.setattr(staging, "_SHARE", 0)
    monkeypatch.setattr(staging, "_CHUNK", 1 << 17)
    with other.interrupts(), Arena.create(layout.arena_bytes) as arena:
        arena.prefaulted.set()
        with pytest.raises(KeyboardInterrupt):
            staging.stage(flat.tensors, layout.offsets, layout.sizes, arena)
        assert other.over.is_set()


def test_one_structure_needs_one_layout_and_one_arena(tmp_path, client, monkeypatch):
    """Saves of the same structure plan once and create one arena; a new structure makes both anew."""
    arenas, plans = [], []
    create, make_plan = snapshot.Arena.create, snapshot.plan
    monkeypatch.setattr(snapshot.Arena, "create", lambda size: arenas.append(create(size)) or arenas[-1])
    monkeypatch.setattr(snapshot, "plan", lambda *args, **more: plans.append(1) or make_plan(*args, **more))
    storage = LocalStorage(tmp_path)
    snapshotter = Snapshotter()
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    for number in range(4):
        train(model, optimizer, seed=number)
        found = save(snapshotter, client, storage, {"model": model, "optimizer": optimizer, "n": number}, f"s{number}")
        assert_same(hf.load(found)["model"], model.state_dict())
        assert hf.load(found)["n"] == number
    assert (len(arenas), len(plans)) == (1, 1)
    for state in (
        {"model": model},
        {"model": model, "new": torch.ones(1)},
        {"model": net(0, width=5)},
        {"model": net(0, width=5).double()},
    ):
        found = save(snapshotter, client, storage, state, f"t{len(plans)}")
        assert_same(hf.load(found)["model"], state["model"].state_dict())
    assert (len(arenas), len(plans)) == (5, 5)
    model[0].weight.requires_grad_(False)
    save(snapshotter, client, storage, {"model": model}, "frozen")
    assert len(plans) == 6
    snapshotter.close()
    snapshotter.close()


def test_a_tie_that_appears_or_goes_is_a_new_structure(tmp_path, client):
    """Tensors tied or untied between two saves are stored as they are at each."""
    storage, snapshotter = LocalStorage(tmp_path), Snapshotter()
    left, right = torch.arange(3.0), torch.arange(3.0) + 5
    for number, state in enumerate(({"a": left, "b": right}, {"a": left, "b": left}, {"a": right, "b": left})):
        assert_same(hf.load(save(snapshotter, client, storage, state, f"s{number}")), state)
    snapshotter.close()


def layout_of(state, **arguments):
    layout = plan(signature(flatten(state)), **arguments)
    return layout, [file.path("ID") for file in layout.files]


def test_each_item_has_a_file():
    """The model, and every item of a MiB or more, have files of their own; the rest shares one."""
    state = {"model": net(0), "big/one": {"w": torch.ones(MIB)}, "small": {"w": torch.ones(2)}, "loose": torch.ones(1)}
    _, paths = layout_of(state)
    assert paths == [
        "model-00000-ID.safetensors",
        "big_one-00000-ID.safetensors",
        "state-00000-ID.safetensors",
        "index-00000-ID.json",
    ]


def test_large_items_are_split():
    """No file grows beyond the bound, except for one tensor that is larger alone."""
    state = {"model": {str(number): torch.ones(300) for number in range(10)} | {"huge": torch.ones(2000)}}
    layout, paths = layout_of(state, max_file_bytes=4096)
    assert paths[:2] == ["model-00000-ID.safetensors", "model-00000.part01-ID.safetensors"]
    data = [file.size - file.segments[0][2] for file in layout.files[:-1]]
    assert sorted(data)[-1] == 8000
    assert sorted(data)[-2] <= 4096
    assert sum(data) == layout.tensor_bytes == 4 * 5000


def test_split_files_come_back(tmp_path, client):
    """A state of many part files loads."""
    state = {"model": {str(number): torch.full((300,), float(number)) for number in range(20)}}
    snapshotter = Snapshotter(max_file_bytes=4096)
    found = save(snapshotter, client, LocalStorage(tmp_path), state)
    assert len(list(found.glob("model-*.safetensors"))) > 5
    assert_same(hf.load(found), state)
    snapshotter.close()


def test_frozen_parameters_have_files_of_their_own(tmp_path):
    """Parameters without gradient go to a file of their own, which later saves can link; all come back."""
    model = net(0)
    model[0].requires_grad_(False)
    hf.save(tmp_path / "one", {"model": model})
    frozen = next((tmp_path / "one").glob("model.frozen-*.safetensors"))
    assert set(load_file(frozen)) == {"0.weight", "0.bias"}
    assert_same(hf.load(tmp_path / "one")["model"], model.state_dict())


@pytest.mark.parametrize("item", ["model", "state", "state_of_things", "index", "manifest", "a b/ü=*"])
def test_items_of_any_name_have_plain_tensor_names_in_their_file(tmp_path, item):
    """A file of one item names its tensors as the item does, whatever the item is called."""
    state = {item: {"w": torch.ones(MIB), "b": torch.zeros(3)}, "state": {"x": torch.ones(1)}, item + ".frozen": {}}
    state[item] = {"w": torch.ones(MIB), "b": torch.zeros(3)}
    hf.save(tmp_path / "one", state)
    assert_same(hf.load(tmp_path / "one"), state)
    found = [set(load_file(path)) for path in (tmp_path / "one").glob("*.safetensors")]
    expected = {"state/w", "state/b"} if item == "state" else {"w", "b"}  # that name is the file of what is left over
    assert expected in found


def test_model_file_opens_with_safetensors(tmp_path):
    """The file of the model is ordinary safetensors with the names of its state_dict."""
    model = net(3).to(torch.bfloat16)
    hf.save(tmp_path / "one", {"model": model, "n": 1})
    other = net(4).to(torch.bfloat16)
    other.load_state_dict(load_file(next((tmp_path / "one").glob("model-*.safetensors"))))
    assert_same(other.state_dict(), model.state_dict())


def test_a_file_with_foreign_dtypes_opens(tmp_path):
    """Types safetensors lacks are bytes in the file, which still opens; `load` knows better."""
    state = {
        "model": {
            "c": torch.randn(3, dtype=torch.complex64),
            "w": torch.ones(2),
            "f": torch.ones(2).to(torch.float8_e4m3fnuz),
        }
    }
    hf.save(tmp_path / "one", state)
    found = load_file(next((tmp_path / "one").glob("model-*.safetensors")))
    assert bits(found["c"]) == bits(state["model"]["c"])
    assert torch.equal(found["w"], torch.ones(2))
    assert_same(hf.load(tmp_path / "one"), state)


def test_plan_and_index_are_linear_in_tensors():
    """20 000 tensors are planned with one segment each: nothing is listed twice."""
    state = {"model": {f"layer.{number}": torch.ones(1) for number in range(20_000)}}
    layout, _ = layout_of(state)
    assert sum(len(file.segments) for file in layout.files) == 20_000 + len(layout.files)
    body = json.loads(next(s for s, _, _ in layout.files[-1].segments))
    assert len(body["tensors"]) == 20_000


def test_observe_gives_unchanged_tensors_their_own_file(tmp_path, client):
    """Tensors seen not to change between two saves are laid apart at the next, and still load."""
    storage, snapshotter = LocalStorage(tmp_path), Snapshotter()
    state = {"model": {"still": torch.randn(MIB), "moving": torch.randn(MIB)}}
    for number in range(3):
        state["model"]["moving"] += 1
        job = SaveJob(directory=f"s{number}", save_id=f"abcdabcd-{number}", manifest=fields(), reuse=True)
        snapshotter.observe(snapshotter.submit(state, client, storage, job).result(60).unchanged)
    assert snapshotter.stable == {"model/still"}
    assert set(load_file(tmp_path / "s2" / "model.frozen-00000-abcdabcd-2.safetensors")) == {"still"}
    assert_same(hf.load(tmp_path / "s2"), state)
    snapshotter.close()


def test_random_structures_and_windows(tmp_path, client):
    """Whatever the sizes, offsets and order, streaming through windows loses no byte."""
    rng = random.Random(4)
    storage, snapshotter = LocalStorage(tmp_path), Snapshotter(max_staging_bytes=2 << 20)
    for number in range(6):
        state = {}
        for key in range(rng.randrange(1, 8)):
            dtype = rng.choice([torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128])
            rows, columns = rng.choice([1, 3, 700]), rng.choice([1, 511, 4096])
            value = torch.randint(0, 255, (columns, rows * dtype.itemsize), dtype=torch.uint8).view(dtype)
            state[f"k{key}"] = rng.choice([value, value.t(), value[::2], value[:, :1]])
        state["last"] = torch.randint(0, 255, (rng.randrange(3 << 20),), dtype=torch.uint8)
        found = hf.load(save(snapshotter, client, storage, state, f"s{number}"))
        assert {key: bits(value) for key, value in found.items()} == {key: bits(one) for key, one in state.items()}
    snapshotter.close()


def test_module_of_modules_in_a_list(tmp_path):
    """Several models in a list, one of them tied to the other, come back into live ones."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    hf.save(tmp_path / "one", {"models": [first, second]})
    others = [nn.Linear(2, 2), nn.Linear(2, 2)]
    hf.load(tmp_path / "one", {"models": others})
    assert torch.equal(others[1].weight, first.weight)
