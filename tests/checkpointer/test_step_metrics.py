"""Metrics: never read before they are written, bound to the checkpoint of their step, ranked, kept as history."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_kit as kit
import torch
from catalog_kit import catalog_of, index_of

import holdfast as hf
from holdfast.checkpointer import metrics as metrics_module
from holdfast.checkpointer.metrics import plain_at_once
from holdfast.run import reports


def history(path: Any) -> list[dict[str, Any]]:
    return index_of(path).history()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that would wait for a device."""
    seen: list[str] = []
    for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy", "__int__"):
        original = getattr(torch.Tensor, name)

        def spy(self: Any, *args: Any, _name: str = name, _original: Any = original) -> Any:
            seen.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    return seen


def test_step_reads_no_tensor_of_a_device_until_something_is_written(
    reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 steps with tensors that a device has and nothing due: not one read; all are read when the run ends."""
    assert plain_at_once({"loss": torch.zeros((), device="meta")}) is None
    monkeypatch.setattr(metrics_module, "_is_far", lambda value: isinstance(value, torch.Tensor))
    with hf.Checkpointer("memory://reads/run", {"w": torch.zeros(1)}, every=None) as ck:
        ck.step()
        reads.clear()
        for number in range(500):
            ck.step(loss=torch.tensor(float(number)))
        assert reads == []
    assert len(reads) >= 500
    assert [row["metrics"]["loss"] for row in history("memory://reads/run") if row["metrics"]] == list(
        map(float, range(500))
    )


def test_a_wait_for_rows_is_not_one_for_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written together, once in a while; whoever waits for them, or ends the run, has them written at once."""
    monkeypatch.setattr(reports, "_EVERY_S", 600.0)
    with hf.Checkpointer("memory://hurries/run", {"w": torch.zeros(1)}, every=None, timeout_s=30.0) as ck:
        for step in range(3):
            ck.step()
            ck.report(val=step)
            ck.wait()
            assert [row["metrics"]["val"] for row in history("memory://hurries/run")] == [*range(step + 1)]
        ck.report(val=3)


def test_a_tensor_changed_later_keeps_the_value_it_was_reported_with(tmp_path: Path) -> None:
    """A running sum updated in place after ck.step does not change what was recorded."""
    total = torch.zeros(())
    with hf.Checkpointer("memory://inplace/run", {"w": torch.zeros(1)}, every=None) as ck:
        for _ in range(4):
            total += 1
            ck.step(total=total)
    assert [row["metrics"]["total"] for row in history("memory://inplace/run")] == [1.0, 2.0, 3.0, 4.0]


def test_metric_values_of_every_kind_are_stored_as_plain_numbers(tmp_path: Path) -> None:
    """Tensors, NumPy values, bools, strings, nan and infinity come back from manifest and history."""
    values = {
        "tensor": torch.tensor(2.5, requires_grad=True), "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "vector": torch.tensor([1, 2]), "numpy": np.float32(0.25), "double": np.float64(0.5), "array": np.arange(3),
        "bool": True, "text": "warm-up", "int": 3, "nothing": None, "inf": math.inf,
    }  # fmt: skip
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=1) as ck:
        ck.step(**values, nan=float("nan"))
    wanted = {
        "tensor": 2.5, "half": 0.5, "vector": [1, 2], "numpy": 0.25, "double": 0.5, "array": [0, 1, 2], "bool": True,
        "text": "warm-up", "int": 3, "nothing": None, "inf": math.inf,
    }  # fmt: skip
    for found in (ck.latest().metrics, history(tmp_path)[0]["metrics"]):
        assert math.isnan(found.pop("nan"))
        assert found == wanted


def test_a_value_that_is_no_metric_is_refused_by_name(tmp_path: Path) -> None:
    """ConfigError says which metric and of which type."""
    with (
        pytest.raises(hf.ConfigError, match="metric 'model' is a Linear"),
        hf.Checkpointer("memory://badmetric/run", {"w": torch.zeros(1)}, every=1) as ck,
    ):
        ck.step(model=torch.nn.Linear(1, 1))


@pytest.mark.parametrize("value", [10**5000, {"inner": [1, -(10**5000)]}], ids=["alone", "inside"])
def test_an_integer_of_too_many_digits_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    """Python does not write it as text: said as of any other value, wherever a metric comes in; the run goes on."""
    said = r"metric 'big(\.inner)?' is an integer of 1661\d bits.*give a float"
    with pytest.raises(hf.ConfigError, match=said):
        hf.save(tmp_path / "one", {"w": 1}, metrics={"big": value})
    with hf.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}, every=1) as ck:
        for call in (ck.step, ck.report, ck.save):
            with pytest.raises(hf.ConfigError, match=said):
                call(big=value)
        ck.step(fine=10**400)
    assert ck.latest().metrics == {"fine": 10**400}
    with pytest.raises(hf.ConfigError, match=r"metric 'big(/inner/1)?' is"):
        ck.latest().report(big=value)


def test_a_bad_metric_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused at its own step, by name; one that cannot be read later is left out alone, and its step is said."""

    class Broken:
        def tolist(self) -> Any:
            return [object()]

    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=4) as ck:
        ck.step(loss=1.0)
        with pytest.raises(hf.ConfigError, match=r"step 2: metric 'found.model' is a Linear"):
            ck.step(loss=2.0, found={"model": torch.nn.Linear(1, 1)})
        ck.step(loss=3.0, broken=Broken())
        ck.step(loss=4.0, broken=Broken())
    assert ck.latest().metrics == {"loss": 4.0}
    assert [(row["step"], row["metrics"]) for row in history(tmp_path)] == [
        (1, {"loss": 1.0}), (3, {"loss": 3.0}), (4, {"loss": 4.0}),
    ]  # fmt: skip
    assert "a metric of step 3 is NOT recorded: metric 'broken' is a object" in caplog.text


def test_metrics_in_lists_and_dicts_keep_the_values_they_were_reported_with(tmp_path: Path) -> None:
    """As single tensors do: what the script goes on changing was copied."""
    total, seen, array = torch.zeros(()), [0.0], np.zeros(1)
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=None) as ck:
        for number in (1.0, 2.0):
            total += 1
            seen[0] = array[0] = number
            ck.step(found={"total": total, "seen": seen}, array=array)
    assert [row["metrics"] for row in history(tmp_path)] == [
        {"found": {"total": number, "seen": [number]}, "array": [number]} for number in (1.0, 2.0)
    ]


@pytest.mark.parametrize("when", ["before", "pending", "after"])
def test_report_binds_to_the_checkpoint_of_its_step(when: str, tmp_path: Path) -> None:
    """Reported before the save, while it is written, or when it is durable: the metrics are those of the checkpoint."""
    path = tmp_path / when
    with hf.Checkpointer(path, kit.make_state(), every=None, keep=None) as ck:
        ck.step(loss=1.0)
        if when == "before":
            ck.report(val=0.5)
            assert ck.latest() is None
            ck.save()
        else:
            ck.save()
            if when == "after":
                ck.wait()
            ck.report(val=0.5)
        ck.step(loss=2.0)
        ck.report(val=0.25)
    found = {one.step: one.metrics for one in ck.checkpoints()}
    assert found == {1: {"loss": 1.0, "val": 0.5}, 2: {"loss": 2.0, "val": 0.25}}
    assert [(row["step"], row["metrics"]) for row in history(path)] == [
        (1, {"loss": 1.0, "val": 0.5}), (2, {"loss": 2.0, "val": 0.25}),
    ]  # fmt: skip


def test_a_report_that_ranks_saves_its_step_and_the_best_stay(tmp_path: Path) -> None:
    """keep.best by val: reports between saves are saved, others are not, and the two best survive retention."""
    values = [5.0, 3.0, 4.0, float("nan"), 1.0, 2.0, 6.0]
    with hf.Checkpointer(tmp_path, kit.make_state(), every=None, keep=hf.Keep(best=2, metric="val")) as ck:
        for number, value in enumerate(values, start=1):
            ck.step()
            ck.report(other=1.0)
            assert ck._session.saves.last_step != number
            ck.report(val=value)
        ck.wait()
        best = ck.best()
        assert best is not None
        assert (best.step, best.metrics["val"]) == (5, 1.0)
        assert ck.best(mode="max").metrics["val"] == 6.0
    assert kit.steps(tmp_path) == [5, 6, 7]  # the two best and the newest


def test_latest_best_and_checkpoints_tell_what_is_committed(tmp_path: Path) -> None:
    """Newest first; before the first save there is none; a metric nobody has gives None; no metric is an error."""
    with hf.Checkpointer(tmp_path, kit.make_state(), every=2, keep=None) as ck:
        assert (ck.latest(), ck.checkpoints()) == (None, [])
        for number in range(6):
            ck.step(loss=abs(number - 3))
        ck.wait()
        assert [one.step for one in ck.checkpoints()] == [6, 4, 2]
        assert ck.latest() == hf.Checkpoint(tmp_path / "step_00000006")
        assert ck.best("loss") == hf.Checkpoint(tmp_path / "step_00000004")
        assert ck.best("unknown") is None
        with pytest.raises(hf.ConfigError, match="needs the name of a metric"):
            ck.best()
    assert [one.step for one in ck.checkpoints()] == [6, 4, 2]  # after the run, too


def test_the_mode_of_keep_is_that_of_its_own_metric(tmp_path: Path) -> None:
    """Where `keep` ranks by the greatest accuracy, the best loss is still the least one."""
    keep = hf.Keep(last=9, best=1, metric="accuracy", mode="max")
    with hf.Checkpointer(tmp_path, {"n": 0}, every=1, keep=keep) as ck:
        for number in (1, 2, 3):
            ck.step(accuracy=number, loss=10 - number)
    assert (ck.best().step, ck.best("loss").step, ck.best("loss", mode="max").step) == (3, 3, 1)
    with pytest.raises(hf.ConfigError, match="needs the name of a metric"):
        ck.best(5)  # type: ignore[arg-type]


def test_rows_that_a_resume_made_void_leave_the_history(tmp_path: Path) -> None:
    """Six steps, then on from step 2: rows 3 to 6 of the first life are replaced by those of the second."""
    state = kit.make_state()
    with hf.Checkpointer(tmp_path, state, every=2, keep=None) as ck:
        for _ in range(6):
            ck.step(life=1)
    with hf.Checkpointer(tmp_path, state, every=None, keep=None, resume=tmp_path / "step_00000002") as ck:
        for _ in range(2):
            ck.step(life=2)
    assert [(row["step"], row["metrics"]["life"]) for row in history(tmp_path)] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_metrics_bound_to_a_save_that_found_no_space_do_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The report of a step whose save is lost is said, and no error."""
    from holdfast.testing import FaultyOps, FaultyStorage

    storage = FaultyStorage(tmp_path, ops=FaultyOps(disk_bytes=64 << 20))
    with hf.Checkpointer(storage, {"weights": torch.zeros(1 << 18)}, every=1, keep=None) as ck:
        ck.step()
        ck.wait()
        storage.ops.used_bytes = (64 << 20) - (1 << 18)
        ck.step()
        ck.report(val=1.0)
        ck._session.settle()
        ck.wait()
        storage.ops.used_bytes = 0
        ck.step()
    assert kit.steps(tmp_path) == [1, 3]
    assert "metrics were not bound" in caplog.text


def test_a_failed_report_raises_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that could not be written are not lost in silence, also those sent because many had gathered."""
    from holdfast.checkpointer import metrics
    from holdfast.storage import MemoryStorage

    monkeypatch.setattr(metrics, "_MAX_ROWS", 5)

    class Broken(MemoryStorage):
        broken = False

        def put(self, path: str, data: Any, **options: Any) -> str | None:
            if Broken.broken and path.startswith("reports/"):
                raise hf.StorageError("the reports cannot be written")
            return super().put(path, data, **options)

    with (
        pytest.raises(hf.StorageError, match="the reports cannot be written"),
        hf.Checkpointer(Broken("failing"), {"w": torch.zeros(1)}, every=None) as ck,
    ):
        Broken.broken = True
        for _ in range(5):
            ck.step(loss=1.0)
        ck._session._notes[0].future.exception()
        ck.step()
        raise AssertionError("the error did not surface")


def test_a_lost_index_is_rebuilt_with_its_metrics(tmp_path: Path) -> None:
    """Without run.json the same best checkpoint is found, from manifests and late metrics."""
    with hf.Checkpointer(tmp_path, kit.make_state(), every=None, keep=None) as ck:
        for value in (3.0, 1.0, 2.0):
            ck.step()
            ck.save()
            ck.report(val=value)
    (tmp_path / "run.json").write_text("{broken")
    assert catalog_of(tmp_path).best("val").step == 2
    assert kit.train(tmp_path, 3).resumed_from.step == 3
    assert json.loads((tmp_path / "run.json").read_text())["attempts"][-1]["attempt"] == 2
