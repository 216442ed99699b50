"""`holdfast average` writes the mean of weights, in bounded memory, and says of what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_kit import invoke
from interop_kit import Odd, full_state, trained
from mesh_kit import Layout, save_ranks

import holdfast as hf
from holdfast import Checkpoint
from holdfast.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError, StateMismatchError
from holdfast.interop.arithmetic import average, ema_weights
from holdfast.interop.diff import compare
from holdfast.storage import LocalStorage


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with the steps 1, 2 and 4, and 3 of a life that a resume from 2 went back behind; the weights say which."""
    model = torch.nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def go(value: float, steps: int, resume: object = "auto", every: int = 1) -> None:
        options = {"every": every, "keep": hf.Keep(last=9), "resume": resume}
        with hf.Checkpointer(tmp_path / "run", state, **options) as ck:
            for _ in range(steps):
                with torch.no_grad():
                    model.weight.fill_(value)
                    value += 1
                ck.step()

    go(1.0, 3)
    go(9.0, 2, resume=tmp_path / "run" / "step_00000002", every=2)
    return tmp_path / "run"


def weight(path) -> float:
    return hf.load(path)["model"]["weight"][0, 0].item()


def test_the_mean_of_a_model_loads_into_it(tmp_path) -> None:
    """Every floating tensor, whatever its dtype, is the mean in float64; the rest is that of the last one."""
    a, b = full_state(1), full_state(2)
    b["model"].counts = torch.arange(1, 4).to(torch.uint16)
    sources = [hf.save(tmp_path / "a", a, step=1), hf.save(tmp_path / "b", b, step=2)]
    done = average(sources, Checkpoint(tmp_path / "out"), weights=[3, 1])
    model = trained(3, kind=Odd)[0]
    hf.load(tmp_path / "out", {"model": model})
    for name, found in model.state_dict().items():
        one, other = a["model"].state_dict()[name], b["model"].state_dict()[name]
        expected = (0.75 * one.double() + 0.25 * other.double()).to(one.dtype) if one.is_floating_point() else other
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
    assert model.head.weight is model.emb.weight
    assert done.unlike == ("model/counts",)
    assert "model/norm.num_batches_tracked" in done.from_last
    assert done.left_out[:2] == ("optimizer", "scheduler")
    noted = done.checkpoint.manifest.extra["average"]
    assert noted["method"] == "weighted"
    assert [(source["checkpoint"], source["step"], source["share"]) for source in noted["sources"]] == [
        (str(tmp_path / "a"), 1, 0.75),
        (str(tmp_path / "b"), 2, 0.25),
    ]
    assert done.checkpoint.verify()
    assert f"0.75 of {tmp_path / 'a'}" in invoke("show", tmp_path / "out").stdout.replace("\n", "")


def test_the_mean_of_one_thing_is_that_thing(tmp_path) -> None:
    """Bit for bit, also of three, of NaN with the weight 0, and of numbers without an average in their own dtype."""
    state = {"model": {"w": torch.randn(1000), "low": torch.randn(9).to(torch.bfloat16), "c": torch.randn(3) + 1j}}
    sources = [hf.save(tmp_path / name, state) for name in "abc"]
    average(sources, Checkpoint(tmp_path / "out"))
    assert invoke("diff", tmp_path / "a", tmp_path / "out").exit_code == 0
    state["model"]["w"][5] = float("nan")
    bad = hf.save(tmp_path / "bad", state)
    assert average([bad, *sources], Checkpoint(tmp_path / "nan")).not_finite == ("model/w",)
    assert average([bad, *sources], Checkpoint(tmp_path / "fine"), weights=[0, 1, 1, 1]).not_finite == ()


def test_layouts_do_not_matter(tmp_path) -> None:
    """Rows of two ranks and columns of four, into an object store: one whole checkpoint there."""
    tensor = torch.randn(37, 64)
    sources = []
    for name, layout in (("rows", Layout((2,), (0,))), ("columns", Layout((4,), (1,)))):
        value = tensor * (len(sources) + 1)
        save_ranks(
            layout.world,
            lambda rank, layout=layout, value=value: {"model": {"w": layout.shard(value)}},
            storage=LocalStorage(tmp_path),
            directory=name,
        )
        sources.append(Checkpoint(tmp_path / name))
    out = Checkpoint("memory://average/out")
    average(sources, out)
    torch.testing.assert_close(out.load()["model"]["w"], tensor * 1.5)


def test_what_does_not_match_is_refused(tmp_path) -> None:
    """Names, shapes and kinds, all of them listed, with what to do; and nothing is written."""
    a = hf.save(tmp_path / "a", {"model": {"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(2)}})
    b = hf.save(tmp_path / "b", {"model": {"x": torch.ones(3), "z": torch.ones(2), "\x1bn": torch.ones(2)}})
    with pytest.raises(StateMismatchError, match="holdfast diff A B") as caught:
        average([a, b], Checkpoint(tmp_path / "out"))
    assert [text.partition(": ")[2] for text in caught.value.problems] == [
        "model/\x1bn is missing",
        "model/y is there, and not in the last checkpoint",
        "model/x has the shape [2], not [3]",
    ]
    assert not (tmp_path / "out").exists()
    assert "\x1b" not in invoke("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", code=1).stderr
    invoke("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--only", "model/z")
    assert list(hf.load(tmp_path / "out")["model"]) == ["z"]
    with pytest.raises(CheckpointExistsError):
        average([a, a], Checkpoint(tmp_path / "out"))
    with pytest.raises(ConfigError, match="weights"):
        average([a, a], Checkpoint(tmp_path / "c"), weights=[1, -1])
    plain = hf.save(tmp_path / "plain", {"weights": {"x": torch.ones(2)}, "step": 1})
    with pytest.raises(ConfigError, match="has no model"):
        average([plain, plain], Checkpoint(tmp_path / "c"))


def test_ties_of_some_sources(tmp_path) -> None:
    """What only an earlier source ties is averaged by its place; what the last ties has to be equal in the others."""
    tied, bias = torch.full((2,), 3.0), torch.ones(2)
    apart = {"emb": torch.ones(2), "head": torch.full((2,), 5.0), "bias": bias}
    a = hf.save(tmp_path / "a", {"model": apart})
    b = hf.save(tmp_path / "b", {"model": {"emb": tied, "head": tied, "bias": bias * 3}})
    found = average([b, a], Checkpoint(tmp_path / "c")).checkpoint.load()["model"]
    assert {name: value.tolist() for name, value in found.items()} == {"emb": [2, 2], "head": [4, 4], "bias": [2, 2]}
    with pytest.raises(StateMismatchError) as caught:
        average([a, b], Checkpoint(tmp_path / "d"))
    assert "model/head and model/emb differ, and are tied in the last checkpoint" in caught.value.problems[0]
    assert not (tmp_path / "d").exists()
    average([a, b], Checkpoint(tmp_path / "d"), only=["model/head"])
    assert Checkpoint(tmp_path / "d").load()["model"]["head"].tolist() == [4, 4]
    equal = hf.save(tmp_path / "e", {"model": {"emb": bias, "head": bias.clone(), "bias": bias}})
    found = average([equal, b], Checkpoint(tmp_path / "f")).checkpoint.load()["model"]
    assert found["head"].tolist() == [2, 2]
    assert found["head"].data_ptr() == found["emb"].data_ptr()


def test_paths_that_are_alike(tmp_path) -> None:
    """The keys 1 and "1", "x/y" and y in x, in any order: each is averaged with its like, and compared with it."""

    def state(*order: int, plus: float) -> dict:
        items = [(1, torch.tensor([1.0])), ("1", torch.tensor([100.0])), ("x/y", torch.tensor([7.0])), ("x", {})]
        found = dict(items[at] for at in order)
        found["x"] = {"y": torch.tensor([70.0]) + plus}
        return {
            "model": {key: value + plus if isinstance(value, torch.Tensor) else value for key, value in found.items()}
        }

    a = hf.save(tmp_path / "a", state(0, 1, 2, 3, plus=0.0))
    b = hf.save(tmp_path / "b", state(3, 2, 1, 0, plus=2.0))
    found = average([a, b], Checkpoint(tmp_path / "c")).checkpoint.load()["model"]
    assert (found[1], found["1"], found["x/y"], found["x"]["y"]) == (2.0, 101.0, 8.0, 71.0)
    assert len(compare(a, b).tensors) == 4
    again = hf.save(tmp_path / "d", state(3, 2, 1, 0, plus=0.0))
    assert compare(a, again).same


def test_damage_leaves_nothing_behind(tmp_path) -> None:
    """Neither a checkpoint nor files of one; what was to be replaced stays."""
    a, b = (hf.save(tmp_path / name, {"model": {"w": torch.full((100,), 1.0)}}) for name in "ab")
    average([a, b], Checkpoint(tmp_path / "out"))
    before = sorted((tmp_path / "out").iterdir())
    (file,) = (tmp_path / "b").glob("*.safetensors")
    body = bytearray(file.read_bytes())
    body[4100] ^= 1
    file.write_bytes(body)
    for name in ("out", "new"):
        with pytest.raises(CorruptCheckpointError, match="model/w"):
            average([a, b], Checkpoint(tmp_path / name), overwrite=True)
    assert sorted((tmp_path / "out").iterdir()) == before
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


def test_checkpoints_of_a_run(run, tmp_path) -> None:
    """In the order of steps, without those of a life that a resume went back behind: 1, 2 and 10 are the weights."""
    found = json.loads(invoke("average", run, "--last", 2, "-o", tmp_path / "two", "--json").stdout)
    assert [(source["step"], source["share"]) for source in found["sources"]] == [(2, 0.5), (4, 0.5)]
    assert weight(tmp_path / "two") == 6.0
    invoke("average", run, "--ema", 0.5, "-o", tmp_path / "ema")
    assert weight(tmp_path / "ema") == 0.25 * 1 + 0.25 * 2 + 0.5 * 10
    assert Checkpoint(tmp_path / "ema").manifest.extra["average"]["method"] == "ema 0.5"
    invoke("average", run, run / "step_00000001", "-o", tmp_path / "mixed", "--weights", "1,3")
    assert weight(tmp_path / "mixed") == 0.25 * 10 + 0.75 * 1
    for arguments in (
        [run],
        [run / "step_00000001"],
        [run, "--last", 2, "--weights", "1,2,3"],
        [run, "--last", 2, "--weights", "a,b"],
        [run, "--ema", 1.0],
        [run, "--ema", 0.5, "--weights", "1,2,3"],
        [run, run, "--last", 2],
    ):
        invoke("average", *arguments, "-o", tmp_path / "none", code=2)
    assert "3 good checkpoints" in invoke("average", run, "--last", 5, "-o", tmp_path / "none", code=1).stderr


def test_the_weights_of_a_moving_average() -> None:
    """Those that following one by one gives; their sum is 1."""
    values, shadow = [3.0, 5.0, 4.0, 8.0], 3.0
    for value in values[1:]:
        shadow = 0.9 * shadow + 0.1 * value
    weights = ema_weights(0.9, 4)
    assert sum(weights) == pytest.approx(1.0)
    assert sum(w * v for w, v in zip(weights, values, strict=True)) == pytest.approx(shadow)


SCRIPT = """
import os, sys
import holdfast as hf
folder, total, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.chdir(folder)
if os.fork() == 0:
    import torch
    torch.manual_seed(0)
    for number in range(count):
        model = {"large": torch.randn(total // 8), **{str(n): torch.randn(total // 512) for n in range(64)}}
        hf.save(f"s{number}", {"model": model})
    os._exit(0)
os.wait()
from memory_kit import peak_bytes
from holdfast.interop.arithmetic import average
one = [hf.Checkpoint("s0"), hf.Checkpoint("s1")]
average(one, hf.Checkpoint("warm"), only=["model/3"])
before = peak_bytes()
average([hf.Checkpoint(f"s{number}") for number in range(count)], hf.Checkpoint("out"))
print(peak_bytes() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path) -> None:
    """Eight checkpoints of 40 MB need less than 100 MB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "40000000", "8"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(f"{int(done.stdout):,} bytes more")
    assert int(done.stdout) < 100_000_000
