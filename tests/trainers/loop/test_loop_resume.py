"""A resumed training is the training that was never interrupted, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_kit import Crash, CrashAt, Points, Seen, everything, loader, names, plain, rich
from torch.utils.data import DataLoader, IterableDataset

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver, LoadCheckpoint, ThresholdStopper
from holdfast.core import Event
from holdfast.state.tree import rng
from holdfast.testing import assert_state_equal
from holdfast.trainers.loop.saving.load import load_checkpoint


def lives(folder: Path, crashes: list[int], **options: Any) -> tuple[hf.Trainer, list[Seen]]:
    """Train with crashes after these batches; returns the last life and what all lives have seen."""
    seen: list[Seen] = []
    for crash_at in crashes:
        trainer = rich(folder, crash_at=crash_at, seen=seen, autoresume=True, **options)
        with pytest.raises(Crash):
            trainer.fit()
        trainer.close()
    trainer = rich(folder, seen=seen, autoresume=True, **options)
    trainer.fit()
    trainer.close()
    return trainer, seen


@pytest.mark.parametrize(
    ("suffix", "crashes", "interval"),
    [("", [7], "1ep"), (".pt", [13], "1ep"), ("", [9, 10, 15], "2ba"), (".pt", [6, 12], "2ba"), ("", [5], "7sp")],
)
def test_twin(tmp_path: Path, suffix: str, crashes: list[int], interval: str) -> None:
    """Killed once or several times, at epoch ends and in mid-epoch, training ends in the same state.

    Every batch has the same samples, augmentation, loss and random numbers.
    """
    options = {"save_filename": "ep{epoch}-ba{batch}" + suffix, "save_interval": interval}
    whole, seen = lives(tmp_path / "a", [], **options)
    broken, pieces = lives(tmp_path / "b", crashes, **options)
    assert_state_equal(everything(broken), everything(whole))
    rows = {row[0]: row for one in pieces[::2] for row in one.rows}
    assert [rows[number] for number in sorted(rows)] == seen[0].rows
    assert names(tmp_path / "a") == names(tmp_path / "b")


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_twin_in_mixed_precision(tmp_path: Path, precision: str) -> None:
    """The scaler of gradients goes on where it was."""
    whole, _ = lives(tmp_path / "a", [], precision=precision)
    broken, _ = lives(tmp_path / "b", [9], precision=precision)
    assert_state_equal(everything(broken), everything(whole))
    assert (whole.state.scaler is None) is (precision == "amp_bf16")


def test_twin_with_workers_and_own_attributes(tmp_path: Path) -> None:
    """Loader workers change nothing; attributes that the user serializes come back."""

    def run(folder: Path, crash_at: int | None) -> hf.Trainer:
        return rich(folder, crash_at=crash_at, autoresume=True, train_dataloader=loader(num_workers=1))

    whole = run(tmp_path / "a", None)
    whole.fit()
    broken = run(tmp_path / "b", 9)
    with pytest.raises(Crash):
        broken.fit()
    broken.close()
    again = run(tmp_path / "b", None)
    again.fit()
    assert_state_equal(everything(again), everything(whole))


@pytest.mark.parametrize("is_late", [False, True])
def test_twin_with_generators_of_the_data_set(tmp_path: Path, is_late: bool) -> None:
    """Without workers, too: what a data set draws from generators of its own is the same after a resume.

    It may make them, unseeded, when it is asked for the first sample.
    """

    class Noisy(Points):
        def __init__(self) -> None:
            super().__init__()
            self.numpy: Any = None
            if not is_late:
                self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(3), random.Random(3)

        def __getitem__(self, index: int) -> Any:
            if self.numpy is None:
                self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(), random.Random()
            x, y = super().__getitem__(index)
            return x + torch.rand(1, generator=self.torch) + self.numpy.random() * self.python.random(), y

    def run(folder: Path, crash_at: int | None = None) -> hf.Trainer:
        data = DataLoader(Noisy(), batch_size=6, shuffle=True)
        return rich(folder, crash_at=crash_at, autoresume=True, train_dataloader=data, max_duration="2ep")

    whole = run(tmp_path / "a")
    whole.fit()
    with pytest.raises(Crash):
        run(tmp_path / "b", 5).fit()
    broken = run(tmp_path / "b")
    broken.fit()
    assert_state_equal(everything(broken), everything(whole))


def test_own_attributes(tmp_path: Path) -> None:
    """What is added to serialized_attributes is saved and comes back; a name without an attribute is refused."""
    first = plain(tmp_path)
    first.state.curriculum = {"level": 3, "names": ("a", "b")}  # type: ignore[attr-defined]
    first.state.serialized_attributes.append("curriculum")
    first.fit()
    first.close()
    saved = hf.load(tmp_path / "ep2-ba12")
    assert saved["state"]["curriculum"] == {"level": 3, "names": ("a", "b")}

    class Mine(Callback):
        def before_load(self, state: Any, logger: Any) -> None:
            state.curriculum = None
            state.serialized_attributes.append("curriculum")

    second = plain(tmp_path, load_path=tmp_path / "ep2-ba12", callbacks=Mine())
    assert second.state.curriculum == {"level": 3, "names": ("a", "b")}  # type: ignore[attr-defined]
    second.state.serialized_attributes.append("nothing_of_the_kind")
    with pytest.raises(hf.ConfigError, match="nothing_of_the_kind"):
        second.state.live()


def test_own_attributes_that_are_named_after_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a script does it that sets them after it has made the trainer: they come back when training begins."""

    class Grow(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            state.level += 1
            state.weights += 1

    def make(crash_at: int) -> hf.Trainer:
        trainer = plain(tmp_path, callbacks=[Grow(), CrashAt(crash_at)], autoresume=True)
        trainer.state.level, trainer.state.weights = 0, torch.zeros(2)  # type: ignore[attr-defined]
        trainer.state.serialized_attributes += ["level", "weights"]
        return trainer

    with pytest.raises(Crash):
        make(8).fit()
    capsys.readouterr()
    again = make(0)
    assert "state/level: state.serialized_attributes does not name it" in " ".join(capsys.readouterr().err.split())
    again.fit()
    assert again.state.level == 12  # type: ignore[attr-defined]
    assert again.state.weights.tolist() == [12, 12]  # type: ignore[attr-defined]


class Rows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The points without noise, as a stream or by index."""

    def __iter__(self) -> Any:
        return map(self.__getitem__, range(34))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(4.0) * index, torch.tensor(index % 3)


def rows(kind: str) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Rows(), batch_size=6)
    made = [Rows()[index] for index in range(34)]
    return DataLoader(made, batch_size=6, shuffle=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_batch_that_is_drawn_is_not_yet_trained(tmp_path: Path, kind: str) -> None:
    """A save between drawing a batch and training it: what goes on from there trains it."""

    class SaveAtStart(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 8:
                whole.save_checkpoint(str(tmp_path / "drawn"))

    whole = rich(tmp_path / "a", callbacks=[SaveAtStart()], train_dataloader=rows(kind))
    whole.fit()
    again = rich(tmp_path / "b", callbacks=[Callback()], load_path=tmp_path / "drawn", train_dataloader=rows(kind))
    assert int(again.state.timestamp.batch) == 8
    again.fit()
    assert_state_equal(everything(again), everything(whole))


@pytest.mark.parametrize(("size", "ends", "epochs"), [(4, "7ba", 1), (9, "4ba", 0)])
def test_an_epoch_that_goes_on_with_another_batch_size_is_over_when_its_data_are(
    tmp_path: Path, size: int, ends: str, epochs: int
) -> None:
    """34 samples, 18 of them trained in 3 batches: 4 batches of 4 make the epoch whole, one of 9 does not."""
    with plain(tmp_path, max_duration="3ba", save_interval="3ba") as first:
        first.fit()
    with plain(tmp_path, max_duration=ends, autoresume=True, train_dataloader=loader(batch_size=size)) as second:
        second.fit()
        assert int(second.state.timestamp.epoch) == epochs
    with plain(tmp_path, max_duration="1ep", autoresume=True, train_dataloader=loader(batch_size=size)) as third:
        third.fit()
        assert int(third.state.timestamp.sample) == 34


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_fit_after_an_error_trains_the_batch_that_was_drawn(kind: str) -> None:
    """In a notebook: an error in the middle of a batch, and fit() again, which leaves none out."""

    class Note(Callback):
        def __init__(self) -> None:
            self.dies, self.seen = True, list[float]()

        def before_forward(self, state: Any, logger: Any) -> None:
            if self.dies and int(state.timestamp.batch) == 3:
                self.dies = False
                raise Crash

        def batch_end(self, state: Any, logger: Any) -> None:
            self.seen.extend(state.batch[0][:, 1].tolist())

    trainer = plain(None, callbacks=(note := Note()), train_dataloader=rows(kind), max_duration="2ep")
    with pytest.raises(Crash):
        trainer.fit()
    trainer.fit()
    assert sorted(note.seen) == sorted([*range(34), *range(34)])


class GoBack(Callback):
    """Loads, once, at an event after four batches; notes which batches are trained, and at which count."""

    def __init__(self, path: Path, event: str) -> None:
        self.path, self.event, self.loaded, self.seen = path, event, False, list[tuple[int, float]]()

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        if event is Event.BATCH_END:
            self.seen.append((int(state.timestamp.batch), state.batch[0].sum().item()))
        if event.value == self.event and int(state.timestamp.batch) >= 4 and not self.loaded:
            self.loaded = True
            rng.restore(load_checkpoint(self.path, state))


@pytest.mark.parametrize(
    ("event", "before"),
    [("batch_end", 4), ("batch_start", 4), ("batch_checkpoint", 4), ("epoch_checkpoint", 6), ("epoch_start", 6)],
)
def test_a_checkpoint_that_is_loaded_within_the_loop_is_where_training_goes_on(
    tmp_path: Path, event: str, before: int
) -> None:
    """A callback goes back to an earlier moment: its batches come again, and count as they did; so do epochs."""
    with plain(tmp_path, max_duration="2ba", save_interval="2ba") as first:
        first.fit()
    options = {"max_duration": "2ep", "eval_dataloader": loader(6), "save_interval": "1ba"}
    back = GoBack(tmp_path / "ep0-ba2", event)
    with plain(tmp_path / "run", callbacks=back, **options) as trainer:
        trainer.fit()
    assert [count for count, _ in back.seen] == [*range(1, before + 1), *range(3, 13)]
    batches = dict(back.seen)
    assert all(batches[count] == batch for count, batch in back.seen)
    assert (int(trainer.state.timestamp.epoch), int(trainer.state.timestamp.batch)) == (2, 12)
    saved = [hf.Checkpoint(tmp_path / "run" / name) for name in names(tmp_path / "run")]
    assert {one.step for one in saved} >= set(range(1, 13))
    assert all(one.verify(deep=True).ok for one in saved)
    with plain(None, load_path=tmp_path / "ep0-ba2", **{**options, "save_interval": "1ep"}) as other:
        other.fit()
    assert torch.equal(trainer.state.model.weight, other.state.model.weight)


@pytest.mark.parametrize("event", ["after_backward", "eval_batch_end"])
def test_a_checkpoint_that_is_loaded_within_a_batch_is_refused(tmp_path: Path, event: str) -> None:
    """Half of the batch, or of the evaluation, would be of another moment; weights alone may be loaded there."""
    with plain(tmp_path, max_duration="2ba", save_interval="2ba") as first:
        first.fit()
    trainer = plain(None, callbacks=GoBack(tmp_path / "ep0-ba2", event), eval_dataloader=loader(6))
    with pytest.raises(hf.ConfigError, match=r"loaded a whole checkpoint while .* load it at BATCH_END"):
        trainer.fit()
    weights = LoadCheckpoint(tmp_path / "ep0-ba2", load_weights_only=True, event=event)
    plain(None, callbacks=weights, eval_dataloader=loader(6)).fit()


def test_two_of_one_class(tmp_path: Path) -> None:
    """Several optimizers, schedulers and callbacks of one class are all there, by their number."""
    trainer = rich(tmp_path, max_duration="1ep")
    trainer.fit()
    state = hf.load(tmp_path / "ep0-ba6")["state"]
    assert list(state["optimizers"]) == ["AdamW", "AdamW-1"]
    assert list(state["schedulers"]) == ["StepLR", "StepLR-1"]
    assert list(state["callbacks"]) == ["Seen", "Seen-1"]
    assert list(state["algorithms"]) == ["EMA"]
    assert state["callbacks"]["Seen-1"] == {"count": 6}


def test_max_duration_counts_from_the_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A longer max_duration trains the difference; one that is reached already is a no-op that says so."""
    plain(tmp_path, max_duration="1ep", autoresume=True).fit()
    again = plain(tmp_path, max_duration="1ep", autoresume=True)
    before = [p.clone() for p in again.state.model.parameters()]
    again.fit()
    assert int(again.state.timestamp.batch) == 6
    assert all(torch.equal(a, b) for a, b in zip(before, again.state.model.parameters(), strict=True))
    assert "nothing to do unless more is asked for" in capsys.readouterr().err
    again.close()
    more = plain(tmp_path, max_duration="3ep", autoresume=True)
    more.fit()
    assert int(more.state.timestamp.batch) == 18
    more.fit("2ba")
    assert int(more.state.timestamp.batch) == 20


class Evaluations(Callback):
    """Counts evaluations, as one does that steps a scheduler at each; with ``dies`` it ends training after an epoch."""

    def __init__(self, *, dies: bool = False) -> None:
        self.dies, self.batches = dies, list[int]()

    def eval_end(self, state: Any, logger: Any) -> None:
        self.batches.append(int(state.timestamp.batch))

    def epoch_end(self, state: Any, logger: Any) -> None:
        if self.dies:
            raise Crash

    def state_dict(self) -> dict[str, Any]:
        return {"batches": list(self.batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_an_evaluation_is_done_once(tmp_path: Path, suffix: str) -> None:
    """Saved after the last batch of an epoch, with its evaluation: the next life has that, and what came of it."""

    def make(folder: str, watch: Evaluations) -> hf.Trainer:
        ends = CheckpointSaver(tmp_path / folder / "ends", "ep{epoch}", save_interval="1ep", weights_only=True)
        return plain(
            tmp_path / folder, save_interval="3ba", save_filename="b{batch}" + suffix, callbacks=[watch, ends],
            eval_dataloader=loader(9, shuffle=False), autoresume=True,
        )  # fmt: skip

    whole = make("whole", Evaluations())
    whole.fit()
    with pytest.raises(Crash):
        make("twin", Evaluations(dies=True)).fit()
    with make("twin", watch := Evaluations()) as again:
        assert (int(again.state.timestamp.batch), int(again.state.timestamp.epoch)) == (6, 0)
        loss = float(again.state.eval_metric_values["eval"]["loss"])
        again.fit()
    assert watch.batches == [6, 12] == whole.state.callbacks[0].batches
    assert hf.Checkpoint(tmp_path / "twin" / "ends" / "ep1").metrics["eval"] == {"loss": loss}


def test_fit_with_a_duration_goes_on_where_it_began(tmp_path: Path) -> None:
    """fit(duration) of a life that was killed ends where it would have ended; so does the second one of a script.

    What is loaded into another folder is another run: there it counts from now.
    """

    def script(folder: Path, crash_at: int | None = None) -> hf.Trainer:
        trainer = rich(folder, max_duration=None, crash_at=crash_at, autoresume=True)
        with trainer:
            trainer.fit("1ep")
            trainer.fit("9ba")
        return trainer

    whole = script(tmp_path / "a")
    for crash_at in (5, 9):
        with pytest.raises(Crash):
            script(tmp_path / "b", crash_at)
    broken = script(tmp_path / "b")
    assert int(broken.state.timestamp.batch) == 15
    states = [everything(trainer) for trainer in (broken, whole)]
    for state in states:
        starts = state["timestamp"].pop("run")["fit_starts"]
        assert [start["batch"] for start in starts] == [0, 6]
    assert_state_equal(*states)
    assert int(script(tmp_path / "b").state.timestamp.batch) == 15
    tuned = rich(tmp_path / "c", max_duration=None, load_path=tmp_path / "b" / "ep2-ba15")
    tuned.fit("2ba")
    assert int(tuned.state.timestamp.batch) == 17


@pytest.mark.parametrize("how", ["threshold", "own"])
def test_a_training_that_has_stopped_itself_is_over(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A further life of the run trains no more, and says so, until it is asked for more."""

    class Own(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 4:
                state.stop_training()

    def life() -> hf.Trainer:
        stop = Own() if how == "own" else ThresholdStopper("loss", "eval", 1e9)
        return plain(tmp_path, callbacks=stop, eval_dataloader=loader(6), autoresume=True, max_duration="3ep")

    ends = {"own": 4, "threshold": 6}[how]
    with life() as first:
        first.fit()
        assert int(first.state.timestamp.batch) == ends
    with life() as second:
        assert "was stopped" in capsys.readouterr().err
        second.fit()
        assert int(second.state.timestamp.batch) == ends
        second.state.max_duration = f"{ends + 1}ba"
        second.fit()
        assert int(second.state.timestamp.batch) == ends + 1


class _Network(torch.nn.Module):
    """Counts its batches in a buffer that no state has."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.base, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.base.requires_grad_(trains)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.base(inputs))


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_layers_frozen_at_one_side_and_buffers_that_nobody_saves_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: bool, after: bool
) -> None:
    """The first batch of a resume says which layers train now and did not, or the other way, as `Checkpointer` does."""
    for epochs, trains in enumerate((before, after), 1):
        caplog.clear()
        model = _Network(trains=trains)
        options = {"optimizers": torch.optim.Adam(model.parameters()), "max_duration": f"{epochs}ep"}
        trainer = plain(tmp_path, model=model, autoresume=True, run_name="r", **options)
        trainer.fit()
        trainer.close()
        assert caplog.text.count("the first step has changed state/model/seen: registered") == 1
    said = "2 parameters train now and did not when this checkpoint was saved (state/model/base.weight"
    assert (said in caplog.text) == (after and not before)
    assert ("optimizer state begins anew" in caplog.text) == (after and not before)
    assert ("2 parameters are frozen now and were trained when" in caplog.text) == (before and not after)
