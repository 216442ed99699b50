"""Small files that are committed with a checkpoint, for other libraries that read its directory."""

from __future__ import annotations

import json
import os

import pytest
import safetensors
import torch

import holdfast as hf
from holdfast.model_files import ModelFiles
from holdfast.state.save.plan import plan, signature
from holdfast.state.tree.flatten import flatten

INDEX = "model.safetensors.index.json"


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 30))


def read_by_index(folder, index=INDEX):
    """Read tensors as another library does: the index says which file, safetensors gives the tensor."""
    where = os.path.dirname(os.path.join(folder, index))
    with open(os.path.join(folder, index)) as opened:
        body = json.load(opened)
    found = {}
    for name, file in body["weight_map"].items():
        with safetensors.safe_open(os.path.join(where, file), "pt") as opened:
            found[name] = opened.get_tensor(name)
    assert body["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def assert_same(found, model):
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_saved_directory_is_read_by_its_index(tmp_path):
    """Files have their contents, the index names our files, and the checkpoint is a checkpoint as ever."""
    model = small_model()
    model[0].weight.requires_grad_(False)  # a file of its own
    files = ModelFiles(files={"config.json": '{"a": 1}', "tokens/vocab.txt": b"x"}, indexes={INDEX: "model"})
    saved = hf.save(tmp_path / "a", {"model": model, "n": 3}, model_files=files)
    assert (tmp_path / "a/config.json").read_text() == '{"a": 1}'
    assert (tmp_path / "a/tokens/vocab.txt").read_bytes() == b"x"
    assert_same(read_by_index(saved.path), model)
    assert saved.verify().ok
    assert hf.load(saved)["n"] == 3
    assert not [name for name in os.listdir(saved.path) if name.startswith("plan-")]


def test_a_plain_mapping_and_a_function_give_contents_too(tmp_path):
    """`{name: bytes | text | function}` is enough; a function is asked at each save."""
    numbers = iter(range(9))
    for name in ("a", "b"):
        hf.save_async(
            tmp_path / name, {"x": torch.ones(3)}, model_files={"count.txt": lambda: str(next(numbers))}
        ).result()
    assert [(tmp_path / name / "count.txt").read_text() for name in ("a", "b")] == ["0", "1"]


def test_a_run_links_equal_files_and_indexes_each_save(tmp_path):
    """Contents are stored once for all checkpoints of a run; each index names the files of its own checkpoint."""
    model = small_model()
    files = ModelFiles(files={"config.json": "{}"}, indexes={INDEX: "model"})
    with hf.Checkpointer(tmp_path / "run", {"model": model}, every=1, keep=None, model_files=files) as ck:
        for step in range(3):
            with torch.no_grad():
                model[1].weight.fill_(step)
            ck.step()
    for step in (1, 2, 3):
        folder = tmp_path / f"run/step_{step:08d}"
        assert torch.equal(read_by_index(folder)["1.weight"], torch.full((8, 8), step - 1.0))
    assert os.stat(folder / "config.json").st_nlink == 3
    with hf.Checkpointer(tmp_path / "run", {"model": small_model()}, model_files=files) as ck:
        assert ck.global_step == 3


def test_windows_carry_them_too(tmp_path):
    """A state that streams through a small arena has the same files."""
    model = torch.nn.Linear(1500, 1500)
    files = ModelFiles(files={"config.json": "{}"}, indexes={INDEX: "model"})
    with hf.Checkpointer(tmp_path, {"model": model}, max_staging_bytes=4 << 20, model_files=files) as ck:
        ck.step()
    assert_same(read_by_index(tmp_path / "step_00000001"), model)


def test_named_files_hold_renamed_tensors(tmp_path):
    """For libraries that read no index: chosen tensors in a file of a fixed name, once; our own load finds them."""
    model = small_model()
    files = ModelFiles(named={"adapter.safetensors": {"model/1.weight": "w", "model/1.bias": "b"}})
    saved = hf.save(tmp_path / "a", {"model": model}, model_files=files)
    with safetensors.safe_open(tmp_path / "a/adapter.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == ["b", "w"]
        assert torch.equal(opened.get_tensor("w"), model[1].weight)
    other = small_model()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    hf.load(saved, {"model": other})
    assert_same(other.state_dict(), model)
    assert saved.verify().ok


def test_an_item_in_a_folder(tmp_path):
    """Several models in one checkpoint: each has its folder, whose index reaches the files above."""
    encoder, decoder = small_model(), torch.nn.Linear(3, 3)
    files = ModelFiles(indexes={f"encoder/{INDEX}": "encoder", f"decoder/{INDEX}": "decoder"})
    saved = hf.save(tmp_path / "a", {"encoder": encoder, "decoder": decoder}, model_files=files)
    assert_same(read_by_index(saved.path, f"encoder/{INDEX}"), encoder)
    assert_same(read_by_index(saved.path, f"decoder/{INDEX}"), decoder)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_rank_0_knows_where_the_others_put_their_tensors(num_ranks):
    """The index of rank 0 names, for each tensor, the file into which the rank that writes it puts it."""
    model = small_model()
    model[2].weight.requires_grad_(False)
    files = ModelFiles(indexes={INDEX: "model"}, named={"one.safetensors": {"model/1.bias": "b"}})
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    layouts = [
        plan(signature(flatten(state, rank=rank, shared=True)), rank=rank, num_ranks=num_ranks, model_files=files)
        for rank in range(num_ranks)
    ]
    weights = json.loads(layouts[0].indexes[INDEX])["weight_map"]
    written = {}
    for layout in layouts:
        for file in layout.files:
            for source, _, _ in file.segments:
                if isinstance(source, int) and layout.signature.files[source] == "model":
                    written[layout.signature.names[source].removeprefix("model/")] = file.path("{save_id}")
    assert weights == written
    assert weights.keys() == model.state_dict().keys()
    assert not any(layout.indexes for layout in layouts[1:])


def test_another_item_has_a_file_of_its_own_at_any_size(tmp_path):
    """Small items share a file under prefixed names, unless an index names them."""
    saved = hf.save(tmp_path / "a", {"net": small_model()}, model_files=ModelFiles(indexes={INDEX: "net"}))
    assert_same(read_by_index(saved.path), small_model())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "model_files=3"),
        ({"../x": b""}, "cannot be the name"),
        ({"/etc/x": b""}, "cannot be the name"),
        ({".metrics.json": b""}, "cannot be the name"),
        ({"manifest.json": b""}, "cannot be the name"),
        ({"sub/manifest.json": b""}, "cannot be the name"),
        ({"state-0badc0de-1.json": b""}, "cannot be the name"),
        ({"x" * 201: b""}, "cannot be the name"),
        ({"/".join("x" * 401): b""}, "cannot be the name"),
        ({"a": b"", "a/b": b""}, "is a file and the folder"),
        ({"a": 3}, "int is no content"),
    ],
)
def test_what_cannot_be_is_refused_before_training(tmp_path, given, words):
    """A wrong name or content is a ConfigError of the constructor."""
    with pytest.raises(hf.ConfigError, match=words):
        hf.Checkpointer(tmp_path, {}, model_files=given)


def test_wrong_items_and_tensors_are_named_at_the_start(tmp_path):
    """An item that the state lacks fails on entering, and says which there are."""
    files = ModelFiles(indexes={INDEX: "modell"})
    with (
        pytest.raises(hf.ConfigError, match="'modell'; it has them under 'holdfast', 'model'"),
        hf.Checkpointer(tmp_path, {"model": small_model()}, model_files=files),
    ):
        pass
    with pytest.raises(hf.ConfigError, match=r"no tensor 'model/7.weight'"):
        hf.save(
            tmp_path / "a",
            {"model": small_model()},
            model_files=ModelFiles(named={"x.safetensors": {"model/7.weight": "w"}}),
        )
    with pytest.raises(hf.ConfigError, match="the function returned int"):
        hf.save(tmp_path / "a", {"model": small_model()}, model_files={"x": lambda: 3})


def test_an_overwriting_save_is_refused(tmp_path):
    """The old checkpoint could not stay readable: said at once, and where a directory holds such a file already."""
    with pytest.raises(hf.ConfigError, match="overwrite=True with model_files"):
        hf.save(tmp_path / "a", {"x": torch.ones(1)}, overwrite=True, model_files={"config.json": b""})
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text("mine")
    with pytest.raises(hf.CheckpointExistsError, match=r"holds config\.json already"):
        hf.save(tmp_path / "b", {"x": torch.ones(1)}, model_files={"config.json": b""})
    assert (tmp_path / "b/config.json").read_text() == "mine"
    assert os.listdir(tmp_path / "b") == ["config.json"]


def test_deleting_takes_them_along(tmp_path):
    """Retention removes what it wrote, the folders too."""
    files = {"config.json": b"{}", "tokens/vocab.txt": b"x"}
    with hf.Checkpointer(tmp_path, {"model": small_model()}, every=1, keep=hf.Keep(last=1), model_files=files) as ck:
        for _ in range(3):
            ck.step()
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step_")) == ["step_00000003"]


def test_a_reader_of_whole_files_finds_the_model_and_nothing_else(tmp_path):
    """As vLLM reads: the index picks some of the files, and of these every tensor counts, by its name in the file."""
    model = small_model()
    model[0].weight.requires_grad_(False)  # a file of its own
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "mean": torch.ones(3), "model2": torch.nn.Linear(2, 2)}
    saved = hf.save(tmp_path / "a", state, model_files=ModelFiles(indexes={INDEX: "model"}))
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    picked = [path for path in files if path.name in index["weight_map"].values()]
    assert 1 < len(picked) < len(files)
    found = []
    for path in picked:
        with safetensors.safe_open(path, "pt") as opened:
            found += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118 - it is no mapping
    assert len(found) == len(dict(found))
    assert_same(dict(found), model)
    assert saved.verify().ok
