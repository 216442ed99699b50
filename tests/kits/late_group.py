"""A process group for the late device: every collective goes through the CPU and gloo.

`register` makes "late" a backend of torch.distributed for such tensors, so that DDP and FSDP2 run on the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.futures import Future


class _Done(dist._Work):
    def __init__(self, result):
        super().__init__()
        self._future = Future()
        self._future.set_result(result)

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def get_future(self):
        return self._future


class LateGroup(dist.ProcessGroup):
    """Copies tensors to the CPU, lets gloo do the work, and copies the results back."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("late", store), rank, size, timeout)

    def getBackendName(self):
        return "late"

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def _through(self, tensors, run):
        on_cpu = [tensor.detach().cpu().contiguous() for tensor in tensors]
        run(on_cpu).wait()
        for tensor, value in zip(tensors, on_cpu, strict=True):
            tensor.detach().copy_(value)
        return _Done(list(tensors))

    def allreduce(self, tensors, opts=None):
        return self._through(tensors, lambda some: self._gloo.allreduce(some, _options(dist.AllreduceOptions(), opts)))

    def allreduce_coalesced(self, tensors, opts=None):
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return _Done(list(tensors))

    def broadcast(self, tensors, opts):
        return self._through(tensors, lambda some: self._gloo.broadcast(some, opts))

    def allgather(self, outputs, inputs, opts=None):
        for output, source in zip(outputs, inputs, strict=True):
            parts = [torch.empty(part.shape, dtype=part.dtype) for part in output]
            self._gloo.allgather([parts], [source.detach().cpu().contiguous()]).wait()
            for part, value in zip(output, parts, strict=True):
                part.detach().copy_(value)
        return _Done(outputs)

    def _allgather_base(self, output, source, opts=None):
        parts = list(output.detach().view(self.size(), -1).unbind())
        self.allgather([parts], [source.detach().reshape(-1)])
        return _Done(output)

    def _reduce_scatter_base(self, output, source, opts):
        whole = source.detach().cpu().contiguous()
        averaged = opts.reduceOp == dist.ReduceOp.AVG
        self._gloo.allreduce([whole], dist.AllreduceOptions()).wait()
        mine = whole.view(self.size(), -1)[self.rank()].view_as(output)
        output.detach().copy_(mine / self.size() if averaged else mine)
        return _Done(output)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names from torch 2.13 on

    def barrier(self, opts=None):
        return self._gloo.barrier(dist.BarrierOptions())


def _options(fresh, given):
    if given is not None:
        fresh.reduceOp = given.reduceOp
    return fresh


def register() -> None:
    dist.Backend.register_backend("late", LateGroup, devices=["late"])
