"""What the tests of many ranks on the late device run on each of them."""

import logging

import late_device
import torch
import torch.distributed as dist
from torch import nn

import holdfast as hf


def _average(model):
    for param in model.parameters():
        mean = param.grad.cpu()
        dist.all_reduce(mean)
        param.grad.copy_(mean / dist.get_world_size())


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 160), nn.ReLU(), nn.Linear(160, 128)).to(f"late:{dist.get_rank()}")


def train(root, steps, *, change_after=None):
    """Train data-parallel, each rank on a device of its own; rank 1 changes its weights for a while after a save."""
    late = late_device.load()
    late.set_device(dist.get_rank())
    late.set_patience(60_000)  # copies happen when training needs them
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sums = {}
    with hf.Checkpointer(root, {"model": model, "optimizer": optimizer}, every=2, keep=None) as ck:
        begun = ck.global_step
        while ck.global_step < steps:
            if ck.global_step == change_after and dist.get_rank() == 1:
                for sign in (-1, -1):
                    for param in model.parameters():
                        param.data.mul_(sign)
                    late.synchronize()
            optimizer.zero_grad()
            batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(ck.global_step * 2 + dist.get_rank()))
            model(batch.to(model[0].weight.device)).square().mean().backward()
            _average(model)
            optimizer.step()
            ck.step()
            late.set_patience(60_000 if ck.global_step < steps else 1)  # the last save need not wait for training
            sums[ck.global_step] = float(sum(param.double().sum().cpu() for param in model.parameters()))
    return {"said": said, "sums": sums, "begun": begun, "skipped": ck.stats.skipped}


def weights(root):
    """Load the newest checkpoint into a fresh model; the sum of its weights."""
    late_device.load()
    model = _model()
    hf.load(root, {"model": model}, only=["model"])
    return float(sum(param.double().sum().cpu() for param in model.parameters()))
