"""What the life before had to do and was cut off from is done when training is started again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog_kit import catalog_of
from loop_kit import Crash, CrashAt, Points, loader, names, plain
from torch.utils.data import DataLoader

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver, LoadCheckpoint
from holdfast.core import Time
from holdfast.loggers import JSONLLogger, RemoteUploaderDownloader
from holdfast.run.costs import saves


def test_a_finished_training_is_saved_by_every_saver(tmp_path: Path) -> None:
    """One saver was killed before its last save: the next start makes up for it, from the state of the other."""
    plain(tmp_path / "full", max_duration="2ep").fit()
    weights = CheckpointSaver(tmp_path / "weights", "w{epoch}.pt", weights_only=True, save_interval="5ep")
    again = plain(tmp_path / "full", max_duration="2ep", autoresume=True, callbacks=weights)
    again.fit()
    assert names(tmp_path / "weights") == ["w2.pt"]
    saved = torch.load(tmp_path / "weights" / "w2.pt", weights_only=True)["state"]["model"]
    assert torch.equal(saved["weight"], again.state.model.weight)


@pytest.mark.parametrize(("interval", "made_up"), [("4ba", True), ("1ba", True), ("20sp", True), ("3ba", False)])
def test_what_was_due_where_training_goes_on(tmp_path: Path, interval: str, made_up: bool) -> None:
    """Two savers were due at batch 4, one came to it: the other saves that moment first, if it was due then."""
    options: dict[str, Any] = {"save_interval": "4ba", "save_filename": "b{batch}"}
    with pytest.raises(Crash):
        plain(tmp_path / "full", callbacks=CrashAt(6), **options).fit()
    weights = CheckpointSaver(tmp_path / "w", "w{batch}", weights_only=True, save_interval=interval)
    again = plain(tmp_path / "full", autoresume=True, callbacks=weights, max_duration="5ba", **options)
    assert int(again.state.timestamp.batch) == 4
    again.fit()
    assert ("w4" in names(tmp_path / "w")) is made_up


@pytest.mark.parametrize(("full", "interval"), [("f{batch}.pt", "3ba"), ("f{batch}", "1ep"), ("f{epoch}.pt", "1ep")])
def test_another_saver_had_got_further(
    tmp_path: Path, full: str, interval: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of a second saver is later than the one training goes on from: it is replaced, and that is said.

    One of another training stays in the way, and for a start that does not go on it is in the way as well.
    """

    def make(**options: Any) -> hf.Trainer:
        weights = CheckpointSaver(tmp_path / "w", "w{batch}.pt", weights_only=True, save_interval="4ba")
        given = [weights, *options.pop("callbacks", [])]
        options = {"max_duration": "2ep", "autoresume": True, **options}
        return plain(tmp_path / "full", callbacks=given, save_filename=full, save_interval=interval, **options)

    with pytest.raises(Crash):
        make(callbacks=[CrashAt(5)]).fit()
    with pytest.raises(hf.CheckpointExistsError, match=r"w4\.pt"):
        make(autoresume=False, load_path=tmp_path / "full" / full.format(batch=3) if interval == "3ba" else None).fit()
    begin = (tmp_path / "w" / "w4.pt").stat().st_mtime_ns
    make().fit()
    assert "(w4.pt): an earlier life had got further" in caplog.text
    assert (tmp_path / "w" / "w4.pt").stat().st_mtime_ns > begin
    assert names(tmp_path / "w") == ["w12.pt", "w4.pt", "w8.pt"]
    plain(
        tmp_path / "w", save_filename="w{batch}.pt", save_weights_only=True, save_overwrite=True, max_duration="3ep"
    ).fit()
    with pytest.raises(hf.CheckpointExistsError, match=r"w18\.pt"):
        make(max_duration="3ep").fit()


class Count(Callback):
    """Notes after which batches there was an evaluation."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def eval_end(self, state: Any, logger: Any) -> None:
        self.batches.append(int(state.timestamp.batch))


@pytest.mark.parametrize(
    ("options", "evaluated", "with_metrics"),
    [
        ({"save_interval": "3ba", "max_duration": "2ep"}, [6, 12], ["ba12", "ba6"]),
        ({"save_interval": "1ep", "max_duration": "2ep"}, [6, 12], ["ba12", "ba6"]),
        ({"save_interval": "4ba", "max_duration": "8ba"}, [6, 8], ["ba8"]),
        ({"save_interval": "2ba", "max_duration": "1ep", "eval_interval": "4ba"}, [4, 6], ["ba4", "ba6"]),
        ({"save_interval": "3ba", "max_duration": "2ep", "eval_interval": "2ep"}, [12], ["ba12"]),
        ({"save_interval": "6ba", "max_duration": "12ba", "eval_interval": "1dur"}, [12], ["ba12"]),
    ],
)
def test_evaluation_comes_before_the_save(
    tmp_path: Path, options: dict[str, Any], evaluated: list[int], with_metrics: list[str]
) -> None:
    """Of one moment: training is evaluated once, at the end too, and saved after that, with those metrics.

    A checkpoint of another moment has none of an evaluation that was not of its weights.
    """
    count = Count()
    plain(tmp_path, callbacks=count, eval_dataloader=loader(8), save_filename="ba{batch}", **options).fit()
    assert count.batches == evaluated
    found = [name for name in names(tmp_path) if "eval" in hf.Checkpoint(tmp_path / name).metrics]
    assert found == with_metrics


def test_a_torn_line_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that was killed in the middle of a row leaves the file readable for the next one."""
    path = tmp_path / "log.jsonl"
    with plain(None, loggers=JSONLLogger(path), max_duration="2ba") as one:
        one.fit()
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"step": 3, "time": 17' + " " * 100_000)
    with plain(None, loggers=JSONLLogger(path), max_duration="1ba") as other:
        other.fit()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.read_text().startswith(whole)
    assert [row["step"] for row in rows] == [1, 2, 1]
    assert "in the middle of a row" in caplog.text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("runs", "ep{epoch}", "latest"), ("runs", "ep{batch}", "other")),
        (("runs", "a{epoch}", "latest"), ("runs", "b{epoch}", "latest")),
        (("runs", "a{epoch}", "last"), ("runs", "last", None)),
        (("runs", "sub/b{batch}", "latest"), ("runs/sub", "b{batch:04d}", "newest")),
        (("runs", "ep{epoch}", "sub/latest"), ("runs/sub", "b{batch}", "latest")),
    ],
)
def test_names_that_meet_are_refused(
    tmp_path: Path, first: tuple[str, str, str], second: tuple[str, str, str | None]
) -> None:
    """Two savers whose files or links may have one name are refused by the constructor, however that is spelt."""
    (one, name, latest), (other, file, link) = first, second
    saver = CheckpointSaver(tmp_path / other, file, latest_filename=link)
    with pytest.raises(hf.ConfigError, match="would be written under the same name"):
        plain(tmp_path / one, save_filename=name, save_latest_filename=latest, callbacks=saver)


def test_pointers_that_meet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two savers that were given no names for their pointers the first has one; one asked for is refused."""
    bucket = RemoteUploaderDownloader(str(tmp_path / "bucket"))
    options: dict[str, Any] = {"loggers": bucket, "run_name": "r", "save_filename": "a", "max_duration": "1ba"}
    second = CheckpointSaver(tmp_path / "b", "c", weights_only=True)
    plain(tmp_path / "a", callbacks=second, **options).fit()
    assert "gets none" in caplog.text
    pointed = plain(None, load_path="r/checkpoints/latest-rank0", load_object_store=bucket)
    assert int(pointed.state.timestamp.batch) == 1
    own = CheckpointSaver(tmp_path / "b", "c", latest_remote_file_name="{run_name}/checkpoints/latest-rank0")
    with pytest.raises(hf.ConfigError, match="latest_remote_file_name"):
        plain(tmp_path / "a", callbacks=own, **options)


def test_what_was_saved_before_the_full_checkpoint_that_is_gone(tmp_path: Path) -> None:
    """Before the first full checkpoint a killed training is known by its place; of one that had some, nobody knows.

    What lies there is its result perhaps: refused, with advice that helps.
    """

    def make(**options: Any) -> hf.Trainer:
        weights = CheckpointSaver(tmp_path / "w", "w{batch}.pt", weights_only=True, save_interval="2ba")
        given = [weights, *options.pop("callbacks", [])]
        return plain(tmp_path / "full", callbacks=given, save_filename="f{epoch}.pt", autoresume=True, **options)

    with pytest.raises(Crash):
        make(callbacks=[CrashAt(5)]).fit()
    make(max_duration="3ep").fit()
    for path in (tmp_path / "full").iterdir():
        path.unlink()
    with pytest.raises(hf.CheckpointExistsError, match=r"w14.pt, .*: move them away, use another"):
        make().fit()


@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
@pytest.mark.parametrize("way", ["full", "weights", "autoresume", "callback"])
def test_strictness_on_every_path(tmp_path: Path, suffix: str, way: str) -> None:
    """Weights that do not fit are refused however they are loaded: missing, unexpected and other shapes are listed.

    Not strict, those that fit are taken on every path.
    """
    if way == "autoresume" and suffix == ".safetensors":
        pytest.skip("nothing resumes from weights")
    old = torch.nn.ModuleDict(
        {"body": torch.nn.Linear(4, 3), "gone": torch.nn.Linear(2, 2), "head": torch.nn.Linear(3, 2)}
    )
    name = f"w{suffix}"
    options: dict[str, Any] = {"loss_fn": None, "max_duration": "1ba", "save_filename": name, "save_interval": "1ba"}
    first = Odd(old)
    plain(tmp_path / "runs", model=first, save_weights_only=suffix == ".safetensors", **options).fit()

    def again(*, strict: bool) -> hf.Trainer:
        parts = {"body": torch.nn.Linear(4, 3), "new": torch.nn.Linear(2, 2), "head": torch.nn.Linear(3, 5)}
        model, path = Odd(torch.nn.ModuleDict(parts)), tmp_path / "runs" / name
        skip = {"load_ignore_keys": ["state/optimizers"], "load_strict_model_weights": strict}
        ways: dict[str, dict[str, Any]] = {
            "full": {"load_path": path, **skip},
            "weights": {"load_path": path, "load_weights_only": True, "load_strict_model_weights": strict},
            "autoresume": {"autoresume": True, "load_strict_model_weights": strict, "optimizers": []},
            "callback": {
                "callbacks": LoadCheckpoint(path, load_weights_only=True, strict_model_weights=strict),
            },
        }
        folder = tmp_path / "runs" if way == "autoresume" else None
        return plain(folder, model=model, **{**options, **ways[way]})

    with pytest.raises(hf.StateMismatchError) as refused:
        again(strict=True)
    told = str(refused.value)
    for word in ("parts.new.weight", "parts.gone.weight", "parts.head.weight", "(5, 3)", "(2, 3)"):
        assert word in told
    if way != "autoresume":  # there the optimizer has to fit as well
        trainer = again(strict=False)
        assert torch.equal(trainer.state.model.parts["body"].weight, old["body"].weight)


class Odd(torch.nn.Module):
    """A model of parts, some of which are not used."""

    def __init__(self, parts: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, batch: Any) -> Any:
        return self.parts["body"](batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class Counted(Points):
    """Counts the samples that are made."""

    made = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.made += 1
        return super().__getitem__(index)


def test_nothing_is_drawn_twice(tmp_path: Path) -> None:
    """A plain loader goes on in mid-epoch at once: only the samples that are left are made."""
    with pytest.raises(Crash):
        plain(tmp_path, callbacks=CrashAt(5), save_interval="4ba").fit()
    data = Counted()
    again = plain(tmp_path, train_dataloader=DataLoader(data, batch_size=6, shuffle=True), autoresume=True)
    assert int(again.state.timestamp.batch) == 4
    again.state.max_duration = Time("1ep")
    again.fit()
    assert data.made == len(data) - 4 * 6


def test_another_model_is_an_error_with_advice(tmp_path: Path) -> None:
    """A run whose checkpoint does not fit the trainer: what is said to do about it can be done with autoresume."""
    plain(tmp_path, max_duration="1ba").fit()
    with pytest.raises(hf.StateMismatchError, match=r"autoresume goes on with all of it.*another save_folder"):
        plain(tmp_path, autoresume=True, model=torch.nn.Linear(4, 5))


def test_a_scheduler_steps_before_the_optimizer_of_a_later_life(tmp_path: Path) -> None:
    """Saved after the last batch of the first epoch: the epoch ends in the next life, and torch warns of nothing."""

    def make(duration: str) -> hf.Trainer:
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        options = {"optimizers": optimizer, "schedulers": scheduler, "max_duration": duration, "autoresume": True}
        return plain(tmp_path, model=model, save_interval="6ba", **options)

    make("6ba").fit()
    again = make("1ep")
    again.fit()
    assert int(again.state.timestamp.batch) == 6
    assert again.state.optimizers[0].param_groups[0]["lr"] == 0.5


def test_checkpoints_of_a_training_are_one_line(tmp_path: Path) -> None:
    """Each names the one before as its parent: over a second `fit` of the trainer, and over a resume."""
    options: dict[str, Any] = {"save_filename": "ep{epoch}", "save_interval": "1ep", "autoresume": True}
    with plain(tmp_path / "runs", run_name="it", max_duration="2ep", **options) as trainer:
        trainer.fit()
        trainer.fit(duration="1ep")
    plain(tmp_path / "runs", run_name="it", max_duration="4ep", **options).fit()
    line = [hf.Checkpoint(tmp_path / "runs" / f"ep{epoch}").manifest for epoch in (1, 2, 3, 4)]
    assert [one.parent for one in line if one] == [None, *(one.checkpoint_id for one in line[:-1] if one)]
    assert [one.attempt for one in line if one] == [1, 1, 2, 3]


def test_a_second_fit_goes_on_in_a_generator(tmp_path: Path) -> None:
    """Within an epoch of a stream nothing of it is drawn again and dropped: it is further than that already."""
    drawn: list[int] = []
    batch = next(iter(loader()))
    stream = (drawn.append(number) or batch for number in itertools.count())
    with plain(tmp_path, train_dataloader=stream, max_duration="3ba") as trainer:
        trainer.fit()
        trainer.fit(duration="2ba")
        assert int(trainer.state.timestamp.batch) == 5
    assert drawn == list(range(5))


def test_costs_of_saves_are_in_the_journal(tmp_path: Path) -> None:
    """`holdfast stats` finds how long a save held training; what steps lost meanwhile this trainer does not measure."""
    plain(tmp_path / "runs", max_duration="2ep", save_filename="ep{epoch}").fit()
    catalog = catalog_of(tmp_path / "runs")
    rows = saves(catalog.index.read_history().events, catalog.records())
    assert [row.name for row in rows] == ["ep1", "ep2"]
    assert all(row.durable_s and row.held_s and row.lost_s is None for row in rows)


def test_the_history_of_a_run(tmp_path: Path) -> None:
    """The run records what each life went on from, every number that was logged, and how it ended; a second fit too."""
    options: dict[str, Any] = {"save_filename": "b{batch}", "save_interval": "2ba", "autoresume": True}
    with pytest.raises(Crash), plain(tmp_path, callbacks=CrashAt(5), **options) as trainer:
        trainer.fit()

    class Own(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"own": int(state.timestamp.batch), "picture": torch.ones(2, 2)})

    with plain(tmp_path, max_duration="1ep", callbacks=Own(), **options) as trainer:
        trainer.fit()
        trainer.fit("1ba")
    result = hf.Result.from_path(tmp_path)
    assert [attempt.resumed_from for attempt in result.attempts] == [None, "b4", "b6"]
    assert [attempt.reason for attempt in result.attempts] == ["Crash: ", "finished", "finished"]
    frame = result.metrics_dataframe
    assert list(frame["loss/train/total"].dropna().index) == list(range(7))
    assert list(frame["own"].dropna()) == [5, 6, 7]
    assert "picture" not in frame
    index = json.loads((tmp_path / "run.json").read_text())
    assert (index["finished"]["step"], index["finished"]["epoch"]) == (7, 1)
    assert [one["details"] for one in index["attempts"]] == [{"last_step": 5}, {"last_step": 6}, {"last_step": 7}]


def test_a_life_that_goes_on_from_another_folder(tmp_path: Path) -> None:
    """What load_path names is recorded by its URI."""
    plain(tmp_path / "a", save_filename="b{batch}.pt", max_duration="1ep").fit()
    plain(tmp_path / "b", load_path=tmp_path / "a" / "b6.pt").fit()
    source = hf.Result.from_path(tmp_path / "b").attempts[0].resumed_from
    assert source == str(tmp_path / "a" / "b6.pt")
