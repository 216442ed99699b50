"""The size that a fresh start names ("one checkpoint takes about ...") is that of the checkpoints that follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.checkpointer.start import _future_optimizer_bytes, _tensor_bytes

Optimizer = torch.optim.Optimizer
Make = Callable[[list[torch.nn.Parameter]], Optimizer]
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def step(model: torch.nn.Module, optimizer: Optimizer) -> None:
    parameter = next(model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(4, parameter.shape[1], dtype=parameter.dtype)).square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def layers(width: int, *, num: int = 2) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(num)])


def frozen(params: list[torch.nn.Parameter]) -> Optimizer:
    for param in params[:2]:
        param.requires_grad = False
    return torch.optim.AdamW(params)


def groups(params: list[torch.nn.Parameter]) -> Optimizer:
    return torch.optim.SGD([{"params": params[:1], "momentum": 0.9}, {"params": params[1:]}], lr=0.001)


class OwnAdam(torch.optim.Adam):
    """An optimizer of the user's own, under a name of its own."""


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.001),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.001, momentum=0.9),
    "groups": groups,
    "Adam": torch.optim.Adam,
    "own Adam": OwnAdam,
    "frozen AdamW": frozen,
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "RMSprop": torch.optim.RMSprop,
    "centered RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]),
    "LBFGS": lambda params: torch.optim.LBFGS(params, history_size=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_that_an_optimizer_will_create(name: str) -> None:
    """What is expected before the first step is what is there after it, and then nothing more is expected."""
    model = layers(256)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    before = _tensor_bytes([*optimizer.state.values()])
    expected = _future_optimizer_bytes([{"optimizer": optimizer}])
    for _ in range(2):
        step(model, optimizer)
    created = _tensor_bytes([*optimizer.state.values()]) - before
    assert expected == pytest.approx(created, rel=0.05, abs=5000)  # with their entries in the index
    assert _future_optimizer_bytes([optimizer]) < 5000


def said_and_real(path: Path, model: torch.nn.Module, optimizer: Optimizer, text: Any, **more: Any) -> float:
    """Train two steps; return the size that the start named over that of the last checkpoint."""
    with hf.Checkpointer(path, {"model": model, "optimizer": optimizer, **more}, every=1) as ck:
        for _ in range(2):
            step(model, optimizer)
            ck.step()
    found = re.search(r"one checkpoint takes about ([\d.]+) (\w+)", text().err)
    assert found is not None
    real = sum(file.stat().st_size for file in (path / "step_00000002").iterdir())
    return float(found[1]) * _UNITS[found[2]] / real


def buffers() -> torch.nn.Sequential:
    model = layers(128)
    model.register_buffer("table", torch.zeros(1 << 16))
    return model


@pytest.mark.parametrize(
    ("model", "make", "more"),
    [
        pytest.param(lambda: layers(3), torch.optim.AdamW, {}, id="tiny"),
        pytest.param(lambda: layers(4, num=100), torch.optim.Adam, {}, id="many tensors"),
        pytest.param(lambda: layers(4, num=100), OPTIMIZERS["momentum"], {}, id="many tensors, one slot"),
        pytest.param(lambda: layers(4), OPTIMIZERS["SGD"], {"log": list(range(10_000))}, id="plain data"),
        pytest.param(lambda: layers(256).bfloat16(), torch.optim.AdamW, {}, id="bf16"),
        pytest.param(buffers, torch.optim.AdamW, {}, id="buffers"),
        pytest.param(lambda: layers(128), OPTIMIZERS["LBFGS"], {}, id="LBFGS"),
    ],
)
def test_within_a_fifth(
    model: Callable[[], torch.nn.Module], make: Make, more: Mapping[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """Tensors, indexes, generators, plain data: a small run is told as rightly as a big one."""
    made = model()
    assert 0.8 <= said_and_real(tmp_path, made, make(list(made.parameters())), capsys.readouterr, **more) <= 1.2


def test_an_average_of_the_model_counts(tmp_path: Path, capsys: Any) -> None:
    """EMA weights are tensors of the state like any others."""
    model = layers(128)
    ema = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    assert 0.8 <= said_and_real(tmp_path, model, optimizer, capsys.readouterr, ema=ema) <= 1.2
