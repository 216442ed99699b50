"""Trainings on a device that end in the middle and go on: bit by bit as those that never ended."""

import copy
from typing import ClassVar

import pytest
import torch
from on_device import on_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_kit import as_late_as_can_be

import holdfast as hf
from holdfast.testing import assert_state_equal


class Dead(Exception):
    """What a life dies of."""


def net(width=160):
    return nn.Sequential(
        nn.Linear(128, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 128)
    ).to("late")


class Plain:
    """A training with everything that has state; subclasses change what makes it a case."""

    optimizer: ClassVar = {"foreach": True}
    accumulate = 1

    def __init__(self):
        self.model = net()
        self.optimizers = self.make_optimizers()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 20)
        self.own = torch.Generator("late").manual_seed(5)

    def make_optimizers(self):
        return [torch.optim.AdamW(self.model.parameters(), lr=0.01, **self.optimizer)]

    def state(self):
        entries = {f"optimizer{number}": each for number, each in enumerate(self.optimizers)}
        return {"model": self.model, "scheduler": self.scheduler, "own": self.own, **entries}

    def loss(self, batch):
        return (self.model(batch) - batch).square().mean()

    def step(self, number, batch):
        (self.loss(batch) / self.accumulate).backward()
        if (number + 1) % self.accumulate == 0:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()

    def run(self, folder, *, die_at=None):
        torch.manual_seed(0)
        self.__init__()
        data = TensorDataset(torch.randn(24, 128))
        loader = DataLoader(data, batch_size=4, shuffle=True)
        with hf.Checkpointer(folder, self.state(), every=2) as ck:
            for _ in ck.epochs(2):
                for number, (batch,) in enumerate(ck.batches(loader)):
                    self.step(number, batch.to("late") + torch.randn(4, 128, device="late", generator=self.own) / 9)
                    if (number + 1) % self.accumulate == 0:
                        ck.step()
                    if die_at is not None and ck.global_step == die_at:
                        ck.wait()
                        raise Dead
        return {"drawn": [torch.rand(3, device=f"late:{each}").cpu() for each in range(2)], **self.tensors()}

    def tensors(self):
        def on_cpu(value):
            if isinstance(value, torch.Tensor):
                return value.cpu()
            if isinstance(value, dict):
                return {key: on_cpu(item) for key, item in value.items()}
            return [on_cpu(item) for item in value] if isinstance(value, (list, tuple)) else value

        return {
            "model": on_cpu(dict(self.model.state_dict())),
            "own": self.own.get_state(),
            **{str(number): on_cpu(each.state_dict()) for number, each in enumerate(self.optimizers)},
        }


class NoForeach(Plain):
    optimizer: ClassVar = {"foreach": False}


class Fused(Plain):
    optimizer: ClassVar = {"fused": True}


class Accumulates(Plain):
    accumulate = 3


class Adversaries(Plain):
    """Two optimizers over two halves, as a GAN has them."""

    def make_optimizers(self):
        return [
            torch.optim.Adam(self.model[0].parameters(), lr=0.01, betas=(0.5, 0.9)),
            torch.optim.RMSprop(self.model[4].parameters(), lr=0.001, momentum=0.5),
        ]


class Lbfgs(Plain):
    """An optimizer that evaluates the loss again, whose history is lists of tensors."""

    def make_optimizers(self):
        return [torch.optim.LBFGS(self.model.parameters(), lr=0.05, max_iter=3, history_size=3)]

    def step(self, number, batch):
        def closure():
            self.optimizers[0].zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        self.optimizers[0].step(closure)
        self.scheduler.step()


class Averages(Plain):
    """An average of the weights (EMA) that is swapped in for an evaluation at the top of each body."""

    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
        )

    def state(self):
        return {**super().state(), "average": self.average}

    def step(self, number, batch):
        kept = [param.detach().clone() for param in self.model.parameters()]
        for param, mean in zip(self.model.parameters(), self.average.module.parameters(), strict=True):
            param.data.copy_(mean.data)
        with torch.no_grad():
            self.loss(batch)
        for param, old in zip(self.model.parameters(), kept, strict=True):
            param.data.copy_(old)
        super().step(number, batch)
        self.average.update_parameters(self.model)

    def tensors(self):
        return {**super().tensors(), "average": {k: v.cpu() for k, v in self.average.state_dict().items()}}


class Swa(Plain):
    """Stochastic weight averaging: a running mean, and a schedule that anneals to its own rate."""

    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.scheduler = torch.optim.swa_utils.SWALR(self.optimizers[0], swa_lr=0.002, anneal_epochs=6)

    def state(self):
        return {**super().state(), "average": self.average}

    def step(self, number, batch):
        super().step(number, batch)
        self.average.update_parameters(self.model)

    def tensors(self):
        average = {k: v.cpu() for k, v in self.average.state_dict().items()}
        return {**super().tensors(), "average": average, "rate": self.scheduler.get_last_lr()}


class Scaled(Plain):
    """Mixed precision with a scaler of gradients."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("late", init_scale=256.0, growth_interval=3)

    def state(self):
        return {**super().state(), "scaler": self.scaler}

    def step(self, number, batch):
        with torch.autocast("late", torch.bfloat16):
            loss = self.loss(batch).float()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self.optimizers[0].zero_grad()
        self.scheduler.step()

    def tensors(self):
        return {**super().tensors(), "scaler": self.scaler.state_dict()}


class Compiled(Plain):
    """A compiled model: forward and backward are graphs that torch has traced (no backend generates code for it)."""

    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(self.model, backend="aot_eager")

    def state(self):
        return {**super().state(), "model": self.compiled}

    def loss(self, batch):
        return (self.compiled(batch) - batch).square().mean()


CASES = {case.__name__: case for case in (Plain, *Plain.__subclasses__())}


QUICK = {"Plain", "Averages"}


@pytest.mark.parametrize(
    "case", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
@on_device
def test_a_training_that_goes_on_is_the_one_that_never_ended(case, tmp_path):
    """Model, optimizers, scheduler, scaler, averages, generators of host and devices, and the data, on a device."""
    training = CASES[case]()
    whole = copy.deepcopy(training.run(tmp_path / "whole"))
    last = 3 if training.accumulate > 1 else 7
    with pytest.raises(Dead):
        training.run(tmp_path / "parts", die_at=last)
    parts = training.run(tmp_path / "parts")
    assert_state_equal(whole, parts)


@on_device
def test_what_is_changed_at_once_is_not_in_the_save(tmp_path):
    """`save` and `save_async` have copied everything when they return, of every dtype and layout."""
    names = "float64 float32 float16 bfloat16 float8_e4m3fn int64 int32 int16 int8 uint8 uint16 bool complex64"
    torch.manual_seed(1)
    state = {}
    for name in names.split():
        raw = torch.randint(0, 2, (400, 300)) if name == "bool" else torch.randn(400, 300) * 50
        state[name] = raw.to(getattr(torch, name)).to("late")
    state["turned"] = torch.randn(300, 400, device="late").t()
    state["channels"] = torch.randn(8, 16, 20, 20, device="late").to(memory_format=torch.channels_last)
    state["conj"] = torch.randn(300, 40, device="late", dtype=torch.complex64).conj()
    state["far"] = torch.randn(300, 40, device="late:1")
    state["empty"], state["scalar"] = torch.empty(0, 3, device="late"), torch.tensor(3.5, device="late")
    wanted = {key: value.cpu().clone() for key, value in state.items()}
    with as_late_as_can_be():
        handle = hf.save_async(tmp_path / "async", state)
        for value in state.values():
            value.zero_()
        handle.result()
        for key, value in wanted.items():
            state[key].copy_(value)
        hf.save(tmp_path / "whole", state)
        for value in state.values():
            value.zero_()
    for name in ("async", "whole"):
        assert_state_equal(wanted, hf.load(tmp_path / name, map_location="cpu"))


@on_device
def test_loading_to_a_device(tmp_path):
    """Whole, in part, with another dtype, and to a device other than the one that saved."""
    torch.manual_seed(2)
    model = net()
    hf.save(tmp_path / "one", {"model": model, "loose": torch.ones(70, 300, device="late:1")})
    weights = {key: value.cpu() for key, value in model.state_dict().items()}

    other = net().to("late:1")
    hf.load(tmp_path / "one", {"model": other}, only=["model"])
    assert_state_equal(weights, {key: value.cpu() for key, value in other.state_dict().items()})
    half = net().bfloat16()
    hf.load(tmp_path / "one", {"model": half}, only=["model"], dtype=torch.bfloat16)
    assert torch.equal(half[0].weight.cpu(), weights["0.weight"].bfloat16())

    loose = hf.load(tmp_path / "one", only=["loose"], map_location="late:1")["loose"]
    assert loose.device == torch.device("late", 1)
    assert torch.equal(loose.cpu(), torch.ones(70, 300))
    assert hf.load(tmp_path / "one", only=["loose"])["loose"].device.type == "cpu"
