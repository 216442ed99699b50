"""The loop trainer on several ranks: saves, resumes, decisions that all of them take alike, ranks that go."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog_kit import index_of
from process_kit import wait_until
from rank_cases import tells_ranks
from sharded_cases import BOUND, RATE

import holdfast as hf
from holdfast.torch import TorchTrainer

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CASES, SHARDED = (f"{HERE / name}:" for name in ("rank_cases.py", "sharded_cases.py"))
slow = pytest.mark.slow


def assert_twins(whole: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    """The end of an interrupted training is that of one nobody interrupted, on every rank, bit for bit."""
    for one, other in zip(whole, parts, strict=True):
        assert other["rows"] == one["rows"][-len(other["rows"]) :]
        for what in ("sums", "eval", "train", "random", "samples", "batch"):
            assert other[what] == one[what], what


@pytest.mark.parametrize("suffix", ["", pytest.param(".pt", marks=slow)])
def test_twins(ranks: Any, tmp_path: Path, suffix: str) -> None:
    """Two ranks that die in the middle of an epoch, twice, end as two that did not: weights, metrics, random numbers.

    They also end alike: buffers, averages and metrics are one state, losses the mean.
    """
    whole = ranks.checked(f"{CASES}train", str(tmp_path / "whole"), suffix=suffix)
    for batch in (5, 8):
        crashed = ranks.checked(f"{CASES}train", str(tmp_path / "twin"), suffix=suffix, crash_at=batch)
        assert [one["crashed"] for one in crashed] == [True, True]
    twins = ranks.checked(f"{CASES}train", str(tmp_path / "twin"), suffix=suffix)
    assert_twins(whole, twins)
    assert len(twins[0]["rows"]) == 3
    assert whole[0]["samples"] == 3 * 34
    for what in ("eval", "train", "saved"):
        assert whole[0][what] == whole[1][what]
    models = [{name: one for name, one in found["sums"].items() if "metrics" not in name} for found in whole]
    assert models[0] == models[1]
    assert [row[2] for row in whole[0]["rows"]] == [row[2] for row in whole[1]["rows"]]
    assert [row[1] for row in whole[0]["rows"]] != [row[1] for row in whole[1]["rows"]], "ranks saw the same data"
    assert [row[3] for row in whole[0]["rows"]] != [row[3] for row in whole[1]["rows"]], "ranks drew the same numbers"


@pytest.mark.parametrize(
    "killed", [{"1": 7}, pytest.param({"0": 7}, marks=slow), pytest.param({"0": 7, "1": 7}, marks=slow)]
)
def test_killed_ranks_lose_no_batch_that_all_had_kept(ranks: Any, tmp_path: Path, killed: dict[str, int]) -> None:
    """``rescue="1ba"``: the writers of both commit batch 7, and the end is that of ranks that nobody killed."""
    run = tmp_path / "run"
    ended = ranks.ranks(f"{CASES}guarded", str(run), rescue="1ba", kill_at=killed)
    assert [one.status == -9 for one in ended] == [str(rank) in killed for rank in range(2)]
    assert wait_until(lambda: index_of(run).attempts[-1].ended is not None)
    found = hf.Checkpoint(run / "ep0-ba7")
    assert found.verify(deep=True).ok
    assert "trainer process has died" in found.manifest.extra["rescued"]
    end = ranks.checked(f"{CASES}guarded", str(run), rescue="1ba")
    assert end == ranks.checked(f"{CASES}guarded", str(tmp_path / "twin"), guard=None)
    assert not any("rescued" in hf.Checkpoint(path.parent).manifest.extra for path in run.glob("*-ba20/manifest.json"))


def test_weights_saved_later_stop_no_rescue(ranks: Any, tmp_path: Path) -> None:
    """A snapshot of batch 3, weights of batch 4, all killed after 5: batch 3 is saved, for no start goes on from 4."""
    run = tmp_path / "run"
    options = {"rescue": "3ba", "weights": "4ba", "save_interval": "1ep", "guard": None}
    ended = ranks.ranks(f"{CASES}guarded", str(run), kill_at={"0": 5, "1": 5}, **options)
    assert [one.status for one in ended] == [-9, -9]
    assert wait_until(lambda: index_of(run).attempts[-1].ended is not None)
    assert hf.Checkpoint(run / "w4").verify().ok
    assert "trainer process has died" in hf.Checkpoint(run / "ep0-ba3").manifest.extra["rescued"]


@pytest.mark.parametrize("bad", [9, pytest.param(19, marks=slow), pytest.param(0, marks=slow)])
def test_all_ranks_go_back_and_leave_out_the_same_batch(ranks: Any, tmp_path: Path, bad: int) -> None:
    """A bad sample of one rank: both end with 86, twice, and then as ranks that never had that batch."""
    run = str(tmp_path / "run")
    for number in range(2):
        ended = ranks.ranks(f"{CASES}guarded", run, bad)
        assert [one.status for one in ended] == [86, 86], [one.error or one.output for one in ended]
        assert f"rolled back at step {bad + 1}: loss/train/total is nan (batch {bad} of epoch 0)" in ended[0].output
        assert ("left out from now on" in ended[0].output) == (number == 1)
        assert "rolled back" not in ended[1].output
    end = ranks.checked(f"{CASES}guarded", run, bad)
    assert end == ranks.checked(f"{CASES}guarded", str(tmp_path / "twin"), None, bad, guard=None)


@slow
def test_a_signal_in_a_bad_batch_ends_all_ranks_with_the_requeue_status(ranks: Any, tmp_path: Path) -> None:
    """SIGTERM to all, as of a scheduler, which queues the job again for 85; the next start goes back all the same."""
    run, both = str(tmp_path / "run"), {"0": 10, "1": 10}  # where the bad batch has been seen
    ended = ranks.ranks(f"{CASES}guarded", run, 9, kill_at=both, kill_how=int(signal.SIGTERM))
    assert [one.status for one in ended] == [85, 85], [one.error or one.output for one in ended]
    ended = ranks.ranks(f"{CASES}guarded", run, 9)
    assert "left out from now on" in ended[0].output


@slow
@pytest.mark.parametrize("given", [False, True])
def test_three_ranks_that_die_end_as_if_nobody_had_died(ranks: Any, tmp_path: Path, given: bool) -> None:
    """From three ranks on it matters in which order DDP adds; also where the user has wrapped the model."""
    whole = ranks.checked(f"{CASES}wide", str(tmp_path / "whole"), given=given, world_size=3)
    crashed = ranks.checked(f"{CASES}wide", str(tmp_path / "twin"), 3, given=given, world_size=3)
    assert max(one["batch"] for one in crashed) == 3  # the others may notice before they come so far
    again = ranks.checked(f"{CASES}wide", str(tmp_path / "twin"), given=given, world_size=3)
    assert {one["digest"] for one in again} == {one["digest"] for one in whole}
    assert again[0]["batch"] == whole[0]["batch"] > 3


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_a_function_that_changes_what_is_loaded(ranks: Any, tmp_path: Path, suffix: str) -> None:
    """With load_ignore_keys=function each rank gets its own generators and metrics all the same."""
    found = ranks.checked(f"{CASES}loads_by_function", str(tmp_path), suffix)
    for one in found:
        assert one["by_function"] == one["plain"]
    assert found[0]["plain"][0] != found[1]["plain"][0]


@slow
@pytest.mark.parametrize("suffix", ["", ".pt"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks(ranks: Any, tmp_path: Path, before: int, after: int, suffix: str) -> None:
    """Two ranks go on where one was, and one where two were: every sample of the epoch comes once."""
    folder, options = str(tmp_path), {"suffix": suffix, "save_interval": "1ba", "max_duration": "2ep"}
    ranks.ranks(f"{CASES}train", folder, crash_at=4 - before, world_size=before, group=before > 1, **options)
    outcomes = ranks.ranks(f"{CASES}train", folder, world_size=after, group=after > 1, **options)
    found = [one.checked() for one in outcomes]
    assert {one["samples"] for one in found} == {2 * 34}
    assert {one["num_batches"] for one in found} == {6 if after == 1 else 3}
    assert f"after 12 samples is split over {after} rank(s), was {before}" in outcomes[0].output
    assert all(one["eval"] == found[0]["eval"] for one in found)


@pytest.mark.parametrize("kind", ["sampler", pytest.param("unsized", marks=slow)])
def test_unequal_amounts_of_data(ranks: Any, kind: str) -> None:
    """Ranks that have unequal numbers of batches get an error that names them; nobody waits for ever."""
    found = ranks.checked(f"{CASES}uneven", kind)
    assert found[0] == found[1]
    assert re.search("3 on rank 0, 5 on rank 1" if kind == "sampler" else "of rank 0 have ended, rank 1", found[0])


@pytest.mark.parametrize("suffix", ["", pytest.param(".pt", marks=slow)])
def test_signal_to_one_rank(ranks: Any, tmp_path: Path, suffix: str) -> None:
    """SIGTERM to rank 1 alone: both ranks save the same batch and leave with the status for being started again."""
    options = {"save_filename": "b{batch}" + suffix, "save_interval": "5000ba", "max_duration": "5000ba"}
    found = ranks.checked(f"{CASES}dies", str(tmp_path), 1, 3, "SIGTERM", **options)
    assert [one["left"] for one in found] == [85, 85]
    assert found[0]["batch"] == found[1]["batch"] >= 3
    saved = f"b{found[0]['batch']}{suffix}"
    assert os.path.realpath(tmp_path / "latest-rank0") == os.path.realpath(tmp_path / saved)


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_signal_in_an_evaluation(ranks: Any, tmp_path: Path, rank: int) -> None:
    """A signal in the middle of an evaluation: both ranks leave it, and the next life does it again."""
    found = ranks.checked(f"{CASES}leaves_evaluation", str(tmp_path), rank)
    assert [one["left"] for one in found] == [85, 85]
    assert [one["stage"] for one in found] == ["batch_eval", "batch_eval"]
    again = ranks.checked(f"{CASES}leaves_evaluation", str(tmp_path), None)
    assert [one["evaluations"] for one in again] == [4, 4]
    assert [one["batch"] for one in again] == [4, 4]


@slow
def test_signal_in_the_evaluation_at_the_end(ranks: Any, tmp_path: Path) -> None:
    """After the last batch: what is left of the end they leave to the next life, which does it, once."""
    found = ranks.checked(f"{CASES}leaves_evaluation", str(tmp_path), 1, at_end=True)
    assert [(one["left"], one["stage"]) for one in found] == [(85, "fit_end")] * 2
    for _ in range(2):
        again = ranks.checked(f"{CASES}leaves_evaluation", str(tmp_path), None, at_end=True)
        assert [(one["left"], one["stage"], one["evaluations"]) for one in again] == [(None, "", 1)] * 2


@slow
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_goes(ranks: Any, tmp_path: Path, rank: int, how: str) -> None:
    """One rank fails, or is killed: the other one ends with an error that names it; the next start goes on."""
    outcomes = ranks.ranks(f"{CASES}dies", str(tmp_path), rank, 4, how, save_interval="3ba")
    error = outcomes[1 - rank].checked()["error"]
    assert f"rank {rank}: " in error
    assert ("ValueError: something in a callback" if how == "raise" else "its trainer process has died") in error
    assert outcomes[rank].status == (0 if how == "raise" else -9)
    found = ranks.checked(f"{CASES}dies", str(tmp_path), 0, -1, "", save_interval="3ba", max_duration="6ba")
    assert [one["batch"] for one in found] == [6, 6]
    assert [len(one["rows"]) for one in found] == [3, 3]


@slow
@pytest.mark.parametrize("kind", ["StorageFullError", "StorageError"])
def test_a_save_fails(ranks: Any, tmp_path: Path, kind: str) -> None:
    """One rank cannot make its part: a full storage costs that save on all ranks, anything else ends all of them."""
    outcomes = ranks.ranks(f"{CASES}fails_to_save", str(tmp_path), 1, kind)
    first, second = (one.checked() for one in outcomes)
    if kind == "StorageFullError":
        assert first == second == {"error": None, "saved": ["b8", "b12"], "batch": 12}
        assert outcomes[0].output.count("a checkpoint was NOT saved, the storage is full (rank 1: no room here)") == 1
        assert outcomes[1].output == ""
    else:
        assert second == {"error": "StorageError: rank 1: no room here", "saved": [], "batch": 4}
        assert (first["saved"], first["batch"] - 4 in (0, 1)) == ([], True)
        assert "rank 1: " in first["error"]
        assert "no room here" in first["error"]


@slow
def test_sharded(ranks: Any, tmp_path: Path) -> None:
    """A model sharded with fully_shard trains like one under DDP, and resumes exactly; a file of it is refused."""
    whole = ranks.checked(f"{SHARDED}sharded", str(tmp_path / "whole"))
    ranks.checked(f"{SHARDED}sharded", str(tmp_path / "twin"), crash_at=5)
    twins = ranks.checked(f"{SHARDED}sharded", str(tmp_path / "twin"))
    for one, other in zip(whole, twins, strict=True):
        assert (one["weights"], one["eval"]) == (other["weights"], other["eval"])
        assert other["rows"] == one["rows"][4:]
    replicated = ranks.checked(f"{SHARDED}sharded", str(tmp_path / "ddp"), what="nothing")
    for name, value in replicated[0]["weights"].items():
        assert whole[0]["weights"][name] == pytest.approx(value, rel=1e-5)
    assert whole[0]["eval"]["accuracy"] == replicated[0]["eval"]["accuracy"]
    refused = ranks.ranks(f"{SHARDED}sharded", str(tmp_path / "file"), suffix=".pt")
    assert all("holdfast export" in one.error for one in refused)


@slow
@pytest.mark.parametrize("what", ["a layer", "all but a layer"])
def test_partly_sharded(ranks: Any, tmp_path: Path, what: str) -> None:
    """What is left out of a sharded model is trained in step as well: as under DDP, on both ranks, and resumed."""
    replicated = ranks.checked(f"{SHARDED}sharded", str(tmp_path / "ddp"), what="nothing", max_duration="1ep")
    ranks.checked(f"{SHARDED}sharded", str(tmp_path / "parts"), what=what, crash_at=2)
    parts = ranks.checked(f"{SHARDED}sharded", str(tmp_path / "parts"), what=what, max_duration="1ep")
    assert parts[0]["weights"] == parts[1]["weights"]
    for name, value in replicated[0]["weights"].items():
        assert parts[0]["weights"][name] == pytest.approx(value, rel=1e-5)
    assert parts[0]["eval"] == parts[1]["eval"]


def assert_close(one: dict[str, list[float]], other: dict[str, list[float]]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert other[name] == pytest.approx(values, rel=1e-4, abs=1e-7), name


@slow
@pytest.mark.parametrize("what", ["a layer", "all but a layer"])
def test_gradients_of_partly_sharded(ranks: Any, what: str) -> None:
    """Every element moves as under DDP where gradients count as they are, bounded together and exchanged once a batch.

    Also those of a branch that one rank alone goes through, and of parameters that are thawed later.
    """
    replicated = ranks.checked(f"{SHARDED}by_elements", "nothing")
    parts = ranks.checked(f"{SHARDED}by_elements", what)
    assert_close(replicated[0]["after"], parts[0]["after"])
    assert parts[0]["after"] == parts[1]["after"]
    assert parts[0]["after"]["extra.weight"] != parts[0]["before"]["extra.weight"]
    assert parts[0]["has"] == [False, True] * 3
    first = ranks.checked(f"{SHARDED}by_elements", what, batches=1)[0]
    moved = [
        b - a for name, values in first["before"].items() for a, b in zip(values, first["after"][name], strict=True)
    ]
    assert math.hypot(*moved) == pytest.approx(RATE * BOUND, rel=1e-3)
    thawed = ranks.checked(f"{SHARDED}by_elements", what, frozen=True)
    assert thawed[0]["after"] == thawed[1]["after"]
    assert thawed[0]["after"]["last.bias"] != thawed[0]["before"]["last.bias"]


@slow
def test_sparse_gradients_beside_sharded_ones(ranks: Any) -> None:
    """The mean of them is taken as well, be it that one rank alone has any."""
    for found in ranks.checked(f"{SHARDED}rows_of_one_rank"):
        assert found == [[0.0, 0.0], [0.5, 0.5], [0.0, 0.0]]


def test_optimizers_over_two_kinds(ranks: Any) -> None:
    """What torch cannot step or scale at once is refused with what to do; the default, and kinds apart, train."""
    found = ranks.checked(f"{SHARDED}two_kinds", world_size=1)[0]
    told = {name: text for name, text in found.items() if text}
    assert set(told) == {"foreach", "fused", "cuda", "scaled", "scaled default"}
    assert "optimizers[0] (AdamW)" in told["foreach"]
    assert "foreach=True cannot step together: give each kind a group of its own" in told["foreach"]
    assert "or pass foreach=False" in told["cuda"]
    assert "give each kind an optimizer of its own" in told["scaled"]


def test_gradients_of_two_kinds(ranks: Any) -> None:
    """One that overflowed spoils no other when it is measured; what is not sharded moves, in place, and buffers do."""
    found = ranks.checked(f"{SHARDED}gradients_of_two_kinds", world_size=1)[0]
    assert found == {"spoilt": ["2.bias"], "moved": ["2.bias", "2.weight", "mean"], "where": ["cuda:1"]}


@slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("tensor parallel", "0.weight is split over ranks by something else than fully_shard"),
        ("part of the ranks", "0.weight is sharded over 1 of 2 ranks"),
        ("first generation", "use torch.distributed.fsdp.fully_shard instead"),
    ],
)
def test_models_that_would_not_train_in_step(ranks: Any, what: str, told: str) -> None:
    """A model whose ranks would train different weights is refused, before anything is trained."""
    assert all(told in one for one in ranks.checked(f"{SHARDED}split_otherwise", what))


@slow
def test_one_life_after_another(ranks: Any, tmp_path: Path) -> None:
    """What the user has wrapped and split is used as it is; damage of one rank's part makes all fall back."""
    outcomes = ranks.ranks(f"{CASES}one_life_after_another", str(tmp_path))
    first, second = (one.checked() for one in outcomes)
    assert first == second
    assert first["names"] == ["bias", "weight"]
    assert first["tuned"] == [True, True]
    assert (first["batch"], first["begun"], first["end"]) == (6, 5, 9)
    assert outcomes[0].output.count("set aside b6, its files are left alone: rank 1: ") == 1
    assert "loaded" not in outcomes[1].output
    assert first["nothing"].startswith("CheckpointNotFoundError: load_path=")
    assert first["other"].startswith("StateMismatchError: ")


@slow
def test_by_the_clock(ranks: Any, tmp_path: Path) -> None:
    """Saves, evaluations and the end by the clock come at the same batches, under the same names, on both ranks."""
    found = ranks.checked(f"{CASES}by_the_clock", str(tmp_path))
    assert found[0] == found[1]
    assert len(found[0]["saved"]) >= 2
    assert found[0]["evaluations"] >= 1
    assert found[0]["clock"] >= 1.8


@slow
def test_several_savers(ranks: Any, tmp_path: Path) -> None:
    """Directories, files of weights, uploads, links, logs and single checkpoints; nothing is there twice."""
    found = ranks.checked(f"{CASES}many_savers", str(tmp_path))
    assert found[0] == found[1]
    assert found[0]["saved"] == ["full/e2", "weights/b5.safetensors", "weights/b6.safetensors"]
    assert os.readlink(tmp_path / "weights" / "newest") == "b6.safetensors"
    assert os.readlink(tmp_path / "full" / "latest-rank0") == "e2"
    for directory in ("full/e2", "bucket/many/checkpoints/e2", "two"):
        checkpoint = hf.Checkpoint(tmp_path / directory)
        assert checkpoint.verify(deep=True).ok
        assert checkpoint.manifest is not None
        assert checkpoint.manifest.writers == (0, 1)
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert list(one) == ["state", "rng"]
    assert len(one["rng"]) == 2
    assert sorted(one["state"]["model"]) == ["bias", "weight"]
    steps = [json.loads(row)["step"] for row in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6], "rank 0 alone writes"
    refused = ranks.checked(f"{CASES}refused", str(tmp_path))
    assert refused[0] == refused[1]
    assert "save_overwrite=False" in refused[0]
    longer = ranks.checked(f"{CASES}many_savers", str(tmp_path), again=True, max_duration="3ep")
    assert longer[1]["saved"] == ["full/e3", "weights/b8.safetensors", "weights/b9.safetensors"]


@slow
def test_metrics_of_all_ranks(ranks: Any) -> None:
    """An evaluation of 20 samples by two ranks, 12 and 8 of them, counts each once."""
    found = ranks.checked(f"{CASES}gathered_metrics")
    assert found[0] == found[1]
    assert found[0]["own"] == pytest.approx(7 / 20), "zeros are at 0, 3, ..., 18"
    assert found[0]["function"] == pytest.approx(found[0]["theirs"])
    assert found[0]["theirs"] * 20 == pytest.approx(round(found[0]["theirs"] * 20), abs=1e-5)


@slow
def test_iterables(ranks: Any) -> None:
    """Samples and tokens of data that split themselves are added up; uneven ends are an error, no hang."""
    found = ranks.checked(f"{CASES}tokens", [4])
    assert found == [{"tokens": 30, "samples": 16, "batch": 4}] * 2
    uneven = ranks.checked(f"{CASES}tokens", [4, 3])
    assert uneven[0] == uneven[1]
    assert "equally many batches" in uneven[0]


SCRIPT = """
    import os, sys
    from loop_kit import rich
    from holdfast.callbacks import Callback

    class Die(Callback):
        def batch_end(self, state, logger):
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if int(state.timestamp.batch) == 5 and state.ranks.rank == 1 and first:
                os._exit(7)

    trainer = rich(sys.argv[1], autoresume=True, callbacks=[Die()], seed=3)
    begun = int(trainer.state.timestamp.batch)
    trainer.fit()
    trainer.close()
    print(f"rank {trainer.state.ranks.rank}: {begun} to {int(trainer.state.timestamp.batch)}", flush=True)
"""


@pytest.mark.long
def test_torchrun_starts_it_again(tmp_path: Path) -> None:
    """A plain script under torchrun, which makes no process group: a rank dies, all are started again and go on."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests/kits'}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert sorted(ended.stdout.split()) == sorted(["rank", "0:", "4", "to", "9", "rank", "1:", "4", "to", "9"])


@pytest.mark.long
def test_in_the_function_trainer(tmp_path: Path) -> None:
    """Two workers of the function trainer train with it, in the process group of these."""
    trainer = TorchTrainer(
        tells_ranks,
        train_loop_config={"folder": str(tmp_path / "loop")},
        scaling_config=hf.ScalingConfig(num_workers=2),
        run_config=hf.RunConfig(storage_path=tmp_path / "runs", name="run"),
    )
    result = trainer.fit()
    assert result.metrics["world_size"] == 2
    assert result.metrics["batch"] == 6
    checkpoint = hf.Checkpoint(tmp_path / "loop" / "ep2-ba6")
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.writers == (0, 1)
