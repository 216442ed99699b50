"""Schedules in time strings and optimizers with decoupled decay: what Composer makes of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_kit import Crash, CrashAt, loader, plain

import holdfast as hf
from holdfast import optim
from holdfast.core import Callback

# The factors that Composer 0.32.1 gave in 10 batches, 5 to an epoch, of max_duration="2ep".
FACTORS: dict[str, tuple[Any, list[float]]] = {
    "step": (optim.StepScheduler("3ba", 0.5), [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
    "multi": (optim.MultiStepScheduler(["1ep", "0.8dur"], 0.1), [1, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01]),
    "constant": (optim.ConstantScheduler(0.5, "4ba"), [0.5, 0.5, 0.5, 0.5, 1, 1, 1, 1, 1, 1]),
    "linear": (optim.LinearScheduler(1.0, 0.1, "0.5dur"), [1, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1, 0.1, 0.1, 0.1]),
    "exponential": (optim.ExponentialScheduler(0.5, "1ep"),
                    [1, 0.870551, 0.757858, 0.659754, 0.574349, 0.5, 0.435275, 0.378929, 0.329877, 0.287175]),
    "cosine": (optim.CosineAnnealingScheduler(alpha_f=0.1),
               [1, 0.977975, 0.914058, 0.814503, 0.689058, 0.55, 0.410942, 0.285497, 0.185942, 0.122025]),
    "restarts": (optim.CosineAnnealingWarmRestartsScheduler("2ba", 2.0),
                 [1, 0.5, 1, 0.853553, 0.5, 0.146447, 1, 0.96194, 0.853553, 0.691342]),
    "polynomial": (optim.PolynomialScheduler(2.0), [1, 0.81, 0.64, 0.49, 0.36, 0.25, 0.16, 0.09, 0.04, 0.01]),
    "warm constant": (optim.ConstantWithWarmupScheduler("3ba", 0.5),
                      [0, 0.166667, 0.333333, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
    "warm multi": (optim.MultiStepWithWarmupScheduler("2ba", ["6ba"], 0.1),
                   [0, 0.5, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
    "warm linear": (optim.LinearWithWarmupScheduler("0.2dur", 0.8, 0.2),
                    [0, 0.4, 0.8, 0.725, 0.65, 0.575, 0.5, 0.425, 0.35, 0.275]),
    "warm cosine": (optim.CosineAnnealingWithWarmupScheduler("2ba", alpha_f=0.1),
                    [0, 0.5, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254]),
    "warm polynomial": (optim.PolynomialWithWarmupScheduler("1ep"), [0, 0.2, 0.4, 0.6, 0.8, 1, 0.64, 0.36, 0.16, 0.04]),
    "function": (lambda state: 1 / (1 + int(state.timestamp.batch)), [1 / number for number in range(1, 11)]),
}  # fmt: skip


class Rates(Callback):
    """Notes the rate that comes after each batch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def batch_end(self, state: Any, logger: Any) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def make(folder: Path | None, schedule: Any, rates: Rates, **options: Any) -> hf.Trainer:
    model = torch.nn.Linear(4, 3)
    return plain(
        folder, model=model, schedulers=schedule, save_interval="2ba",
        optimizers=optim.DecoupledAdamW(model.parameters(), lr=2.0, weight_decay=1e-4),
        **{"callbacks": rates, "train_dataloader": loader(30), **options},
    )  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_factors(name: str) -> None:
    """Each schedule gives the rates of Composer's, after each batch."""
    schedule, factors = FACTORS[name]
    rates = Rates()
    make(None, schedule, rates).fit()
    assert rates.rates == pytest.approx([2 * one for one in factors], abs=2e-6)


def test_a_schedule_goes_on(tmp_path: Path) -> None:
    """A resume finds the rate of the moment; a duration that is known only to `fit` counts from the beginning."""
    whole, first, second, late = Rates(), Rates(), Rates(), Rates()
    schedule = optim.LinearScheduler()
    make(tmp_path / "whole", schedule, whole).fit()
    with pytest.raises(Crash):
        make(tmp_path / "runs", schedule, first, callbacks=[first, CrashAt(5)]).fit()
    make(tmp_path / "runs", schedule, second, autoresume=True).fit()
    assert whole.rates == [*first.rates[:4], *second.rates]
    make(None, optim.LinearWithWarmupScheduler("2ba"), late, max_duration=None).fit("10ba")
    assert late.rates[:3] == [0, 1, 2]


class Used(Rates):
    """Notes the rate that each batch is trained with."""

    def batch_start(self, state: Any, logger: Any) -> None:
        super().batch_end(state, logger)

    def batch_end(self, state: Any, logger: Any) -> None:
        pass


@pytest.mark.parametrize("every_batch", [True, False])
def test_an_optimizer_that_is_not_loaded_has_the_rate_of_the_moment(tmp_path: Path, every_batch: bool) -> None:
    """From its first batch on, not from the first step of the schedule on."""
    options: dict[str, Any] = {"schedule": optim.ExponentialScheduler(0.5), "step_schedulers_every_batch": every_batch}
    make(tmp_path, rates=(whole := Used()), **options).fit()
    left_out = {"load_path": tmp_path / "ep1-ba6", "load_ignore_keys": ["state/optimizers"]}
    make(None, rates=(late := Used()), **left_out, **options).fit()
    assert late.rates == pytest.approx(whole.rates[6:])


def test_by_epochs_and_several_optimizers() -> None:
    """They step after each epoch if asked to, and for every optimizer."""
    rates, model = Rates(), torch.nn.Linear(4, 3)
    make(None, optim.ExponentialScheduler(0.5), rates, step_schedulers_every_batch=False).fit()
    assert rates.rates == [2] * 5 + [1] * 5
    both = [optim.DecoupledSGDW([one], lr=1.0, momentum=0.9) for one in model.parameters()]
    plain(None, model=model, optimizers=both, schedulers=optim.LinearScheduler(), max_duration="4ba").fit()
    assert [one.param_groups[0]["lr"] for one in both] == [0.25, 0.25]


def test_what_a_schedule_cannot_follow() -> None:
    """Clocks, and epochs of a length that nobody knows, are refused when the trainer is made."""
    with pytest.raises(hf.ConfigError, match="cannot follow the clock"):
        make(None, optim.LinearScheduler(t_max="90s"), Rates())
    with pytest.raises(hf.ConfigError, match="number of batches of an epoch"):
        make(None, optim.LinearScheduler(), Rates(), train_dataloader=iter(()))
    with pytest.raises(hf.ConfigError, match="give both in units"):
        make(None, optim.LinearWithWarmupScheduler("6sp", t_max="10ba"), Rates()).fit()


@pytest.mark.parametrize("kind", ["DecoupledAdamW", "DecoupledSGDW"])
def test_decoupled_decay(kind: str) -> None:
    """A weight without a gradient's push falls by decay * lr / initial_lr; hooks are called once a step."""
    calls: list[int] = []
    weight, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(optim, kind)([weight, frozen], lr=0.1, weight_decay=0.5)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    weight.grad = torch.zeros(2)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    assert weight.tolist() == [0.375, 0.375]
    assert frozen.tolist() == [1, 1]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert calls == [1, 1]
