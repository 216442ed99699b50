"""`holdfast.accelerate`: a `Checkpointer` of an `Accelerator`, and its own directories in the function trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import late_device
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from hf_kit import checkpoints, result, run_script
from object_kit import BUCKET
from torch.utils.data import DataLoader, IterableDataset

import holdfast as hf
import small
from holdfast.accelerate import Checkpointer
from holdfast.torch import TorchTrainer


def killed_and_not(
    tmp_path: Path, *, kill_at: int, ranks: int = 1, run: str = "", endpoint: str | None = None, **options: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an undisturbed loop ends with, and one that was killed after a step and started again."""
    told = {"run": run or str(tmp_path / "run"), "result": str(tmp_path / "result"), "options": options}
    quiet = {**told, "run": str(tmp_path / "quiet"), "result": str(tmp_path / "quiet.json")}
    run_script("small.py", quiet, ranks=ranks)
    assert run_script("small.py", {**told, "kill_at": kill_at}, ranks=ranks, endpoint=endpoint) != 0
    assert run_script("small.py", told, ranks=ranks, endpoint=endpoint) == 0
    return result(tmp_path / "quiet.json"), result(tmp_path / "result")


def test_killed_in_an_epoch(s3: str, tmp_path: Path) -> None:
    """Killed between two saves to S3, in mid-epoch, a loop ends as one that nothing disturbed.

    That is: weights, learning rate, scaler, a registered object, the best checkpoint by a metric, and a short gathering
    of gradients at the end of each epoch.
    """
    uri = f"s3://{BUCKET}/accelerate"
    quiet, disturbed = killed_and_not(tmp_path, kill_at=7, run=uri, endpoint=s3, scaler=True)
    assert (disturbed.pop("resumed"), quiet.pop("resumed")) == (6, None)
    assert disturbed == quiet
    assert quiet["steps"] == 12  # 3 epochs of 7 batches: 3 gatherings of two, and the last batch alone
    kept = {one.step: one.verify().ok for one in checkpoints(uri)}
    assert kept == {6: True, 8: True, 12: True}  # gone on from, the best by loss, the last
    assert sorted(one.step for one in checkpoints(str(tmp_path / "quiet"))) == [8, 12]


@pytest.mark.parametrize("dispatched", [False, True])
def test_two_ranks_killed(tmp_path: Path, dispatched: bool) -> None:
    """Two ranks under torchrun, both killed at one step, end as ranks that nothing disturbed.

    Also where rank 0 deals out the batches: to begin a loader anew on one rank would keep the others waiting.
    """
    quiet, disturbed = killed_and_not(tmp_path, kill_at=3 if dispatched else 4, ranks=2, dispatched=dispatched)
    assert (disturbed.pop("resumed"), quiet.pop("resumed")) == (2 if dispatched else 4, None)
    assert disturbed == quiet


def test_killed_on_an_accelerator(tmp_path: Path) -> None:
    """On a device that is as late as CUDA allows, a loop killed in mid-epoch ends bit by bit as an undisturbed one."""
    if (why := late_device.missing()) is not None:
        pytest.skip(why)
    late_device._build()
    quiet, disturbed = killed_and_not(tmp_path, kill_at=7, on_late_device=True)
    assert (disturbed.pop("resumed"), quiet.pop("resumed")) == (6, None)
    assert disturbed == quiet
    assert quiet["device"] == "late:0"


def test_reported_directories(s3: str, tmp_path: Path) -> None:
    """Directories of save_state bring killed workers back to the same weights, from S3 too.

    Those of save_model are kept as well.
    """

    def fit(name: str, storage: str, *, kill: bool) -> hf.Result:
        return TorchTrainer(
            small.reported,
            train_loop_config={"result": str(tmp_path / name), "kill": kill},
            scaling_config=hf.ScalingConfig(num_workers=2),
            run_config=hf.RunConfig(
                name=name,
                storage_path=storage,
                checkpoint_config=hf.CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score"),
                failure_config=hf.FailureConfig(max_failures=1),
            ),
        ).fit()

    fit("quiet.json", str(tmp_path / "results"), kill=False)
    ended = fit("killed.json", f"s3://{BUCKET}/reported", kill=True)
    assert len(ended.attempts) == 2
    assert result(tmp_path / "killed.json") == result(tmp_path / "quiet.json")
    best = [(one, metrics["score"]) for one, metrics in ended.best_checkpoints]
    assert [score for _, score in best] == sorted(ended.metrics_dataframe["score"])[-2:]
    assert ended.checkpoint is not None
    with ended.checkpoint.as_directory() as directory:
        assert Path(directory, "model.safetensors").exists()
    with best[0][0].as_directory() as directory:
        names = {one.name for one in Path(directory).iterdir()}
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"} <= names


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(12.0)[:, None])


@pytest.mark.parametrize("stateful", [False, True])
def test_loaders_of_unknown_order(tmp_path: Path, stateful: bool) -> None:
    """The position of an iterable data set is a number of batches; a stateful loader keeps its own."""
    seen = []
    for stop in (2, 6):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
        _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(Endless(), batch_size=2))
        with Checkpointer(tmp_path / "run", accelerator, every=1) as ck:
            for batch in ck.batches(loader):
                seen.append(batch.flatten().tolist())
                ck.step()
                if ck.global_step == stop:
                    break
    assert seen == [[float(2 * number), float(2 * number + 1)] for number in range(6)]


def test_an_iterable_that_is_left_goes_on_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Left by `break` and taken up again in one life, nothing of a prepared loader is drawn again."""
    seen: list[float] = []
    accelerator = Accelerator(cpu=True)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(Endless(), batch_size=2))
    with Checkpointer(tmp_path / "run", accelerator, every=None) as ck:
        while ck.global_step < 6:
            for batch in ck.batches(loader):
                seen += batch.flatten().tolist()
                ck.step()
                if ck.global_step % 2 == 0:
                    break
    assert seen == [float(number) for number in range(12)]
    assert "batches again" not in caplog.text


def test_a_shuffled_order_goes_on_with_a_stateful_loader(tmp_path: Path) -> None:
    """The order of a shuffled data set is not in the state of torchdata's loader: it is that of ``ck.batches``."""

    def seen_until(stop: int, run: str) -> list[list[float]]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        points = DataLoader(torch.arange(12.0)[:, None], batch_size=2, shuffle=True)  # type: ignore[arg-type]
        _, loader = accelerator.prepare(torch.nn.Linear(1, 1), points)
        seen = []
        with Checkpointer(tmp_path / run, accelerator, every=1) as ck:
            for _ in ck.epochs(2):
                for batch in ck.batches(loader):
                    seen.append(batch.flatten().tolist())
                    ck.step()
                    if ck.global_step == stop:
                        return seen
        return seen

    assert seen_until(4, "run") + seen_until(9, "run") + seen_until(12, "run") == seen_until(12, "quiet")


@pytest.mark.parametrize("options", [{"use_stateful_dataloader": True}, {"dispatch_batches": True}])
def test_epochs_of_loaders_of_unknown_order(tmp_path: Path, options: dict[str, bool]) -> None:
    """A life goes on in the epoch it was in, with its order, also from the last step of one.

    With the last batch of an epoch Accelerate's stateful loader has a state from which it would begin the next one; and
    a loader that rank 0 deals out orders its data by the passes of its process.
    """
    is_stream = "use_stateful_dataloader" in options

    def seen_until(stop: int, run: str) -> list[tuple[int, list[float]]]:
        torch.manual_seed(0)
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, **options)
        )
        data: Any = Endless() if is_stream else torch.arange(12.0)[:, None]
        _, loader = accelerator.prepare(
            torch.nn.Linear(1, 1), DataLoader(data, batch_size=4, shuffle=None if is_stream else True)
        )
        seen = []
        with Checkpointer(tmp_path / run, accelerator, every=1) as ck:
            for epoch in ck.epochs(4):
                for batch in ck.batches(loader):
                    seen.append((epoch, batch.flatten().tolist()))
                    ck.step()
                    if ck.global_step == stop:
                        return seen
        return seen

    lives = [one for stop in (3, 5, 9, 12) for one in seen_until(stop, "run")]
    quiet = seen_until(12, "quiet")
    assert lives == quiet
    assert len({tuple(batch) for _, batch in quiet}) == (3 if is_stream else 12)  # else epochs are ordered anew


def test_a_short_gathering_at_the_end_is_no_drawing_ahead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where gradients gather over fewer batches at the end of a stream without a length, nothing is said."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(Endless(), batch_size=4))
    with Checkpointer(tmp_path / "run", accelerator, every=None) as ck:
        for _ in ck.epochs(2):
            for _ in ck.batches(loader):
                with accelerator.accumulate(model):
                    ck.step()
    assert ck.global_step == 4
    assert "drawn before a step" not in caplog.text


def test_a_save_between_the_batches_of_a_step_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once: what had gathered comes again, and the generators do not go back with it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(12.0).reshape(12, 1)))
    with Checkpointer(tmp_path / "run", accelerator, every=None) as ck:
        for number, batch in enumerate(ck.batches(loader)):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                ck.step()
            if number in (1, 4, 6):
                ck.save()
                assert caplog.text.count("between the batches of an accumulated step (3)") == (number > 1)


@pytest.mark.parametrize("data", [torch.arange(12.0)[:, None], Endless()])
def test_batches_are_not_left_out_twice(tmp_path: Path, data: Any) -> None:
    """What `skip_first_batches` makes is refused: we go on behind the last trained batch ourselves."""
    accelerator = Accelerator(cpu=True)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(data, batch_size=2))
    with Checkpointer(tmp_path / "run", accelerator) as ck:
        for given in (loader, DataLoader(data, batch_size=2)):
            assert len(list(ck.batches(accelerator.skip_first_batches(given, 0)))) == 6
            with pytest.raises(hf.errors.ConfigError, match=r"first 2 batches .* the loader that was prepared"):
                ck.batches(accelerator.skip_first_batches(given, 2))


def test_what_is_wrong_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No Accelerator; nothing prepared; a taken name; directories named by Accelerate; a loader without a state.

    What comes too late to be saved is named once.
    """
    from accelerate.utils import ProjectConfiguration

    from holdfast.accelerate import report_state

    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    with pytest.raises(hf.errors.ConfigError, match="prepared no model"):
        Checkpointer(tmp_path / "run", accelerator)
    with pytest.raises(hf.errors.ConfigError, match="give the Accelerator"):
        Checkpointer(tmp_path / "run", {"model": torch.nn.Linear(1, 1)})
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(4.0), shuffle=True))
    with (
        hf.Checkpointer(tmp_path / "plain") as plain,
        pytest.raises(hf.errors.ConfigError, match=r"DataLoaderShard .*holdfast.accelerate.Checkpointer"),
    ):
        next(plain.batches(loader))
    with pytest.raises(hf.errors.ConfigError, match=r"\['model'\]"):
        Checkpointer(tmp_path / "run", accelerator, {"model": 1})
    accelerator.project_configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with pytest.raises(hf.errors.ConfigError, match="automatic_checkpoint_naming"):
        report_state(accelerator, {})
    with Checkpointer(tmp_path / "late", accelerator) as ck:
        accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)))
        ck.step()
        ck.step()
    assert caplog.text.count("custom_checkpoint_0 NOT saved") == 1
