"""Loops over epochs and batches, ended at every step and started again: each sample once, the state of no break."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_kit as kit
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf

EPOCHS, STEPS = 2, 4  # of 3 samples each


class Killed(Exception):
    """Stands for the end of the process: nothing of the body is saved."""


class Diary:
    """What lives did; rows of steps that were lost are struck out by the next life."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.evaluated: list[tuple[int, int]] = []

    def begin(self, step: int) -> None:
        self.ids = {at: ids for at, ids in self.ids.items() if at <= step}
        self.evaluated = [(epoch, at) for epoch, at in self.evaluated if at < step]

    def flat(self) -> list[list[int]]:
        return [self.ids[at] for at in sorted(self.ids)]


Loop = Callable[[hf.Checkpointer, dict[str, Any], Diary, int], None]


def one_step(ck: hf.Checkpointer, state: dict[str, Any], diary: Diary, batch: torch.Tensor, kill_at: int) -> None:
    loss = kit.train_one(state, batch)
    diary.ids[ck.global_step + 1] = batch.tolist()
    ck.step(loss=loss)
    if ck.global_step == kill_at:
        ck.wait()
        raise Killed


def by_epochs(ck: hf.Checkpointer, state: dict[str, Any], diary: Diary, kill_at: int) -> None:
    for epoch in ck.epochs(EPOCHS):
        for batch in ck.batches(kit.loader()):
            one_step(ck, state, diary, batch, kill_at)
        diary.evaluated.append((epoch, ck.global_step))
        ck.report(val=float(epoch))
    assert list(ck.epochs(EPOCHS)) == []


def by_range(ck: hf.Checkpointer, state: dict[str, Any], diary: Diary, kill_at: int) -> None:
    for epoch in range(ck.epoch, EPOCHS):
        assert epoch == ck.epoch or ck.global_step == STEPS * epoch
        for batch in ck.batches(kit.loader()):
            one_step(ck, state, diary, batch, kill_at)
        diary.evaluated.append((epoch, ck.global_step))
        ck.report(val=float(epoch))


def by_steps(ck: hf.Checkpointer, state: dict[str, Any], diary: Diary, kill_at: int) -> None:
    while ck.global_step < EPOCHS * STEPS:
        for batch in ck.batches(kit.loader()):
            one_step(ck, state, diary, batch, kill_at)


def by_two_loaders(ck: hf.Checkpointer, state: dict[str, Any], diary: Diary, kill_at: int) -> None:
    for epoch in ck.epochs(EPOCHS):
        for one, two in zip(ck.batches(kit.loader()), ck.batches(kit.loader(), name="second"), strict=True):
            one_step(ck, state, diary, torch.cat([one, two]), kill_at)
        diary.evaluated.append((epoch, ck.global_step))


def without_batches(ck: hf.Checkpointer, state: dict[str, Any], diary: Diary, kill_at: int) -> None:
    while ck.global_step < EPOCHS * STEPS:
        one_step(ck, state, diary, torch.randint(0, 100, (3,)), kill_at)


def live(path: str, loop: Loop, diary: Diary, kill_at: int, every: int | None = 1) -> dict[str, Any]:
    state = kit.make_state()
    try:
        with hf.Checkpointer(path, state, every=every, keep=None) as ck:
            diary.begin(ck.global_step)
            loop(ck, state, diary, kill_at)
    except Killed:
        pass
    return state


LOOPS: list[Loop] = [by_epochs, by_range, by_steps, by_two_loaders, without_batches]


# Two of them are enough to notice at once; all of them run in CI's sweep.
@pytest.mark.parametrize(
    "loop", [one if one in (by_range, without_batches) else pytest.param(one, marks=pytest.mark.slow) for one in LOOPS]
)
def test_a_run_killed_after_any_step_equals_one_never_killed(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    """For every step of two epochs: the same ids in order exactly once, every epoch evaluated, equal weights."""
    plain = Diary()
    wanted = live(f"memory://loops-{loop.__name__}/plain", loop, plain, 0)
    assert len(plain.flat()) == EPOCHS * STEPS
    if loop in (by_epochs, by_range, by_steps):
        for epoch in range(EPOCHS):
            ids = [one for ids in plain.flat()[epoch * STEPS : (epoch + 1) * STEPS] for one in ids]
            assert sorted(ids) == list(range(12))
    for kill_at in range(1, EPOCHS * STEPS + 1):
        for every in (1, 3) if kill_at % 3 == 1 else (1,):
            path, diary = f"memory://loops-{loop.__name__}/{kill_at}-{every}", Diary()
            live(path, loop, diary, kill_at, every)
            state = live(path, loop, diary, 0, every)
            assert diary.flat() == plain.flat(), (kill_at, every)
            # An epoch whose evaluation was begun or not is evaluated (again) by the next life.
            assert dict(diary.evaluated) == dict(plain.evaluated), (kill_at, every)
            assert all(torch.equal(one, two) for one, two in zip(kit.weights(wanted), kit.weights(state), strict=True))


def test_many_resumes_in_one_epoch() -> None:
    """Ended after every single step of the run, eight times: still each sample once and the same weights."""
    plain, diary = Diary(), Diary()
    wanted = live("memory://many/plain", by_epochs, plain, 0)
    for kill_at in range(1, EPOCHS * STEPS + 1):
        live("memory://many/run", by_epochs, diary, kill_at)
    state = live("memory://many/run", by_epochs, diary, 0)
    assert diary.flat() == plain.flat()
    assert all(torch.equal(one, two) for one, two in zip(kit.weights(wanted), kit.weights(state), strict=True))


def test_a_loader_under_another_name_than_it_was_saved_with_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Its epoch begins anew, and the first step says so; a second loader beside the one that goes on is no such one."""
    path = "memory://renamed/run"
    for limit, name in ((2, "train"), (4, "train"), (6, "other")):
        caplog.clear()
        state = kit.make_state()
        with hf.Checkpointer(path, state, every=None) as ck:
            for batch in ck.batches(kit.loader(batch_size=1), name=name):
                if ck.global_step == 3:
                    next(iter(ck.batches(kit.loader(), name="second")))
                ck.step(loss=kit.train_one(state, batch))
                if ck.global_step >= limit:
                    break
        assert ("steps are made on 'other', which it does not know" in caplog.text) is (name == "other")


def test_an_evaluation_by_batches_of_its_own_leaves_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of batches without a step, where the steps of the epoch are those of another loader."""
    state = kit.make_state()
    with hf.Checkpointer("memory://evaluates/run", state, every=None) as ck:
        for _ in ck.epochs(2):
            for batch in ck.batches(kit.loader()):
                ck.step(loss=kit.train_one(state, batch))
            for _ in ck.batches(kit.loader(), name="val"):
                pass
    assert caplog.messages == []


@pytest.mark.parametrize("is_nested", [True, False])
def test_steps_of_a_loop_within_the_body_of_another_are_said(is_nested: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A resume between two of them leaves out the rest of the outer batch; side by side, or in turn, all is well."""
    state = kit.make_state()
    with hf.Checkpointer(f"memory://nested-{is_nested}/run", state, every=None) as ck:
        for _ in ck.epochs(2):
            inner = iter(ck.batches(kit.loader(batch_size=1), name="inner"))
            for batch in ck.batches(kit.loader()):
                for _, _ in zip(range(1 + is_nested), inner, strict=False):
                    ck.step(loss=kit.train_one(state, batch))
            for batch in inner:
                ck.step(loss=kit.train_one(state, batch))
    assert len(caplog.messages) == is_nested
    assert ("steps are made on one batch of 'inner' after another, and on one of 'train'" in caplog.text) is is_nested


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_drawn_and_not_trained_comes_again(workers: int) -> None:
    """Leaving the loop after drawing a batch (`if step >= n: break`) loses no sample: the last step counts."""
    path, seen = f"memory://drawn-{workers}/run", []
    for limit in (1, 3, 4):
        state = kit.make_state()
        with hf.Checkpointer(path, state, every=None) as ck:
            for batch in ck.batches(kit.loader(num_workers=workers)):
                if ck.global_step >= limit:
                    break
                seen += batch.tolist()
                ck.step(loss=kit.train_one(state, batch))
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize(("every", "asks_late"), [(None, True), (1, True), (None, False)])
def test_a_batch_of_a_loader_with_its_own_state_is_drawn_and_not_trained(
    every: int | None, asks_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a position cannot go back: what a resume leaves out is said, where the last step is saved only then."""
    path, seen = f"memory://drawn-stateful/{every}-{asks_late}", []
    for limit in (2, 4):
        caplog.clear()
        with hf.Checkpointer(path, {}, every=every) as ck:
            for batch in ck.batches(StatefulDataLoader(range(12), 2)):
                if asks_late and ck.global_step >= limit:
                    break
                seen += batch.tolist()
                ck.step()
                if ck.global_step >= limit and not asks_late:
                    break
        is_lost = every is None and asks_late
        assert sum("1 batch(es) of 'train' drawn and not trained" in text for text in caplog.messages) == is_lost
    assert seen == [number for number in range(10 if is_lost else 8) if not (is_lost and number in (4, 5))]


def test_gradient_accumulation_moves_the_position_with_the_steps() -> None:
    """Two batches to a step, saved by ck.save() between them: the first of the pair comes again."""
    path, trained = "memory://accumulate/run", []
    for kill in (True, False):
        state, group = kit.make_state(), []
        try:
            with hf.Checkpointer(path, state, every=None) as ck:
                for number, batch in enumerate(ck.batches(kit.loader(12, batch_size=2))):
                    group += batch.tolist()
                    if number % 2:
                        trained += group
                        group = []
                        ck.step()
                    elif kill and ck.global_step == 1:
                        ck.save()
                        ck.wait()
                        raise Killed
        except Killed:
            pass
    assert sorted(trained) == list(range(12))


def test_an_iterable_without_state_is_replayed_by_count(caplog: pytest.LogCaptureFixture) -> None:
    """A generator-like source is drawn again up to the position of the last trained step, said aloud."""
    path, seen = "memory://count/run", []

    class Source:
        def __iter__(self) -> Any:
            return iter([torch.tensor([number]) for number in range(6)])

    for limit in (2, 6):
        with hf.Checkpointer(path, {"w": torch.zeros(1)}, every=None) as ck:
            for batch in ck.batches(Source()):
                if ck.global_step >= limit:
                    break
                seen += batch.tolist()
                ck.step()
    assert seen == list(range(6))
    assert "drawing 2 batches again" in caplog.text


@pytest.mark.parametrize("one_shot", [True, False], ids=["a generator", "an iterable"])
def test_a_stream_left_for_an_evaluation_goes_on_where_it_was(one_shot: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Left by `break` and taken up again in one life: each batch comes once and is drawn once; so does a resume."""
    path, drawn, seen = f"memory://taken-up-{one_shot}/run", [], []

    class Numbers:
        def __iter__(self) -> Any:
            for number in itertools.count():
                drawn.append(number)
                yield torch.tensor([number])

    for until, num_drawn in ((6, 6), (9, 9)):
        drawn.clear()
        stream = iter(Numbers()) if one_shot else Numbers()
        with hf.Checkpointer(path, {}, every=None) as ck:
            while ck.global_step < until:
                for batch in ck.batches(stream):
                    seen += batch.tolist()
                    ck.step()
                    if ck.global_step % 2 == 0 or ck.global_step == until:
                        break
        assert drawn == list(range(num_drawn))
    assert seen == list(range(9))
    assert caplog.text.count("batches again to get back to the position") == 1


class Unreadable(kit.Ids):
    """Has one sample that cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if int(index) == 4:
            raise OSError("cannot read sample 4")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_cannot_be_read_is_left_out_where_the_script_goes_on(workers: int, tmp_path: Path) -> None:
    """As with the loader itself: the next batch comes next, no epoch ends early, and a resume goes on behind it."""

    def life(kill_at: int) -> list[list[int]]:
        seen: list[list[int]] = []
        with contextlib.suppress(Killed), hf.Checkpointer(tmp_path / "run", {"n": 0}, every=1) as ck:
            for _ in ck.epochs(2):
                batches = iter(ck.batches(DataLoader(Unreadable(12), batch_size=2, num_workers=workers)))
                while True:
                    try:
                        batch = next(batches)
                    except StopIteration:
                        break
                    except OSError:
                        continue
                    seen.append(batch.tolist())
                    assert ck.batch == batch[0] // 2, "counted in the whole epoch"
                    ck.step()
                    if ck.global_step == kill_at:
                        ck.wait()
                        raise Killed
        return seen

    epoch = [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
    assert life(3) == epoch[:3]
    assert life(0) == epoch[3:] + epoch


def test_data_that_fail_for_ever_are_not_asked_for_ever(tmp_path: Path) -> None:
    """A script that catches all errors of its data would spin: the second failure at one place is another error."""

    class Broken(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            yield from (0, 1, 2)
            raise OSError("no more indices")

        def __len__(self) -> int:
            return 12

    failures = 0
    with pytest.raises(hf.SessionError, match="cannot be gone on with"), hf.Checkpointer(tmp_path, {"n": 0}) as ck:
        batches = iter(ck.batches(DataLoader(kit.Ids(12), sampler=Broken(), batch_size=1)))
        while True:
            try:
                next(batches)
            except OSError:
                failures += 1
                continue
            ck.step()
    assert failures == 1


@pytest.mark.parametrize("per_step", [1, 2])
def test_batches_in_flight_at_the_end_of_the_data_are_trained_once(tmp_path: Path, per_step: int) -> None:
    """With ``ahead=3`` the last steps draw nothing any more: each moves the position on, up to the end."""

    def life(path: Path, kill_at: int) -> list[int]:
        seen: list[int] = []
        with contextlib.suppress(Killed), hf.Checkpointer(path, {"n": 0}, every=1) as ck:
            for _ in ck.epochs(1):
                batches = iter(ck.batches(kit.loader(8, batch_size=1), ahead=3 * per_step))

                def drawn(num: int, batches: Any = batches) -> list[torch.Tensor]:
                    return [batch for _ in range(num) if (batch := next(batches, None)) is not None]

                flight = drawn(3 * per_step)
                while flight:
                    now, flight = flight[:per_step], flight[per_step:] + drawn(per_step)
                    seen += [batch.item() for batch in now]
                    ck.step()
                    if ck.global_step == kill_at:
                        ck.wait()
                        raise Killed
        return seen

    whole = life(tmp_path / "whole", 0)
    assert len(whole) == 8
    for kill_at in range(4 // per_step, 8 // per_step + 1):
        seen = life(tmp_path / f"killed-{kill_at}", kill_at)
        assert [*seen, *life(tmp_path / f"killed-{kill_at}", 0)] == whole


@pytest.mark.parametrize("in_order", [False, True])
def test_a_pass_that_was_left_before_a_save_is_said_to_go_on(
    tmp_path: Path, in_order: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Epochs of three batches by `break`: a start from a save behind them draws more. Not so at the end of a run."""

    def life(num_epochs: int, kill: bool) -> None:
        with contextlib.suppress(Killed), hf.Checkpointer(tmp_path / "run", {"n": 0}, every=None) as ck:
            for _ in ck.epochs(num_epochs):
                for index, _ in ck.enumerate(kit.loader(24)):
                    ck.step()
                    if index >= 2:
                        break
                if kill:
                    ck.save()
                    ck.wait()
                    raise Killed
                if in_order:
                    return

    life(1, kill=not in_order)
    assert not caplog.records
    life(2, kill=False)
    assert caplog.text.count("had been left after 3 batches of epoch 0") == (not in_order)


def test_a_stream_that_fails_is_read_from_its_begin_again() -> None:
    """An error of the stream that the script catches loses nothing: what was trained is drawn again and dropped."""
    seen, failures = [], iter([True, False])

    class Fails:
        def __iter__(self) -> Any:
            fails = next(failures)
            for number in range(4):
                if number == 2 and fails:
                    raise OSError("the connection is lost")
                yield torch.tensor([number])

    stream = Fails()
    with hf.Checkpointer("memory://fails/run", {}, every=None) as ck:
        while len(seen) < 4:
            with contextlib.suppress(OSError):
                for batch in ck.batches(stream):
                    seen += batch.tolist()
                    ck.step()
    assert seen == list(range(4))


def test_more_epochs_after_the_end_train_the_next_one_only() -> None:
    """A finished run asked for three epochs instead of two trains the third only, in its own order."""
    diary = Diary()
    live("memory://longer/run", by_epochs, diary, 0)
    epochs = []
    state = kit.make_state()
    with hf.Checkpointer("memory://longer/run", state, every=None, keep=None) as ck:
        for epoch in ck.epochs(3):
            epochs.append(epoch)
            for batch in ck.batches(kit.loader()):
                ck.step(loss=kit.train_one(state, batch))
    # Its checkpoint is of the last step of epoch 1: that epoch comes again, without batches, for what ends it.
    assert (epochs, ck.global_step) == ([1, 2], 12)


@pytest.mark.parametrize("every", [2, 3])
def test_a_scheduler_stepped_at_the_end_of_an_epoch_goes_on_after_a_finished_run(every: int, tmp_path: Path) -> None:
    """Four epochs in two lives have the learning rates of one life, also where the first ended with a save in step."""

    def rates(path: Path, epochs: int) -> list[float]:
        state = kit.make_state()
        state["scheduler"] = scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1, 0.5)
        seen = []
        with hf.Checkpointer(path, state, every=every) as ck:
            for _ in ck.epochs(epochs):
                for batch in ck.batches(kit.loader(4, batch_size=2)):
                    seen.append(scheduler.get_last_lr()[0])
                    ck.step(loss=kit.train_one(state, batch))
                scheduler.step()
        return seen

    split = rates(tmp_path / "split", 2) + rates(tmp_path / "split", 4)
    assert split == rates(tmp_path / "whole", 4)


def test_a_finished_run_started_again_does_nothing() -> None:
    """No epoch, no evaluation, no new checkpoint; also where the last epoch was saved before its evaluation ended."""
    for every in (1, None):
        path = f"memory://again/{every}"
        live(path, by_epochs, Diary(), 0, every)
        before, diary = kit.names(path), Diary()
        live(path, by_epochs, diary, 0, every)
        assert (diary.ids, diary.evaluated, kit.names(path)) == ({}, [], before)


def test_a_loader_gone_through_twice_in_one_epoch_needs_two_names() -> None:
    """Within ck.epochs() a second pass would yield nothing: ConfigError says how to name it."""
    with pytest.raises(hf.ConfigError, match="under a name of its own"), hf.Checkpointer("memory://twice/run") as ck:
        for _ in ck.epochs(1):
            for _ in range(2):
                for _ in ck.batches(kit.loader()):
                    ck.step()


class Damaged(torch.utils.data.Dataset):
    """Three samples, of which the second cannot be read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise ValueError(index)
        return index


def test_what_a_validation_loader_could_not_read_is_no_failure_of_the_next_loader() -> None:
    """Both have a damaged sample at the same place, which the script leaves out: the training goes on behind it."""
    trained = []
    with hf.Checkpointer("memory://damaged", {"n": 0}, every=None) as ck:
        for is_training in (False, True):
            batches = ck.batches(DataLoader(Damaged(), 1))
            for _ in range(4):
                with contextlib.suppress(ValueError, StopIteration):
                    trained.append(next(batches).item())
                    if is_training:
                        ck.step()
                    else:
                        trained.clear()
    assert trained == [0, 2]


@pytest.mark.parametrize(("kill_at", "late"), [(6, False), (8, False), (8, True)])
def test_a_validation_loader_under_the_same_name_counts_no_epochs(
    kill_at: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop over ck.epoch, ended within an epoch, at its end, or behind validation and save, trains what is left.

    In the orders of a run that was not ended; and what is wrong with the script is said once.
    """

    def life(name: str, diary: Diary, kill: int) -> int:
        state, keep = kit.make_state(), hf.Keep(last=2, best=1, metric="val")
        path, every = f"memory://same-name/{name}-{kill_at}-{late}", None if late else 1
        caplog.clear()
        with contextlib.suppress(Killed), hf.Checkpointer(path, state, every=every, keep=keep) as ck:
            diary.begin(ck.global_step)
            for epoch in range(ck.epoch, 4):
                for batch in ck.batches(kit.loader()):
                    one_step(ck, state, diary, batch, 0 if late else kill)
                assert [len(batch) for batch in ck.batches(DataLoader(kit.Ids(5), 3))] == [3, 2]
                ck.report(val=float(epoch))
                if late and ck.global_step == kill:
                    ck.wait()
                    raise Killed
        assert sum("counts as no epoch" in text for text in caplog.messages) == 1
        return ck.epoch

    whole, diary = Diary(), Diary()
    life("whole", whole, 0)
    life("run", diary, kill_at)
    assert life("run", diary, 0) == 4
    assert diary.flat() == whole.flat()
    assert len(diary.flat()) == 4 * STEPS


def test_epochs_are_iterated_by_one_loop_at_a_time() -> None:
    """A nested ck.epochs() is ConfigError; one left by break goes on in the next."""
    with hf.Checkpointer("memory://nested/run") as ck:
        for _ in ck.epochs(2):
            with pytest.raises(hf.ConfigError, match="one loop over epochs"):
                next(iter(ck.epochs(2)))
            break
        assert list(ck.epochs(2)) == [0, 1]


def test_the_plain_loop_needs_nothing_but_step(tmp_path: Path) -> None:
    """A loop of `while ck.global_step < n` over three lives with files: the weights of one life."""
    wanted = kit.make_state()
    kit.train(tmp_path / "plain", 6, state=wanted)
    for steps in (2, 4, 6):
        state = kit.make_state()
        kit.train(tmp_path / "run", steps, state=state)
    assert all(torch.equal(one, two) for one, two in zip(kit.weights(wanted), kit.weights(state), strict=True))


@pytest.mark.parametrize("until", [2, 3])
def test_an_epoch_that_kept_batches_would_have_filled_is_said_to_be_over(
    tmp_path: Path, until: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A shorter loader that itertools.cycle repeats: after a resume at its end or behind it, it gives nothing."""

    def train(until: int) -> None:
        with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=None) as ck:
            for _ in ck.epochs(1):
                long, short = DataLoader(range(8), 2), DataLoader(range(4), 2)
                for _ in zip(ck.batches(long), itertools.cycle(ck.batches(short, name="short")), strict=False):
                    ck.step()
                    if ck.global_step == until:
                        return

    train(until)
    train(4)
    assert "went on from its middle and ended without a step: 'short' had given its last batch" in caplog.text


def test_what_is_no_number_of_epochs_and_no_name(tmp_path: Path) -> None:
    """Said where it is given, with what to give; "for ever" is a number."""
    with hf.Checkpointer(tmp_path, {"n": 0}, every=None) as ck:
        for count in ("3", None, 2.5, True, float("nan")):
            with pytest.raises(hf.ConfigError, match="the number of epochs in all"):
                ck.epochs(count)
        assert list(itertools.islice(ck.epochs(float("inf")), 2)) == [0, 1]
        with pytest.raises(hf.ConfigError, match=r"name=5: give the name of a loader"):
            ck.batches([1], name=5)
        ck.step()


@pytest.mark.parametrize("how", ["in hand", "next", "in a cycle", "with its sampler", "an epoch a step", "arrays"])
def test_steps_on_a_loader_that_ck_batches_does_not_know_are_said_once(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its position is in no checkpoint. One that ends before each step has none, and a sampler may keep its own."""
    loader = DataLoader(range(12), 2)
    state: dict[str, Any] = {"w": torch.zeros(1)}
    if how == "with its sampler":
        loader.sampler.place = 0  # type: ignore[attr-defined]
        state["place"] = hf.attrs(loader.sampler, "place")
    with hf.Checkpointer(tmp_path, state, every=None) as ck:
        if how == "an epoch a step":
            for _ in range(3):
                sum(batch.sum() for batch in loader)
                ck.step()
        elif how == "arrays":
            for _ in range(3):
                torch.randint(12, (2,))
                ck.step()
        elif how == "next":
            batches = iter(loader)
            for _ in range(3):
                next(batches)
                ck.step()
        else:
            for _ in itertools.islice(itertools.cycle(loader) if how == "in a cycle" else loader, 4):
                ck.step()
    said = caplog.text.count("batches of a DataLoader that are not drawn from ck.batches()")
    assert said == (how in ("in hand", "next", "in a cycle"))


@pytest.mark.parametrize(("samples", "said"), [(4, 1), (8, 0)])
def test_a_shorter_loader_that_a_cycle_repeats_is_said_before_it_is_needed(
    samples: int, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first life, not only after the resume that has lost the rest of an epoch; one as long repeats nothing."""
    long, other = DataLoader(range(8), 2), DataLoader(range(samples), 2)
    with hf.Checkpointer(tmp_path, {"w": torch.zeros(1)}, every=None) as ck:
        for _ in ck.epochs(1):
            for _ in zip(itertools.cycle(ck.batches(other, name="other")), ck.batches(long), strict=False):
                ck.step()
    assert caplog.text.count("itertools.cycle gives batches of other again that it keeps itself") == said
