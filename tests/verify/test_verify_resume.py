"""`holdfast verify-resume` takes any script as it is, kills it, and says what differs and why."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.testing import NothingToVerifyError, ResumeDivergedError, verify_resume_script
from holdfast.verify.resume import Kill, choose, examine
from holdfast.verify.trace import Moment, first_difference, likely_causes, unsteady


class Sgd:
    """Plain gradient descent: what makes torch's optimizers start slowly is not what is tested here."""

    def __init__(self, model, lr=0.05):
        self.model, self.lr = model, lr

    def step(self):
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.sub_(weight.grad, alpha=self.lr)
                weight.grad = None


def parts(seed=0):
    if seed is not None:
        torch.manual_seed(seed)
    data = TensorDataset(torch.linspace(-1, 1, 32)[:, None].repeat(1, 4), torch.linspace(0, 1, 32)[:, None])
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    return DataLoader(data, batch_size=4, shuffle=True), model, Sgd(model)


def loop(body=None, at_end=None, *, state=None, seed=0, path="runs/tiny", **options):
    """Three epochs of eight steps; ``body`` is called before each step is counted."""
    loader, model, optimizer = parts(seed)
    with hf.Checkpointer(path, {"model": model, **(state or {})}, **options) as ck:
        for _ in ck.epochs(3):
            for x, y in ck.batches(loader):
                loss = (model(x) - y).pow(2).mean()
                loss.backward()
                optimizer.step()
                if body is not None:
                    body(ck, model)
                ck.step(loss=loss)
            if at_end is not None:
                at_end(ck, model)
    return model


def test_an_exact_loop_is_exact(tmp_path, monkeypatch):
    """Killed after a report, in mid-epoch and at an epoch's end, in the second life too; nothing else is made."""
    monkeypatch.chdir(tmp_path)

    def report(ck, model):
        if ck.epoch == 1:
            ck.report(norm=sum(float(weight.detach().norm()) for weight in model.parameters()))

    found = examine(lambda: loop(at_end=report), kills=3)
    assert found.verdict == "exact", found.what()
    assert found.report.steps == 24
    assert {kill.why for kill in found.kills} >= {
        "after a report", "in the middle of an epoch", "at the end of an epoch",
    }  # fmt: skip
    begun = [start for start, _ in found.report.lives]
    assert begun == [0, *(kill.save.step for kill in found.kills)]
    assert found.noise is None, "nothing differed, so the second uninterrupted run was not needed"
    assert list(tmp_path.iterdir()) == [], "the run was redirected"


@pytest.mark.slow
def test_saves_of_the_script_count_too(tmp_path, monkeypatch):
    """`ck.save()` and a report that is ranked save as ever, and the next life goes on from the newest."""
    monkeypatch.chdir(tmp_path)

    def report(ck, model):
        ck.report(val=1.0 / (1 + ck.epoch))

    verify_resume_script(lambda: loop(at_end=report, keep=hf.Keep(last=1, best=1, metric="val")), kills=2)
    verify_resume_script(lambda: loop(at_end=lambda ck, _: ck.save(), every="1ep"), kills=2, seed=3)


@pytest.mark.slow
def test_a_save_at_the_step_of_the_next_kill(tmp_path, monkeypatch):
    """The life begins at the end of the epoch where it should be killed, and goes on to the end: that is no failure."""
    monkeypatch.chdir(tmp_path)
    place = Moment(step=8)  # as if the script saved there by itself
    kills = [Kill(save=place, stop=place), Kill(save=place, stop=Moment(step=8, nth=1))]
    monkeypatch.setattr("holdfast.verify.resume.choose", lambda *_, **__: kills)
    found = examine(loop)
    assert found.verdict == "exact", found.what()
    assert found.report.lives == ((0, 8), (8, None))


def test_a_script_that_ends_before_its_kill_gets_a_verdict(tmp_path, monkeypatch):
    """Its second life ends by itself before the step of the kill: that is a difference of length, not a failure."""
    monkeypatch.chdir(tmp_path)

    def train():
        model = torch.nn.Linear(2, 1)
        with hf.Checkpointer("runs/short", {"model": model}) as ck:
            end = 12 if ck.resumed_from is None else 4
            while ck.global_step < end:
                ck.step()

    place = Moment(step=3)
    kills = [Kill(save=place, stop=Moment(step=3)), Kill(save=Moment(step=8), stop=Moment(step=9))]
    monkeypatch.setattr("holdfast.verify.resume.choose", lambda *_, **__: kills)
    found = examine(train)
    assert found.difference is not None
    assert found.difference.kind == "length", found.what()
    assert found.verdict in ("differs", "not repeatable")


# ---- what is not exact is named, with its cause

GENERATOR = torch.Generator().manual_seed(7)


def hidden_generator():
    def body(ck, model):
        model[0].bias.data.add_(torch.randn(1, generator=GENERATOR), alpha=1e-3)

    loop(body)


def local_counter():
    seen = []

    def body(ck, model):
        seen.append(1)
        model[0].bias.data.add_(len(seen), alpha=1e-4)

    loop(body)


def forgetful_object():
    class Ema:
        value = 0.0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            pass

    ema = Ema()

    def body(ck, model):
        ema.value = 0.9 * ema.value + 0.1 * float(model[0].bias.detach().sum())

    loop(body, state={"ema": ema})


def own_shuffle():
    chance = random.Random(3)
    loader, model, optimizer = parts()
    samples = list(loader.dataset)
    with hf.Checkpointer("runs/own", {"model": model}) as ck:
        while ck.global_step < 16:
            x, y = chance.choice(samples)
            (model(x) - y).pow(2).mean().backward()
            optimizer.step()
            ck.step()


def own_count():
    _, model, optimizer = parts()
    with hf.Checkpointer("runs/count", {"model": model}) as ck:
        for _ in range(12):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            ck.step()


def running_average():
    average = []

    def body(ck, model):
        average.append(float(model[0].bias.detach().sum()))
        ck.report(average=sum(average) / len(average))

    loop(body)


def own_draws():
    first = []

    def body(ck, model):
        if not first:  # a sanity check in the first step of each life
            first.append(torch.rand(1))

    loop(body)


class Average(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model)

    def update(self, model):
        with torch.no_grad():
            for mine, weight in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.lerp_(weight, 0.1)


def averaged_copy(*, saved=False):
    loader, model, optimizer = parts()
    average = Average(model)
    with hf.Checkpointer("runs/average", {"model": model, **({"average": average} if saved else {})}) as ck:
        if not saved:
            average = Average(model)
        for _ in ck.epochs(2):
            for x, y in ck.batches(loader):
                (model(x) - y).pow(2).mean().backward()
                optimizer.step()
                average.update(model)
                ck.step()
    return average


NAMED = {
    averaged_copy: ("after", "not in the state/Average", "averaged copy (EMA)"),
    hidden_generator: ("after", "model/", "NOT in the state"),
    local_counter: ("after", "model/", "NOT in the state"),
    forgetful_object: ("at resume", "ema/value", "does not take in"),
    own_shuffle: ("after", "model/", "data that do not come from ck.batches"),
    own_count: ("length", "", "ck.global_step"),
    running_average: ("metrics", "metrics/average", "running average"),
    own_draws: ("after", "holdfast/rng/torch", "runs only at the start"),
}


QUICK = (hidden_generator, forgetful_object)
EACH = [pytest.param(train, marks=[] if train in QUICK else pytest.mark.slow) for train in NAMED]


@pytest.mark.parametrize("train", EACH, ids=lambda train: train.__name__)
def test_what_is_not_exact_is_named(tmp_path, monkeypatch, train):
    """The item that differs first, where, and the likely cause."""
    monkeypatch.chdir(tmp_path)
    found = examine(train, kills=1)
    kind, item, cause = NAMED[train]
    assert found.verdict == "differs"
    assert found.difference.kind == kind
    assert [path for path, _, _ in found.difference.items if path.startswith(item)] or not item, found.what()
    assert cause in "\n".join(found.causes)
    with pytest.raises(ResumeDivergedError) as caught:
        found.check()
    assert caught.value.causes == tuple(found.causes)
    assert caught.value.at_resume == (kind == "at resume")


def test_a_fixed_start_is_named(tmp_path, monkeypatch):
    """resume='never', and a path that is another one each time."""
    monkeypatch.chdir(tmp_path)
    found = examine(lambda: loop(resume="never"), kills=1)
    assert found.difference.kind == "not resumed"
    assert "resume='never'" in found.causes[0]
    found = examine(lambda: loop(path=f"runs/{time.time_ns()}"), kills=1)
    assert found.difference.kind == "path"
    assert "same path each time" in found.causes[0]


def test_what_is_never_repeated_is_told_from_the_resume(tmp_path, monkeypatch):
    """Noise in every run is no defect of the resume; a clock in metrics and state is not compared, and that is said."""
    monkeypatch.chdir(tmp_path)

    def noisy(ck, model):
        model[0].bias.data.add_(int.from_bytes(os.urandom(2), "big"), alpha=1e-9)

    found = examine(lambda: loop(noisy), kills=1)
    assert found.verdict == "not repeatable"
    assert "so do two uninterrupted runs" in found.what()
    assert "use_deterministic_algorithms" in found.causes[0]

    class Clock:
        def state_dict(self):
            return {"now": time.time()}

        def load_state_dict(self, state):
            pass

    def timed(ck, _):
        ck.report(seconds=time.time())

    found = examine(lambda: loop(at_end=timed, state={"clock": Clock()}), kills=1)
    assert found.verdict == "exact", found.what()
    assert any("clock/now" in note for note in found.report.notes)
    assert any("seconds" in note for note in found.report.notes)


def test_a_script_that_seeds_nothing(tmp_path, monkeypatch):
    """Every fresh start is given the first one's weights and generators; data that nothing seeds are still found."""
    monkeypatch.chdir(tmp_path)

    def unseeded():
        torch.seed()
        loop(seed=None)

    found = examine(unseeded, kills=1)
    assert found.verdict == "exact", found.what()

    def split():
        torch.seed()
        _, model, optimizer = parts(None)
        x = torch.randn(32, 4)  # other data in every life
        with hf.Checkpointer("runs/split", {"model": model}) as ck:
            while ck.global_step < 8:
                model(x).sum().backward()
                optimizer.step()
                ck.step()

    found = examine(split, kills=1)
    assert found.verdict == "not repeatable"
    assert any("model" in note and "seeds nothing" in note for note in found.report.notes)


def test_scripts_that_cannot_be_verified(tmp_path, monkeypatch):
    """No Checkpointer, too few steps, an error of the script: each is said."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NothingToVerifyError, match="entered no Checkpointer"):
        verify_resume_script(lambda: None)

    def short():
        with hf.Checkpointer("runs/short", {"a": 1}) as ck:
            ck.step()

    with pytest.raises(NothingToVerifyError, match="made 1 step with"):
        verify_resume_script(short)
    with pytest.raises(AssertionError, match=r"exit status 1(.*\n)*.*boom"):
        verify_resume_script(lambda: loop(lambda ck, _: 1 / (1 - ck.epoch), at_end=lambda ck, _: print("boom")))
    with pytest.raises(hf.HoldfastError, match="kills=0"):
        verify_resume_script(lambda: None, kills=0)


# ---- what is decided without running anything


def boundary(step, epoch, nth=0, event="boundary", **items):
    return {
        "event": event, "run": "r", "step": step, "nth": nth, "rank": 0, "batches": [], "metrics": {}, "objects": [],
        "resumed": None, "items": {"holdfast/progress/epoch": f"int {epoch}", **items},
    }  # fmt: skip


def rows_of(epochs, length):
    """Rows as a loop with an evaluation at the end of each epoch writes them."""
    rows = [boundary(0, 0, event="start")]
    for epoch in range(epochs):
        rows += [boundary(epoch * length + one, epoch) for one in range(1, length + 1)]
        step = (epoch + 1) * length
        rows += [boundary(step, epoch, event="report"), boundary(step, epoch + 1, nth=1)]
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 6, 50])
@pytest.mark.parametrize(("epochs", "length"), [(1, 2), (2, 1), (3, 8), (1, 100)])
def test_moments(count, epochs, length):
    """Kills are ascending, each life may be killed where it is, and the special moments come first."""
    rows = rows_of(epochs, length)
    order = [(row["step"], row["nth"]) for row in rows if row["event"] == "boundary"]
    for seed in range(20):
        kills = choose(rows, count, seed=seed)
        assert 1 <= len(kills) <= count
        places = [order.index((at.step, at.nth)) for kill in kills for at in (kill.save, kill.stop)]
        assert places == sorted(places)
        saves = places[::2]
        assert len(set(saves)) == len(saves)
        assert all(stop > save for save, stop in zip(saves, places[1::2], strict=True))
    if (epochs, length) == (3, 8) and count >= 3:
        assert {kill.why for kill in kills} >= {
            "after a report", "in the middle of an epoch", "at the end of an epoch",
        }  # fmt: skip


def test_a_restored_state_is_judged_by_what_was_saved():
    """Where training cannot be repeated, what a resume brings back is still compared with what this run had saved."""
    reference = [boundary(0, 0, event="start", w="int 0"), *(boundary(step, 0, w=f"int {step}") for step in (1, 2, 3))]
    other = [boundary(0, 0, event="start", w="int 0"), *(boundary(step, 0, w=f"int 1{step}") for step in (1, 2))]
    noise = unsteady(reference, [boundary(0, 0, event="start", w="int 0"), *other[1:], boundary(3, 0, w="int 13")])
    assert noise.items == {"w"}
    assert noise.first is None, "a plain value may come from a clock"
    back = {**boundary(2, 0, event="start", w="int 12"), "resumed": 2}
    found, _ = first_difference(reference, [other, [back, boundary(3, 0, w="int 3")]])
    assert (found.kind, found.step, found.life) == ("after", 1, 0)
    lost = {**back, "items": {**back["items"], "w": "int 0"}}
    found, _ = first_difference([*other, boundary(3, 0, w="int 13")], [other, [lost]])
    assert (found.kind, found.step, found.items) == ("at resume", 2, [("w", "int 12", "int 0")])
    assert "w: a plain value" in likely_causes(found)[0]


# ---- the command

SCRIPT = """
    import sys, torch
    import holdfast as hf
    model = torch.nn.Linear(2, 1)
    with hf.Checkpointer(sys.argv[1], {"model": model}, every="10min") as ck:
        while ck.global_step < int(sys.argv[2]):
            model.weight.data.add_(torch.rand(1, 2))
            ck.step()
    print("done")
"""


def command(tmp_path, *arguments, script=SCRIPT):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "verify-resume", *arguments], cwd=tmp_path, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_command(tmp_path):
    """Exit 0 and one JSON document for an exact script, whose own run is untouched; --steps ends it early."""
    told = ["--json", "--kills", "1", "--steps", "5", "--output", "kept", "--"]
    ended = command(tmp_path, *told, sys.executable, "train.py", "--run", "100000000")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert (document["exact"], document["verdict"], document["steps"]) == (True, "exact", 5)
    assert len(document["lives"]) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept", "train.py"]
    assert len(list((tmp_path / "kept" / "b.trace").glob("life-*.output.txt"))) == 2


@pytest.mark.slow
def test_the_command_s_answers(tmp_path):
    """1 for a script that differs or fails, 2 for wrong usage; the causes are printed."""
    hidden = SCRIPT.replace("torch.rand(1, 2)", "torch.rand(1, 2, generator=own)").replace(
        "model = ", "own = torch.Generator().manual_seed(3)\n    model = "
    )
    ended = command(tmp_path, "--kills", "1", "--", sys.executable, "train.py", "run", "6", script=hidden)
    assert ended.returncode == 1
    assert "DIFFERS" in ended.stdout
    assert "model/weight" in ended.stdout
    assert "likely cause" in ended.stdout
    ended = command(tmp_path, "--", sys.executable, "train.py", script="raise SystemExit('broken')")
    assert ended.returncode == 1
    assert "broken" in ended.stderr
    assert command(tmp_path).returncode == 2
    assert command(tmp_path, "--kills", "0", "--", "true").returncode == 2
    ended = command(tmp_path, "--", "no-such-program")
    assert ended.returncode == 2
    assert "no-such-program" in ended.stderr


def test_an_averaged_copy_in_the_state_is_exact(tmp_path, monkeypatch):
    """What is saved is no module beside the state, and a copy for a look after each epoch is none that trains."""
    monkeypatch.chdir(tmp_path)

    def train():
        average = averaged_copy(saved=True)
        copy.deepcopy(average)

    found = examine(train, kills=1)
    assert found.verdict == "exact", found.what()


class _Restarts:
    """A loader whose state is not used: each life begins at sample 0."""

    at = 0

    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield torch.full((2, 4), float(self.at)), torch.zeros(2, 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        pass


def test_a_loader_that_restarts_ends_with_a_verdict(tmp_path, monkeypatch):
    """The first difference is what the ledger says of the first batch after the resume; the lives are not cut short."""
    monkeypatch.chdir(tmp_path)

    def train():
        _, model, optimizer = parts()
        loader = _Restarts()
        with hf.Checkpointer("runs/tiny", {"model": model}) as ck:
            for _ in ck.epochs(2):
                for x, y in ck.batches(loader):
                    (model(x) - y).pow(2).mean().backward()
                    optimizer.step()
                    ck.step()

    found = examine(train, kills=1)
    assert found.verdict == "differs"
    assert "gave batch 0 of this epoch again" in found.what()
    assert "as the ledger of the run shows" in found.causes[0]
