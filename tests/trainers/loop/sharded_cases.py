"""Models that are sharded, or split otherwise, on the ranks of the loop trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from loop_kit import Crash, CrashAt, Seen, accuracy, loader, plain

import holdfast as hf
from holdfast.core import EMA


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
