"""`holdfast diff` finds what was changed and nothing else, whatever the layout, and reads no more than it must."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from command_kit import invoke
from interop_kit import full_state
from mesh_kit import Layout, save_ranks

import holdfast as hf
from holdfast.errors import CorruptCheckpointError
from holdfast.interop.diff import Tolerance, compare
from holdfast.storage import LocalStorage


def pair(folder, before: dict, after: dict, **options):
    a = hf.save(folder / "a", before)
    b = hf.save(folder / "b", after)
    return compare(a, b, **options)


def one(before, after, folder):
    """The account of one tensor; None if the two are the same."""
    found = pair(folder, {"x": before}, {"x": after})
    assert found.compared == 1
    return found.tensors[0] if found.tensors else None


def test_a_state_is_the_same_as_itself_without_reading_a_tensor(tmp_path) -> None:
    """Equal digests prove it: nobody misses the files with the tensors."""
    state = full_state(1)
    for name in "ab":
        hf.save(tmp_path / name, {**state, "rng": torch.Generator().manual_seed(1)}, step=ord(name), metrics={"m": 1.0})
        for file in (tmp_path / name).glob("*.safetensors"):
            file.unlink()
    found = json.loads(invoke("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert (found["same"], found["bytes_read"], found["about"]["step"]) == (True, 0, [97, 98])
    assert found["tensors"]["by_digest"] == found["tensors"]["compared"] > 30


def test_each_change_of_a_state_is_found(tmp_path) -> None:
    """One for each kind of thing that can differ; the rest is said to be the same."""
    before, after = full_state(1), full_state(1)
    after["step"], after["note"], after["new"] = 8, "\x1b[31m", [1, {"a": 2}]
    del after["none"]
    after["number"] = 5
    after["turned"] = after["turned"].flatten()
    after["scheduler"] = torch.optim.lr_scheduler.ConstantLR(after["optimizer"])
    with torch.no_grad():
        after["model"].lin.weight[2, 3] += 0.5
    found = pair(tmp_path, before, after)
    assert not found.same
    assert {"none", "scheduler/step_size"} <= {entry.name for entry in found.only_in_a}
    assert [(entry.name, entry.entries) for entry in found.only_in_b if entry.name.startswith("new")] == [("new", 3)]
    assert {change.name: (change.a, change.b) for change in found.kinds} == {
        "number": ("tensor", "plain data (5)"),
        "scheduler": ("object StepLR", "object ConstantLR"),
    }
    assert {"step", "note"} <= {change.name for change in found.plain}
    assert [(change.name, change.elements) for change in found.tensors] == [("model/lin.weight", 49), ("turned", None)]
    row = found.tensors[0]
    assert (row.differing, row.at) == (1, (2, 3))
    assert row.largest == row.norm == pytest.approx(0.5)
    text = invoke("diff", tmp_path / "a", tmp_path / "b", code=1).stdout
    assert "\x1b" not in text
    assert "shape 6×4 → 24" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_values_of_a_dtype(tmp_path, dtype) -> None:
    """Count, norm and largest are those of the values, also where NumPy does not know the dtype."""
    before = torch.tensor([1.0, -2.0, float("nan"), 0.0]).to(dtype)
    after = torch.tensor([1.0, 2.0, float("nan"), 3.0]).to(dtype)
    row = one(before, after, tmp_path)
    assert (row.differing, row.norm, row.largest, row.at, row.not_finite) == (2, 5.0, 4.0, (1,), 0)
    assert row.values == (before[1].item(), after[1].item())


def test_nan_equals_nan_and_zero_equals_minus_zero(tmp_path) -> None:
    """Bits may differ where values do not."""
    other_nan = torch.tensor([0x7FC00001, 0, 5], dtype=torch.int32).view(torch.float32)
    assert one(torch.tensor([math.nan, -0.0, 7e-45]), other_nan, tmp_path) is None


def test_what_is_not_finite_is_counted_apart(tmp_path) -> None:
    """NaN and infinities on one side make no norm that says nothing."""
    row = one(torch.tensor([1.0, 2.0, math.inf, 4.0]), torch.tensor([1.0, math.nan, -math.inf, 7.0]), tmp_path)
    assert (row.differing, row.not_finite, row.norm, row.largest, row.at) == (3, 2, 3.0, 3.0, (3,))
    row = one(torch.tensor([1.0]), torch.tensor([math.nan]), tmp_path / "b")
    assert (row.differing, row.norm, row.at, math.isnan(row.values[1])) == (1, 0.0, (0,), True)


def test_integers_of_64_bits_do_not_overflow(tmp_path) -> None:
    """Neither where they lie as far apart as can be, nor where a float shows no difference."""
    top = 2**63 - 1
    row = one(torch.tensor([-top - 1, top]), torch.tensor([top, top - 1]), tmp_path)
    assert (row.differing, row.largest) == (2, 2.0**64)
    row = one(np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64), tmp_path / "b")
    assert (row.differing, row.largest, row.values) == (1, 1.0, (2**64 - 1, 2**64 - 2))


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (torch.zeros(0, 3), torch.zeros(0, 3), None),
        (np.array(["a", "bc"]), np.array(["a", "bd"]), 1),
        (np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-03"], "M8[D]"), 1),
        (np.arange(3, dtype=">i2"), np.array([0, 1, 300], dtype=">i2"), 1),
        (torch.tensor(1.5), torch.tensor(2.5), 1),
    ],
    ids=["bool", "empty", "text", "dates", "foreign order", "no dimensions"],
)
def test_odd_ones(tmp_path, before, after, count) -> None:
    """Arrays that torch cannot hold, and tensors without elements or dimensions."""
    row = one(before, after, tmp_path)
    assert (row and row.differing) == count


def test_another_dtype_is_a_change_and_values_are_compared_all_the_same(tmp_path) -> None:
    """A float32 checkpoint against its bfloat16 export: the dtype differs, by how much is said."""
    before = torch.tensor([1.0, 1.001, 3.0])
    row = one(before, before.to(torch.bfloat16), tmp_path)
    assert (row.dtype, row.differing, row.at) == (("float32", "bfloat16"), 1, (1,))
    assert row.largest == pytest.approx(0.001, rel=1e-3)


def test_tolerance(tmp_path) -> None:
    """Absolute and relative, for tensors and plain numbers; NaN is never within it."""
    before = {"x": torch.tensor([1.0, 100.0]), "lr": 0.1, "list": [1.0, 2.0, 3.0, 4.0]}
    after = {"x": torch.tensor([1.05, 100.5]), "lr": 0.1001, "list": [1.0, 2.0, 3.0, 4.01]}
    hf.save(tmp_path / "a", before)
    hf.save(tmp_path / "b", after)
    a, b = hf.Checkpoint(tmp_path / "a"), hf.Checkpoint(tmp_path / "b")
    assert [change.differing for change in compare(a, b).tensors] == [2]
    found = compare(a, b, tolerance=Tolerance(absolute=0.06))
    assert ([change.differing for change in found.tensors], found.plain) == ([1], [])
    assert compare(a, b, tolerance=Tolerance(absolute=0.06, relative=0.01)).same
    assert "within the tolerance" in invoke("diff", tmp_path / "a", tmp_path / "b", "--tolerance", 1).stdout
    hf.save(tmp_path / "c", {**before, "x": torch.tensor([1.0, math.nan])})
    assert not compare(a, hf.Checkpoint(tmp_path / "c"), tolerance=Tolerance(absolute=9.0, relative=9.0)).same


def test_names_choose_what_counts(tmp_path) -> None:
    """--only and --skip decide what is compared; a name that nobody has is an error."""
    before, after = full_state(1), full_state(1)
    after["note"] = "other"
    hf.save(tmp_path / "a", before)
    hf.save(tmp_path / "b", after)
    both = (tmp_path / "a", tmp_path / "b")
    invoke("diff", *both, code=1)
    invoke("diff", *both, "--only", "model", "--only", "optimizer/*")
    invoke("diff", *both, "--skip", "note")
    assert "nope" in invoke("diff", *both, "--only", "nope", code=2).stderr


def test_layouts_do_not_matter(tmp_path) -> None:
    """Columns of four ranks against the whole of one, and against rows of two: the same, until a number changes."""
    tensor = torch.randn(37, 64)
    changed = tensor.clone()
    changed[36, 63] += 1
    storage = LocalStorage(tmp_path)
    for name, value, layout in (("rows", tensor, Layout((2,), (0,))), ("cut", changed, Layout((4,), (1,)))):
        make = {"w": value}
        save_ranks(
            layout.world,
            lambda rank, layout=layout, make=make: {"model": {k: layout.shard(v) for k, v in make.items()}},
            storage=storage,
            directory=name,
        )
    whole = hf.save(tmp_path / "whole", {"model": {"w": tensor}})
    rows, cut = hf.Checkpoint(tmp_path / "rows"), hf.Checkpoint(tmp_path / "cut")
    assert compare(whole, rows).same
    assert compare(rows, rows).by_digest == 1
    for other in (whole, rows):
        (row,) = compare(other, cut).tensors
        assert (row.name, row.differing, row.at) == ("model/w", 1, (36, 63))


def test_damage_is_no_difference(tmp_path) -> None:
    """Bytes that are not what was written are an error, with the tensor, not a difference."""
    a = hf.save(tmp_path / "a", {"x": torch.zeros(100)})
    b = hf.save(tmp_path / "b", {"x": torch.ones(100)})
    (file,) = (tmp_path / "b").glob("*.safetensors")
    body = bytearray(file.read_bytes())
    body[4100] ^= 1
    file.write_bytes(body)
    with pytest.raises(CorruptCheckpointError, match="'x'"):
        compare(a, b)


def test_runs_stand_for_their_checkpoints(tmp_path) -> None:
    """The newest one, or that of a step; of a run and a checkpoint, the choice is for the run."""
    model = torch.nn.Linear(2, 2)
    for name in ("one", "two"):
        with hf.Checkpointer(tmp_path / name, {"model": model}, every=1, keep=hf.Keep(last=9)) as ck:
            for step in range(2):
                with torch.no_grad():
                    model.bias.fill_(step)
                ck.step()
    only = ("--only", "model")
    invoke("diff", tmp_path / "one", tmp_path / "two", *only)
    first = tmp_path / "two" / "step_00000001"
    invoke("diff", tmp_path / "one", first, *only, code=1)
    invoke("diff", tmp_path / "one", first, "--step", 1, *only)
    invoke("diff", first, first, "--step", 1, code=2)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.bin").write_bytes(b"x")
    assert "holdfast import" in invoke("diff", foreign, first, code=2).stderr


SCRIPT = """
import os, sys
from pathlib import Path
import holdfast as hf
folder, total = sys.argv[1], int(sys.argv[2])
os.chdir(folder)
if os.fork() == 0:
    import torch
    torch.manual_seed(0)
    for name in "ab":
        hf.save(name, {"large": torch.randn(total // 8), **{str(n): torch.randn(total // 512) for n in range(64)}})
    os._exit(0)
os.wait()
from holdfast.interop.diff import compare
from memory_kit import peak_bytes
import holdfast.interop.arithmetic
hf.load("a", only="3")
before = peak_bytes()
found = compare(hf.Checkpoint("a"), hf.Checkpoint("b"))
assert len(found.tensors) == 65
print(peak_bytes() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path) -> None:
    """Two checkpoints of 160 MB, half of each one tensor, are compared in less than 100 MB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "160000000"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(f"{int(done.stdout):,} bytes more")
    assert int(done.stdout) < 100_000_000


def test_torch_is_not_imported_for_equal_digests(tmp_path) -> None:
    """Digests settle it without torch."""
    for name in "ab":
        hf.save(tmp_path / name, {"x": torch.ones(5)})
    code = (
        "import sys\nfrom holdfast.cli.main import cli\n"
        f"cli(['diff', {str(tmp_path / 'a')!r}, {str(tmp_path / 'b')!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
