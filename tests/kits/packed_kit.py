"""A tensor that wraps others, as the quantized weights and optimizer states of torchao do."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


class Packed(torch.Tensor):
    """A matrix as 8-bit codes with a scale for each row, in the protocol that torchao's classes keep."""

    @staticmethod
    def __new__(cls, codes, scale, signed, mode=None):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale, signed, mode=None):
        self.codes, self.scale, self.signed, self.mode = codes, scale, signed, mode

    @classmethod
    def of(cls, value, *, signed=True, mode=None):
        scale = value.detach().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls((value.detach() / scale).round().to(torch.int8), scale, signed, mode)

    def __tensor_flatten__(self):
        return ["codes", "scale"], (self.signed, [1, 127]) if self.mode is None else (self.signed, self.mode)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context[0])

    def plain(self):
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        if operation in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].signed, args[0].mode)
        raise NotImplementedError(operation)


class Compact(torch.optim.Optimizer):
    """Momentum that is kept as 8-bit codes, of a sharded parameter as a sharded tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                kept, grad = self.state[param], _local(param.grad)
                before = _local(kept["momentum"]).plain() if kept else torch.zeros_like(grad)
                made = Packed.of(before * 0.9 + grad)
                _local(param).sub_(made.plain(), alpha=group["lr"])
                if isinstance(param, DTensor):
                    sizes = {"shape": param.shape, "stride": param.stride()}
                    made = DTensor.from_local(made, param.device_mesh, param.placements, run_check=False, **sizes)
                kept.update(momentum=made, step=kept.get("step", torch.zeros(())) + 1)


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Noted(torch.Tensor):
    """A weight with a note of how it is to be used, and no values beside its own."""

    @staticmethod
    def __new__(cls, inner, note):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner, note):
        self.inner, self.note = inner, note

    def __tensor_flatten__(self):
        return ["inner"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"], context["note"])

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        plain = [one.inner if isinstance(one, cls) else one for one in args]
        out = operation(*plain, **(kwargs or {}))
        keeps = operation in (torch.ops.aten.detach.default, torch.ops.aten.view.default)
        return cls(out, args[0].note) if keeps else out
