"""Training loops in the shape people write them, each with Holdfast in the fewest lines.

A loop gets the path of its run and ``tick``, which it calls wherever a process may die; it returns what it ended with.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, TensorDataset

import holdfast

Tick = Callable[[], None]
Ended = dict[str, Any]
Loop = Callable[[Any, Tick], Ended]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def net(inputs: int = 4, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, outputs))


def table(rows: int = 12) -> TensorDataset:
    values = torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4) / (rows * 4)
    return TensorDataset(values, values.sum(1, keepdim=True))


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def evaluate(model: nn.Module, loader: Any) -> float:
    """Draws from torch's generator, as an ordinary loader that shuffles does, and leaves dropout on."""
    with torch.no_grad():
        return float(sum(nn.functional.mse_loss(model(x), y) for x, y in loader))


def ended(**things: Any) -> Ended:
    things["torch"], things["random"], things["numpy"] = torch.rand(2), random.random(), np.random.random()
    return things


@loop
def evaluation_where_report_leads(path: Any, tick: Tick) -> Ended:
    """PyTorch's examples: the scheduler after step, an evaluation every three steps, the best kept."""
    torch.manual_seed(0)
    model, history = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    train, test = DataLoader(table(), 3, shuffle=True), DataLoader(table(6), 2, shuffle=True)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "history": history}
    keep = holdfast.Keep(last=2, best=1, metric="val")
    with holdfast.Checkpointer(path, state, every=2, keep=keep) as ck:
        for _ in ck.epochs(2):
            for x, y in ck.batches(train):
                tick()
                loss = fit(model, optimizer, x, y)
                ck.step(loss=loss)
                tick()
                scheduler.step()
                if ck.global_step % 3 == 0:
                    val = evaluate(model, test)
                    tick()
                    ck.report(val=val)
                    history.append((ck.global_step, val))
                tick()
    return ended(model=model.state_dict(), lr=scheduler.get_last_lr(), history=list(history))


@loop
def evaluation_at_the_end_of_an_epoch(path: Any, tick: Tick) -> Ended:
    """The best score as a plain value of the state, the scheduler told of it, the report that saves in between."""
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    train, test = DataLoader(table(), 4, shuffle=True), DataLoader(table(6), 2, shuffle=True)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": float("inf"), "bad": 0}
    keep = holdfast.Keep(last=2, best=1, metric="val")
    with holdfast.Checkpointer(path, state, every=2, keep=keep) as ck:
        for _ in ck.epochs(4):
            tick()
            for x, y in ck.batches(train):
                fit(model, optimizer, x, y)
                ck.step()
                tick()
            val = evaluate(model, test)
            tick()
            scheduler.step(val)
            ck.report(val=val)
            tick()
            ck.state["bad"] = 0 if val < ck.state["best"] else ck.state["bad"] + 1
            ck.state["best"] = min(val, ck.state["best"])
            tick()
    return ended(model=model.state_dict(), best=ck.state["best"], bad=ck.state["bad"])


@loop
def early_stopping(path: Any, tick: Tick) -> Ended:
    """Leaves the loop over epochs when a counter in an object has run out."""
    torch.manual_seed(2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    stopper = SimpleNamespace(best=float("inf"), bad=0, seen=[])
    test = DataLoader(table(6), 2, shuffle=True)
    state = {"model": model, "optimizer": optimizer, "stopper": holdfast.attrs(stopper, "best", "bad", "seen")}
    with holdfast.Checkpointer(path, state, every=1) as ck:
        for _ in ck.epochs(50):
            for x, y in ck.batches(DataLoader(table(), 6, shuffle=True)):
                fit(model, optimizer, x, y)
                ck.step()
                tick()
            val = round(evaluate(model, test), 1)
            stopper.seen.append(val)
            stopper.bad = 0 if val < stopper.best else stopper.bad + 1
            stopper.best = min(val, stopper.best)
            tick()
            if stopper.bad >= 2:
                break
    return ended(model=model.state_dict(), seen=list(stopper.seen), bad=stopper.bad)


@loop
def own_epochs(path: Any, tick: Tick) -> Ended:
    """`for epoch in range(ck.epoch, n)`, with what an epoch ends with outside of ck.epochs."""
    torch.manual_seed(3)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = DataLoader(table(), 4, shuffle=True)
    with holdfast.Checkpointer(path, {"m": model, "o": optimizer, "s": scheduler}, every=2) as ck:
        for _ in range(ck.epoch, 3):
            for x, y in ck.batches(loader):
                fit(model, optimizer, x, y)
                ck.step()
                tick()
            evaluate(model, loader)
            tick()
            scheduler.step()
            tick()
    return ended(model=model.state_dict(), lr=scheduler.get_last_lr())


@loop
def gan(path: Any, tick: Tick) -> Ended:
    """Two optimizers by turns on the index of the batch, and noise drawn once before the loop."""
    torch.manual_seed(4)
    generator, critic = net(2, 4), net(4, 1)
    g_opt = torch.optim.Adam(generator.parameters(), lr=0.01)
    d_opt = torch.optim.Adam(critic.parameters(), lr=0.01)
    losses: dict[str, list[float]] = {"g": [], "d": []}
    state = {"generator": generator, "critic": critic, "g_opt": g_opt, "d_opt": d_opt, "losses": losses}
    with holdfast.Checkpointer(path, state, every=1) as ck:
        fixed = torch.randn(3, 2)
        for _ in ck.epochs(2):
            for index, (real, _) in ck.enumerate(DataLoader(table(), 3, shuffle=True)):
                tick()
                d_opt.zero_grad()
                d_loss = critic(generator(torch.randn(3, 2)).detach()).mean() - critic(real).mean()
                d_loss.backward()
                d_opt.step()
                losses["d"].append(d_loss.item())
                if index % 2:
                    g_opt.zero_grad()
                    g_loss = -critic(generator(torch.randn(3, 2))).mean()
                    g_loss.backward()
                    g_opt.step()
                    losses["g"].append(g_loss.item())
                tick()
                ck.step()
                if index == 2:
                    generator(fixed + torch.randn(3, 2))  # pictures to look at
                tick()
    return ended(generator=generator.state_dict(), critic=critic.state_dict(), losses=copy.deepcopy(losses))


@loop
def reinforcement_without_a_loader(path: Any, tick: Tick) -> Ended:
    """Episodes by `random` and NumPy, a replay buffer and a running average as plain values."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    policy = net(3, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    state = {"policy": policy, "optimizer": optimizer, "buffer": deque(maxlen=5), "average": 10.0, "arms": Counter()}
    with holdfast.Checkpointer(path, state, every=2) as ck:
        while ck.global_step < 7:
            seen = torch.from_numpy(np.random.random(3).astype("float32"))
            arm = random.choice("abc")
            reward = -nn.functional.log_softmax(policy(seen), 0)[0]
            optimizer.zero_grad()
            reward.backward()
            optimizer.step()
            ck.state["buffer"].append((arm, reward.item()))
            ck.state["arms"][arm] += 1
            ck.state["average"] = 0.9 * ck.state["average"] + 0.1 * reward.item()
            tick()
            ck.step(reward=reward)
            tick()
        return ended(policy=policy.state_dict(), **{name: ck.state[name] for name in ("buffer", "average", "arms")})


@loop
def gradient_accumulation_on_the_index(path: Any, tick: Tick) -> Ended:
    """Two batches to a step and the last one alone, told by the index and the length of the loader."""
    torch.manual_seed(6)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=1) as ck:
        for _ in ck.epochs(2):
            batches = ck.enumerate(DataLoader(table(10), 2, shuffle=True))
            for index, (x, y) in batches:
                nn.functional.mse_loss(model(x), y).backward()
                tick()
                if index % 2 or index + 1 == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
                    ck.step()
                tick()
    return ended(model=model.state_dict())


@loop
def epochs_of_a_part_of_the_data(path: Any, tick: Tick) -> Ended:
    """`limit_train_batches`: each epoch is left by `break`, and one object gives the batches of all of them."""
    torch.manual_seed(24)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=1) as ck:
        batches = ck.enumerate(DataLoader(table(), 2, shuffle=True))
        for _ in ck.epochs(3):
            for index, (x, y) in batches:
                if index >= 3:
                    break
                fit(model, optimizer, x, y)
                ck.step()
                tick()
            tick()
    return ended(model=model.state_dict())


@loop
def moving_average_of_the_weights(path: Any, tick: Tick) -> Ended:
    """An EMA copy updated after step, and its decay as an attribute."""
    torch.manual_seed(7)
    model = net()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run = SimpleNamespace(decay=0.5)
    state = {"model": model, "ema": ema, "optimizer": optimizer, "run": holdfast.attrs(run, "decay")}
    with holdfast.Checkpointer(path, state, every=3) as ck:
        for _ in ck.epochs(2):
            for x, y in ck.batches(DataLoader(table(), 3, shuffle=True)):
                fit(model, optimizer, x, y)
                ck.step()
                tick()
                with torch.no_grad():
                    for mean, weight in zip(ema.parameters(), model.parameters(), strict=True):
                        mean.lerp_(weight, 1 - run.decay)
                run.decay = min(0.99, run.decay + 0.05)
                tick()
    return ended(ema=ema.state_dict(), decay=run.decay)


@loop
def a_batch_drawn_ahead(path: Any, tick: Tick) -> Ended:
    """`following = next(batches)` while this one trains: ahead=1 says so."""
    torch.manual_seed(8)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=1) as ck:
        for _ in ck.epochs(2):
            batches = iter(ck.batches(DataLoader(table(), 3, shuffle=True), ahead=1))
            following = next(batches, None)
            while following is not None:
                x, y = following
                following = next(batches, None)
                tick()
                fit(model, optimizer, x, y)
                ck.step()
                tick()
    return ended(model=model.state_dict())


@loop
def a_look_at_the_data_first(path: Any, tick: Tick) -> Ended:
    """Draws between entering and the first batch: a batch to print, a warm-up of the model, a seed set again."""
    torch.manual_seed(9)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(table(), 3, shuffle=True)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=1) as ck:
        x, _ = next(iter(loader))
        model(x + torch.randn_like(x))
        random.random()
        for _ in ck.epochs(2):
            for x, y in ck.batches(loader):
                fit(model, optimizer, x + 0.1 * random.random(), y)
                ck.step()
                tick()
    return ended(model=model.state_dict())


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(4) * random.random() + float(np.random.random())


def augmented(path: Any, tick: Tick, **options: Any) -> Ended:
    torch.manual_seed(10)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen: dict[int, Any] = {}
    loader = DataLoader(Augmented(), 3, shuffle=True, **options)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer, "seen": seen}, every=1) as ck:
        for _ in ck.epochs(2):
            for x in ck.batches(loader):
                fit(model, optimizer, x, x.sum(1, keepdim=True))
                seen[ck.global_step] = x.sum().item()
                ck.step()
                tick()
    return ended(model=model.state_dict(), seen=dict(seen))


@loop
def augmentation_without_workers(path: Any, tick: Tick) -> Ended:
    """Random augmentation in `__getitem__`, by all three generators."""
    return augmented(path, tick)


@loop
def augmentation_in_persistent_workers(path: Any, tick: Tick) -> Ended:
    """The same in two workers that stay from epoch to epoch."""
    return augmented(path, tick, num_workers=2, persistent_workers=True)


@loop
def evaluation_by_persistent_workers(path: Any, tick: Tick) -> Ended:
    """An evaluation loader whose workers stay: it draws their seed once in each life."""
    torch.manual_seed(11)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    test = DataLoader(table(6), 2, num_workers=1, persistent_workers=True)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=1) as ck:
        for _ in ck.epochs(2):
            for x, y in ck.batches(DataLoader(table(), 6, shuffle=True)):
                fit(model, optimizer, x, y)
                ck.step()
                evaluate(model, test)
                tick()
    return ended(model=model.state_dict())


class Lines(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((4,), number / 10) for number in range(9))


@loop
def iterable_data(path: Any, tick: Tick) -> Ended:
    """A stream without indices: replayed by count, and said."""
    torch.manual_seed(12)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=1) as ck:
        for _ in ck.epochs(2):
            for x in ck.batches(DataLoader(Lines(), 3)):
                fit(model, optimizer, x, x.sum(1, keepdim=True))
                ck.step()
                tick()
    return ended(model=model.state_dict())


@loop
def a_stream_left_for_evaluations(path: Any, tick: Tick) -> Ended:
    """An endless generator, left by `break` after every third step and taken up again."""
    torch.manual_seed(23)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    test, seen = DataLoader(table(6), 2, shuffle=True), {}
    stream = (torch.full((3, 4), number / 10) for number in itertools.count())
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer, "seen": seen}, every=2) as ck:
        while ck.global_step < 8:
            for x in ck.batches(stream):
                fit(model, optimizer, x, x.sum(1, keepdim=True))
                tick()
                seen[ck.global_step] = x.sum().item()
                ck.step()
                tick()
                if ck.global_step % 3 == 0 or ck.global_step == 8:
                    break
            evaluate(model, test)
            tick()
    return ended(model=model.state_dict(), seen=dict(seen))


@loop
def steps_of_an_endless_sampler(path: Any, tick: Tick) -> Ended:
    """minGPT: 10**10 draws with replacement, left by `break` after so many steps."""
    torch.manual_seed(13)
    data = table()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = RandomSampler(data, replacement=True, num_samples=int(1e10))
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=2) as ck:
        for x, y in ck.batches(DataLoader(data, 3, sampler=sampler)):
            if ck.global_step >= 6:
                break
            fit(model, optimizer, x, y)
            ck.step()
            tick()
    return ended(model=model.state_dict())


@loop
def batches_from_an_array(path: Any, tick: Tick) -> Ended:
    """nanoGPT: random windows of an array, the next one drawn early and kept in the state, evaluation at the top."""
    torch.manual_seed(14)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.arange(40.0) / 40

    def get_batch() -> torch.Tensor:
        return torch.stack([data[int(at) : int(at) + 4] for at in torch.randint(36, (3,))])

    state = {"model": model, "optimizer": optimizer, "following": get_batch(), "best": float("inf")}
    with holdfast.Checkpointer(path, state, every=2) as ck:
        while ck.global_step < 7:
            x, iteration = ck.state["following"].clone(), ck.global_step
            if iteration % 3 == 0:
                val = evaluate(model, [(get_batch(), torch.zeros(3, 1))])
                ck.state["best"] = min(val, ck.state["best"])
            tick()
            ck.state["following"].copy_(get_batch())
            fit(model, optimizer, x, x.sum(1, keepdim=True))
            tick()
            ck.step()
            tick()
        return ended(model=model.state_dict(), best=ck.state["best"], following=ck.state["following"])


@loop
def two_loaders(path: Any, tick: Tick) -> Ended:
    """Semi-supervised: labelled batches and, by `next`, unlabelled ones."""
    torch.manual_seed(15)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=1) as ck:
        for _ in ck.epochs(2):
            more = iter(ck.batches(DataLoader(table(), 2, shuffle=True), name="unlabelled"))
            for x, y in ck.batches(DataLoader(table(8), 2, shuffle=True)):
                other, _ = next(more)
                tick()
                fit(model, optimizer, torch.cat([x, other]), torch.cat([y, y]))
                ck.step()
                tick()
                torch.rand(3)
    return ended(model=model.state_dict())


@loop
def several_steps_in_one_batch(path: Any, tick: Tick) -> Ended:
    """Each batch is trained three times (PPO's inner epochs), every one a step."""
    torch.manual_seed(16)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=2) as ck:
        for _ in ck.epochs(2):
            for x, y in ck.batches(DataLoader(table(), 4, shuffle=True)):
                for _ in range(3):
                    fit(model, optimizer, x, y)
                    ck.step()
                    tick()
    return ended(model=model.state_dict())


@loop
def a_save_between_the_optimizer_and_step(path: Any, tick: Tick) -> Ended:
    """Batches that are left out, one with gradients that are too large; saves are asked for before ck.step()."""
    torch.manual_seed(20)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer, "skipped": 0}
    with holdfast.Checkpointer(path, state, every=None) as ck:
        for _ in ck.epochs(3):
            for index, (x, y) in ck.enumerate(DataLoader(table(), 3, shuffle=True)):
                tick()
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                tick()
                if norm > 7.0:
                    ck.state["skipped"] += 1
                    continue
                optimizer.step()
                if index % 2:
                    ck.save()
                tick()
                ck.step()
                tick()
    return ended(model=model.state_dict(), skipped=ck.state["skipped"])


class Remembers(Sampler[int]):
    """A shuffle by a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.rng = length, np.random.default_rng(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(self.length).tolist())


@loop
def a_sampler_with_a_generator_of_its_own(path: Any, tick: Tick) -> Ended:
    """Also a part of a data set that grows from epoch to epoch, in batches that grow too."""
    torch.manual_seed(21)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samplers = [Remembers(length) for length in (6, 9, 12)]
    with holdfast.Checkpointer(path, {"model": model, "optimizer": optimizer}, every=2) as ck:
        for epoch in ck.epochs(6):
            sampler = samplers[epoch % 3]
            part = Subset(table(), range(len(sampler)))
            for x, y in ck.batches(DataLoader(part, 2 + epoch % 3, sampler=sampler)):
                tick()
                fit(model, optimizer, x, y)
                ck.step()
                tick()
    return ended(model=model.state_dict())


@loop
def mixed_precision_and_averaged_weights(path: Any, tick: Tick) -> Ended:
    """A gradient scaler that skips steps, a warm-up, stochastic weight averaging, the best weights as a copy."""
    torch.manual_seed(22)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    best: dict[str, Any] = {"score": float("inf"), "weights": copy.deepcopy(model.state_dict())}
    train, test = DataLoader(table(), 3, shuffle=True), DataLoader(table(6), 2)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "warm_up": warm_up,
        "swa": averaged,
        "best": best,
    }
    with holdfast.Checkpointer(path, state, every=2) as ck:
        for _ in ck.epochs(3):
            for index, (x, y) in ck.enumerate(train):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x), y) * (float("inf") if index == 1 else 1.0)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                tick()
                scaler.step(optimizer)
                scaler.update()
                ck.step()
                warm_up.step()
                tick()
            averaged.update_parameters(model)
            score = evaluate(averaged, test)
            tick()
            if score < best["score"]:
                best["score"], best["weights"] = score, copy.deepcopy(model.state_dict())
    return ended(model=model.state_dict(), swa=averaged.state_dict(), scale=scaler.get_scale(), best=best)


@loop
def data_sets_one_after_another(path: Any, tick: Tick) -> Ended:
    """Two data sets in each epoch, a batch tried again after an error, averaged weights brought in at the very end."""
    torch.manual_seed(25)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    loaders = {"clean": DataLoader(table(6), 3, shuffle=True), "noisy": DataLoader(table(9), 3, shuffle=True)}
    state = {"model": model, "optimizer": optimizer, "averaged": averaged, "failures": 0}
    with holdfast.Checkpointer(path, state, every=2) as ck:
        for _ in ck.epochs(2):
            for name, loader in loaders.items():
                for x, y in ck.batches(loader, name=name):
                    while True:
                        try:
                            fit(model, optimizer, x + 0.1 * torch.randn_like(x), y)
                            if ck.global_step % 4 == state["failures"]:
                                raise MemoryError
                            break
                        except MemoryError:
                            state["failures"] += 1
                        tick()
                    ck.step()
                    averaged.update_parameters(model)
                    tick()
        for weight, mean in zip(model.parameters(), averaged.module.parameters(), strict=True):
            weight.data.copy_(mean)
        tick()
    found = holdfast.load(ck.latest(), only="model")["model"]
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    return ended(model=model.state_dict(), failures=state["failures"])
