"""`Trainer(guard=)`: bad batches are found, training goes back and leaves them out; bitwise as without them."""

from __future__ import annotations

import math
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "kits"))

from catalog_kit import catalog_of
from loop_kit import NUM_SAMPLES, Points, everything, names, plain, rich

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver
from holdfast.errors import ConfigError, SessionError, TrainingError
from holdfast.run.life import RolledBack
from holdfast.run.rollbacks import BatchSpan, read_rollbacks
from holdfast.testing import ForkServer, assert_state_equal
from holdfast.utils import load_checkpoint

CASES, BOUND_S = 10, 45.0  # of the sweep, for each test


class Poisoned(Points):
    """Points of which some are broken, and some are not there."""

    def __init__(self, *, bad: Any = (), without: Any = (), factor: float = math.nan) -> None:
        super().__init__()
        self.kept = [index for index in range(NUM_SAMPLES) if index not in without]
        self.bad, self.factor = frozenset(bad), factor

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = self.kept[index]
        x, y = super().__getitem__(number)
        return x * (self.factor if number in self.bad else 1.0), y


class BreakAt(Callback):
    """After so many batches in all a weight breaks, or the process ends; once in all lives that share a file."""

    def __init__(self, batch: int, once: Path, how: int = 0) -> None:
        self.batch, self.once, self.how = batch, once, how

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        if int(state.timestamp.batch) != self.batch or self.once.exists():
            return
        self.once.touch()
        if self.how:
            os.kill(os.getpid(), self.how)
            return
        with torch.no_grad():
            next(state.model.parameters()).view(torch.int32)[0] ^= 1 << 30  # the highest bit of the exponent


def data(**broken: Any) -> Any:
    """The same order in every epoch, so that a batch is the same samples."""
    return torch.utils.data.DataLoader(Poisoned(**broken), batch_size=6)


def guarded(run: Any, **options: Any) -> hf.Trainer:
    """A training with everything that has state, under a guard."""
    options = {"guard": hf.Guard(), "autoresume": True, "save_num_checkpoints_to_keep": 1, **options}
    options.setdefault("max_duration", "2ep")
    return rich(run, **options)


def to_its_end(make: Callable[[], hf.Trainer]) -> tuple[hf.Trainer, list[Any]]:
    """Train until it is done; how its lives before the last have ended."""
    statuses: list[Any] = []
    while len(statuses) < 20:
        trainer = make()
        try:
            trainer.fit()
            return trainer, statuses
        except SystemExit as end:
            statuses.append(end.code)
            trainer.close()
    raise AssertionError(f"it does not end: {statuses}")


def known(trainer: hf.Trainer) -> dict[str, Any]:
    """All that is saved and the random numbers, but for what only a guarded training knows."""
    found = everything(trainer)
    found.pop("dataset_state")
    return {**found, "random": torch.get_rng_state(), "numbers": torch.tensor(random.getstate()[1])}


@pytest.mark.parametrize("rescue", [None, pytest.param("1ba", marks=pytest.mark.slow)])
def test_a_bad_batch_is_tried_once_more_and_then_left_out(
    tmp_path: Path, rescue: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end is that of a twin whose data never held its samples: weights, averages, metrics, random numbers."""
    random.seed(1)
    twin = guarded(tmp_path / "twin", train_dataloader=data(without=range(18, 24)), guard=None)
    twin.fit()
    expected = known(twin)
    random.seed(1)
    trainer, statuses = to_its_end(lambda: guarded(tmp_path / "run", train_dataloader=data(bad=[20]), rescue=rescue))
    assert statuses == [86] * 4, "two lives for the bad batch of each epoch"
    assert_state_equal(known(trainer), expected)
    said = capsys.readouterr().err
    assert "rolled back at step 4: loss/train/total is nan (batch 3 of epoch 0): it is trained again" in said
    assert "left out, as the guard has found: batch 3 of epoch 0" in said
    catalog = catalog_of(tmp_path / "run")
    found = read_rollbacks(catalog.index.notes)
    assert [rollback.left_out for rollback in found] == [
        () if number % 2 == 0 else (BatchSpan("train", number // 2, 3, 4),) for number in range(4)
    ]
    newest = catalog.newest()
    assert newest is not None
    manifest = hf.Checkpoint(tmp_path / "run" / newest.name).manifest
    assert manifest is not None
    assert manifest.extra["left_out"] == [["train", epoch, 3, 4] for epoch in range(2)]
    assert math.isfinite(manifest.metrics["loss/train/total"])


def test_a_weight_that_breaks_by_chance_leaves_nothing_behind(tmp_path: Path) -> None:
    """A bit flips after batch 7: trained again from a checkpoint before, the end is that of the clean twin."""
    twin = guarded(tmp_path / "twin", guard=None)
    twin.fit()
    expected = known(twin)
    flip = tmp_path / "flipped"
    trainer, statuses = to_its_end(lambda: guarded(tmp_path / "run", callbacks=[BreakAt(7, flip)]))
    assert statuses == [86]
    assert_state_equal(known(trainer), expected)
    assert [rollback.left_out for rollback in read_rollbacks(catalog_of(tmp_path / "run").index.notes)] == [()]


def test_a_run_begins_anew_before_a_checkpoint_was_seen_to_be_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second batch is bad: the checkpoint of the first has never proven itself; the third life leaves it out."""
    twin = plain(tmp_path / "twin", train_dataloader=data(without=range(6, 12)), max_duration="1ep")
    twin.fit()

    def make() -> hf.Trainer:
        return plain(
            tmp_path / "run", train_dataloader=data(bad=[6]), max_duration="1ep", save_interval="1ba",
            guard=hf.Guard(), autoresume=True,
        )  # fmt: skip

    trainer, statuses = to_its_end(make)
    assert statuses == [86, 86]
    assert_state_equal(trainer.state.model.state_dict(), twin.state.model.state_dict())
    assert "may hold a bad batch, a fresh start" in capsys.readouterr().err


def test_stop_ends_with_an_error_and_nothing_of_the_bad_batch(tmp_path: Path) -> None:
    """``action="stop"`` needs no autoresume; a snapshot of the bad batch is not written either."""
    trainer = plain(
        tmp_path, train_dataloader=data(bad=[20]), save_interval="1ba", rescue="1ba", guard=hf.Guard(action="stop")
    )
    with pytest.raises(TrainingError, match=r"step 4: loss/train/total is nan\. The guard has action='stop'"):
        trainer.fit()
    assert names(tmp_path)[-1] == "ep0-ba3"


def test_the_same_trainer_trains_no_more(tmp_path: Path) -> None:
    """In a notebook `fit` is called again, with the weights of the bad batch: refused, and so is saving them."""
    guard = hf.Guard()
    trainer = plain(tmp_path, train_dataloader=data(bad=[20]), save_interval="1ba", guard=guard, autoresume=True)
    with pytest.raises(RolledBack) as end:
        trainer.fit()
    assert pickle.loads(pickle.dumps(end.value)).code == 86, "it travels to the parent of a worker"
    for again in (trainer.fit, trainer.save_checkpoint_to_save_folder):
        with pytest.raises(SessionError, match="make another Trainer with autoresume=True"):
            again()
    assert names(tmp_path)[-1] == "ep0-ba3"


def test_an_epoch_that_is_left_out_whole_is_passed_over(tmp_path: Path) -> None:
    """Training goes on with the next one."""
    trainer = plain(tmp_path, save_interval="1ba", guard=hf.Guard(), autoresume=True)
    trainer.state.dataset_state.left_out.spans.update([BatchSpan("train", 0, 0, 6)])
    trainer.fit()
    assert [trainer.state.timestamp.count(unit) for unit in ("batch", "epoch")] == [6, 2]


def test_a_full_load_in_the_middle_of_an_epoch_goes_on_from_what_was_loaded(tmp_path: Path) -> None:
    """A callback that loads everything takes training back to that moment, without a guard and with one."""

    class Load(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 4 and not self.loaded:
                self.loaded = True
                load_checkpoint(tmp_path / "first" / "ep0-ba2", state)

        loaded = False

    plain(tmp_path / "first", max_duration="2ba", save_interval="1ba").fit()
    for guard in (None, hf.Guard()):
        callback = Load()
        trainer = plain(
            tmp_path / f"{guard is None}", callbacks=callback, max_duration="8ba", guard=guard, autoresume=True
        )
        trainer.fit()
        assert callback.loaded
        assert trainer.state.timestamp.count("batch") == 8


def test_warn_says_it_and_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another metric than the loss: what a callback logs, by the name that it is logged under."""

    class Logs(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            logger.log_metrics({"mine": math.inf if int(state.timestamp.batch) == 3 else 1.0})

    trainer = plain(tmp_path, callbacks=Logs(), guard=hf.Guard(metric="mine", action="warn"))
    trainer.fit()
    assert trainer.state.timestamp.count("batch") == 12
    assert "step 3: mine is inf (batch 2 of epoch 0)" in caplog.text


def test_a_bad_last_batch_is_found_before_anything_says_that_training_is_done(tmp_path: Path) -> None:
    """The last batch of all is bad; the run ends with the batch before it."""

    def make() -> hf.Trainer:
        return plain(
            tmp_path, train_dataloader=data(bad=[33]), max_duration="1ep", save_interval="3ba", guard=hf.Guard(),
            autoresume=True,
        )  # fmt: skip

    trainer, statuses = to_its_end(make)
    assert statuses == [86, 86]
    assert trainer.state.timestamp.count("batch") == 5
    assert trainer.state.timestamp.count("epoch") == 1
    again, statuses = to_its_end(make)
    assert (again.state.timestamp.count("batch"), statuses) == (5, [])


@pytest.mark.slow
def test_savers_beside_it_are_not_in_the_way_of_going_back(tmp_path: Path) -> None:
    """Weights alone, saved each batch into another folder, are of later batches than training goes on from."""
    weights = tmp_path / "weights"

    def make() -> hf.Trainer:
        saver = CheckpointSaver(weights, "w{batch}.pt", save_interval="1ba", weights_only=True)
        return guarded(tmp_path / "run", train_dataloader=data(bad=[20]), callbacks=[saver], save_interval="3ba")

    trainer, statuses = to_its_end(make)
    assert statuses == [86] * 4
    assert trainer.state.timestamp.count("batch") == 10
    assert "w10.pt" in names(weights)


@pytest.mark.slow
def test_a_signal_in_a_bad_batch_ends_with_the_requeue_status_and_is_remembered(tmp_path: Path) -> None:
    """SIGTERM comes with the bad batch: 85, nothing of it saved, and the next life goes on before it."""

    class Stop(Callback):
        def before_forward(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = guarded(tmp_path, train_dataloader=data(bad=[20]), callbacks=[Stop()])
    with pytest.raises(SystemExit) as end:
        trainer.fit()
    assert end.value.code == 85
    trainer.close()
    assert len(read_rollbacks(catalog_of(tmp_path).index.notes)) == 1
    again = guarded(tmp_path, train_dataloader=data(bad=[20]))
    assert again.state.timestamp.count("batch") == 2


@pytest.mark.slow
def test_max_rollbacks_bounds_it(tmp_path: Path) -> None:
    """Every batch is bad: with one bad step allowed the second one is an error, which no supervisor starts again."""

    def make() -> hf.Trainer:
        return guarded(tmp_path, train_dataloader=data(bad=[8, 20]), guard=hf.Guard(max_rollbacks=1))

    with pytest.raises(TrainingError, match=r"step 3: .*taken back for 1 bad step already \(max_rollbacks=1\)"):
        to_its_end(make)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"guard": True}, "give a holdfast.Guard"),
        ({"guard": hf.Guard()}, "pass autoresume=True"),
        ({"save_filename": "b{batch}.pt"}, "needs a save_folder"),
        ({"save_folder": None, "autoresume": False}, "needs a save_folder"),
    ],
)
def test_what_cannot_be_guarded_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """Before training: no guard, nothing to go back to, no start that would."""
    given = {"guard": hf.Guard(), "save_folder": tmp_path, "autoresume": options.get("guard") is None, **options}
    with pytest.raises(ConfigError, match=says):
        plain(given.pop("save_folder"), **given)


# -- broken and killed at random


def random_case(root: str, seed: int) -> dict[str, Any]:
    """Break data, kill lives, start again as `holdfast run` does; compare with a twin without all that."""
    torch.set_num_threads(1)
    chance, home = random.Random(seed), Path(root)
    bad = sorted(chance.sample(range(6), chance.randint(0, 2)))
    broken = [6 * number + chance.randrange(4) for number in bad]
    options: dict[str, Any] = {
        "save_interval": chance.choice(["1ba", "2ba", "5ba", "1ep"]), "rescue": chance.choice([None, "1ba", "3ba"]),
        "save_num_checkpoints_to_keep": chance.choice([1, 2, -1]),
    }  # fmt: skip
    kills, ends = chance.randint(0, 3), []
    while not ends or ends[-1] != 0:
        after_s = chance.uniform(0.05, 0.5) if ends.count(-9) < kills else None
        pid = os.fork()
        if not pid:
            os._exit(life(home / "run", after_s, broken, options))
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if ends[-1] not in (0, 86, -9) or len(ends) > 40:
            break
    pid = os.fork()
    if not pid:
        without = {index for number in bad for index in range(6 * number, 6 * number + 6)}
        os._exit(life(home / "twin", None, [], {"guard": None}, without))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    case = {"same": False, "ends": [*ends, status], "bad": broken, "options": str(options)}
    if status == 0 == ends[-1]:
        left, right = (torch.load(home / f"{name}-end", weights_only=False) for name in ("run", "twin"))
        try:
            assert_state_equal(left, right)
        except AssertionError as error:
            return {**case, "why": str(error)[:500]}
        case["same"] = True
    return case


def life(run: Path, after_s: float | None, bad: Any, options: dict[str, Any], without: Any = ()) -> int:
    """Live one life, which may be killed after some seconds; its status."""
    try:
        if after_s is not None:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        options = {"guard": hf.Guard(max_rollbacks=20), **options}
        random.seed(1)
        trainer = guarded(run, train_dataloader=data(bad=bad, without=without), **options)
        trainer.fit()
        torch.save(known(trainer), run.with_name(f"{run.name}-end"))
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(preload=("torch", "holdfast.core", __file__)) as one:
        yield one


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow, pytest.mark.long][part > 0]) for part in range(8)]
)
def test_random_poisonings_and_kills_end_as_if_they_had_not_been(server: ForkServer, tmp_path: Path, part: int) -> None:
    """Bad samples, lives killed at any moment: no human, and bitwise the end of the twin."""
    until = time.monotonic() + BOUND_S
    for seed in range(part * CASES, (part + 1) * CASES):
        root = tmp_path / str(seed)
        root.mkdir()
        case = server.run(f"{__file__}:random_case", str(root), seed, timeout_s=300.0).checked()
        assert case["same"], (seed, case)
        if time.monotonic() > until:
            break
