"""What the tests of many ranks on the late device run on each of them."""

import logging

import late_device
import late_group
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import holdfast as hf


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(128, 320), nn.ReLU(), nn.Linear(320, 128)).to(f"late:{dist.get_rank()}")


def _words(model):
    """Add up the words of all parameters that lie here: exact, and over the ranks the sum of the whole."""
    local = [param.to_local() if hasattr(param, "to_local") else param for param in model.parameters()]
    return sum(int(part.detach().cpu().contiguous().view(torch.int32).long().sum()) for part in local)


def _spread(model, how):
    late_group.register()
    group = dist.new_group(backend="late")
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "late")
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(root, steps, *, how="ddp", change_after=None):
    """Train data-parallel, each rank on a device of its own; rank 1 changes its weights for a while after a save."""
    late = late_device.load()
    late.set_device(dist.get_rank())
    late.set_patience(60_000)  # copies happen when training needs them
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    model = _spread(_model(), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sums, late_bytes = {}, 0
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
            model(batch.to(f"late:{dist.get_rank()}")).square().mean().backward()
            optimizer.step()
            ck.step()
            late.set_patience(60_000 if ck.global_step < steps else 1)  # the last save need not wait for training
            sums[ck.global_step] = _words(model)
            late_bytes = max(late_bytes, ck._boundary._snapshotter.copies.late_bytes)
    return {"said": said, "sums": sums, "begun": begun, "skipped": ck.stats.skipped, "late": late_bytes}


def weights(root):
    """Load the newest checkpoint into a fresh model; the sum of its words."""
    late_device.load()
    model = _model()
    hf.load(root, {"model": model}, only=["model"])
    return _words(model)
