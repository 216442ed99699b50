"""Models that are sharded, or split otherwise, on the ranks of the loop trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "kits"))

from loop_kit import Crash, CrashAt, Seen, accuracy, loader, plain

import holdfast as hf
from holdfast.callbacks import Callback
from holdfast.core import EMA
from holdfast.trainers.loop.parallel import Parallel, Ranks, check_optimizers, clip_gradients, move_plain

RATE, BOUND = 0.5, 0.01


class Layers(torch.nn.Sequential):
    """A model that evaluates in a way of its own, as those written for Composer may."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def eval_forward(self, batch: Any) -> torch.Tensor:
        return (self.forward(batch[0]) + self(batch[0])) / 2


def sharded(
    folder: str, *, crash_at: int | None = None, what: str = "everything", suffix: str = "", **options: Any
) -> dict[str, Any]:
    """A model that the user has sharded with `fully_shard` trains, is evaluated and goes on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "everything":
        fully_shard(model, mesh=mesh)
    elif what == "all but a layer":
        fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
    elif what == "a layer":
        fully_shard(model[0], mesh=mesh)
    if what != "everything" and dist.get_rank() == 1:
        with torch.no_grad():
            model[2].weight.add_(1.0)  # ranks begin with the weights of rank 0
    seen: list[Seen] = [Seen()]
    dies = [] if crash_at is None else [CrashAt(crash_at)]
    trainer = plain(
        folder, model=model, optimizers=torch.optim.AdamW(model.parameters(), lr=0.01), seed=3, autoresume=True,
        eval_dataloader=loader(21, shuffle=False), eval_metrics={"accuracy": accuracy}, save_interval="2ba",
        callbacks=[*seen, *dies], grad_accum=2, grad_clip_norm=1.0, save_filename="b{batch}" + suffix,
        algorithms=EMA(smoothing=0.9), **options,
    )  # fmt: skip
    try:
        trainer.fit()
    except (Crash, hf.HoldfastError):
        if crash_at is None:
            raise
        return {"crashed": True}
    weights = {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).double().sum().item()
        for name, one in model.state_dict().items()
    }
    values = {name: float(one) for name, one in trainer.state.eval_metric_values["eval"].items()}
    trainer.close()
    return {"rows": seen[0].rows, "weights": weights, "eval": values, "saved": trainer.saved_checkpoints}


def split_otherwise(what: str) -> str:
    """Models whose ranks would not train in step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model: Any = Layers()
    size = dist.get_world_size()
    if what == "tensor parallel":
        parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel()})
    elif what == "part of the ranks":
        fully_shard(model, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("one", "other"))["other"])
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    try:
        plain(None, model=model)
    except hf.ConfigError as error:
        return str(error)
    return ""


class Branches(torch.nn.Module):
    """Three layers, of which rank 0 alone goes through one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last((y + self.extra(x) if dist.get_rank() == 0 else y).relu())


class Gradients(Callback):
    """Notes after each part of a batch whether the first layer has its gradient; thaws what was frozen."""

    def __init__(self) -> None:
        self.has: list[bool] = []

    def after_backward(self, state: Any, logger: Any) -> None:
        self.has.append(state.model.first.weight.grad is not None)

    def batch_end(self, state: Any, logger: Any) -> None:
        state.model.last.bias.requires_grad_(True)


def whole(model: torch.nn.Module) -> dict[str, list[float]]:
    found = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()}
    return {name: one.flatten().tolist() for name, one in found.items()}


def by_elements(what: str, *, batches: int = 3, frozen: bool = False) -> dict[str, Any]:
    """Train with plain descent, where every gradient counts as it is, and a bound that it always exceeds."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = given = Branches()
    model.last.bias.requires_grad_(not frozen)
    if what == "a layer":
        fully_shard(model.first)
    elif what == "all but a layer":
        fully_shard(model, ignored_params={*model.extra.parameters(), *model.last.parameters()})
    else:
        given = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    noted, before = Gradients(), whole(model)
    trainer = plain(
        None, model=given, optimizers=torch.optim.SGD(model.parameters(), lr=RATE), seed=3, grad_accum=2,
        grad_clip_norm=BOUND, callbacks=noted, max_duration=f"{batches}ba",
    )  # fmt: skip
    trainer.fit()
    return {"before": before, "after": whole(model), "has": noted.has}


def rows_of_one_rank() -> list[list[float]]:
    """A plain parameter with sparse gradients, on one rank alone."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.EmbeddingBag(3, 2, sparse=True))
    fully_shard(model[0])
    parallel = Parallel(model, Ranks.join(torch.device("cpu")))
    parallel.ready(model, torch.device("cpu"))
    if dist.get_rank() == 0:
        model[1](torch.tensor([[1, 1]])).sum().backward()
    parallel.average()
    return model[1].weight.grad.tolist()


def two_kinds() -> dict[str, str]:
    """How a trainer takes optimizers of a model with sharded and plain parameters; "" where it trains."""
    from torch.distributed.fsdp import fully_shard

    def outcome(make: Any, **options: Any) -> str:
        model = Layers()
        fully_shard(model[0])
        try:
            trainer = plain(
                None, model=model, optimizers=make(model), max_duration="2ba", grad_clip_norm=BOUND, **options
            )
        except hf.ConfigError as error:
            return str(error)
        trainer.fit()
        return ""

    def parted(model: Any, **options: Any) -> Any:
        return torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], **options)

    def unset(model: Any) -> Any:
        check_optimizers([torch.optim.AdamW(model.parameters())], torch.device("cuda"), scaled=False)

    def frozen(model: Any) -> Any:
        model[0].requires_grad_(False)
        return torch.optim.AdamW(model.parameters(), foreach=True)

    fp16 = {"precision": "amp_fp16"}
    return {
        "foreach": outcome(lambda model: torch.optim.AdamW(model.parameters(), foreach=True)),
        "fused": outcome(lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
        "cuda": outcome(unset),
        "scaled": outcome(lambda model: torch.optim.SGD(model.parameters()), **fp16),
        "scaled default": outcome(lambda model: None, **fp16),
        "default": outcome(lambda model: None),
        "groups": outcome(lambda model: parted(model, foreach=True)),
        "frozen": outcome(frozen),
        "two, scaled": outcome(lambda model: [torch.optim.SGD(model[at].parameters()) for at in (0, 2)], **fp16),
    }


def gradients_of_two_kinds() -> dict[str, Any]:
    """What clipping makes of gradients that overflowed, and where plain tensors go."""
    from torch.distributed.fsdp import fully_shard

    model = Layers()
    fully_shard(model[0])
    model.register_buffer("mean", torch.zeros(2))
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    model[2].bias.grad[0] = float("inf")
    clip_gradients(model, 1.0)
    spoilt = [name for name, one in whole_gradients(model).items() if not one.isfinite().all()]
    asked: list[Any] = []
    with mock.patch.object(torch.Tensor, "to", lambda self, device: asked.append((self.data_ptr(), device)) or self):
        move_plain(model, torch.device("cuda", 1))  # there need be none
    moved = {name for name, one in model.state_dict().items() for at, _ in asked if one.data_ptr() == at}
    return {"spoilt": spoilt, "moved": sorted(moved), "where": sorted({str(device) for _, device in asked})}


def whole_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: getattr(one.grad, "full_tensor", lambda one=one: one.grad)() for name, one in model.named_parameters()
    }
