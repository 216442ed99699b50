"""Training loops that change parameters or optimizer state between the end of a step and the next `optimizer.step`.

Each is a generator that does something to the model or the optimizer when it is created and may undo it when it ends:
code of a loop around its forward and backward. `LOOPS` has them by name; "plain" changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

Body = Callable[[nn.Module, torch.optim.Optimizer, int], Iterator[None]]
LOOPS: dict[str, Body] = {}
NOTICED: set[str] = set()  # autograd refuses these between forward and backward


def loop(body: Body) -> Body:
    LOOPS[body.__name__] = body
    return body


def noticed_by_autograd(body: Body) -> Body:
    NOTICED.add(body.__name__)
    return body


def _layer(model: nn.Module, step: int) -> nn.Linear:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return layers[step % len(layers)]


@loop
def plain(model, optimizer, step):
    yield


def _average(model):
    if not hasattr(model, "average"):
        model.__dict__["average"] = copy.deepcopy(model)
    average = model.__dict__["average"]
    with torch.no_grad():
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(param, 0.1)
    return average


@loop
@noticed_by_autograd
def swaps_in_averages(model, optimizer, step):
    kept = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param, mean in zip(model.parameters(), _average(model).parameters(), strict=True):
            param.copy_(mean)
    yield
    with torch.no_grad():
        for param, old in zip(model.parameters(), kept, strict=True):
            param.copy_(old)


@loop
def swaps_in_averages_by_data(model, optimizer, step):
    kept = [param.detach().clone() for param in model.parameters()]
    for param, mean in zip(model.parameters(), _average(model).parameters(), strict=True):
        param.data.copy_(mean.data)
    yield
    for param, old in zip(model.parameters(), kept, strict=True):
        param.data.copy_(old)


@loop
def swaps_in_averages_and_back_at_once(model, optimizer, step):
    for _ in swaps_in_averages_by_data(model, optimizer, step):
        model(torch.randn(4, 128, device=next(model.parameters()).device))
    yield


@loop
def exchanges_memory(model, optimizer, step):
    for param in model.parameters():
        param.data = param.data.clone().mul_(1.01)
    yield


@loop
@noticed_by_autograd
def resets_a_layer(model, optimizer, step):
    _layer(model, step).reset_parameters()
    yield


@loop
def clamps_a_layer(model, optimizer, step):
    _layer(model, step).weight.data.clamp_(-0.05, 0.05)
    yield


@loop
def negates_and_back(model, optimizer, step):
    weight = _layer(model, step).weight.data
    weight.neg_()
    yield
    weight.neg_()


@loop
def exchanges_two_rows(model, optimizer, step):
    weight = _layer(model, step).weight.data
    weight[[3, 90]] = weight[[90, 3]]
    yield


@loop
def turns_rows(model, optimizer, step):
    weight = _layer(model, step).weight.data
    weight.copy_(weight.flip(-1).clone())
    yield


@loop
def moves_elements(model, optimizer, step):
    weight = _layer(model, step).weight.data
    weight.copy_(weight.view(-1).roll(1).view_as(weight))
    yield


@loop
def exchanges_two_layers(model, optimizer, step):
    one, two = _layer(model, 0).weight.data.view(-1), _layer(model, 1).weight.data.view(-1)
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)
    yield


@loop
@noticed_by_autograd
def normalizes(model, optimizer, step):
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.div_(param.norm(dim=1, keepdim=True).clamp_min(1e-6))
    yield


@loop
def clears_momentum(model, optimizer, step):
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()
    yield


@loop
def replaces_optimizer_state(model, optimizer, step):
    for entry in optimizer.state.values():
        entry["exp_avg_sq"] = entry["exp_avg_sq"] * 0.5
    yield


@loop
def perturbs_for_sharpness(model, optimizer, step):
    moved = [torch.randn_like(param) * 0.05 for param in model.parameters()]
    torch._foreach_add_([param.data for param in model.parameters()], moved)
    yield
    torch._foreach_sub_([param.data for param in model.parameters()], moved)


@loop
@noticed_by_autograd
def prunes(model, optimizer, step):
    weight = _layer(model, step).weight
    with torch.no_grad():
        weight.mul_(weight.abs() > 0.01)
    yield


@loop
def rounds_for_forward(model, optimizer, step):
    kept = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.mul_(16).round_().div_(16)
    yield
    for param, old in zip(model.parameters(), kept, strict=True):
        param.data.copy_(old)


@loop
@noticed_by_autograd
def loads_other_weights(model, optimizer, step):
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, strict=True)
    yield


@loop
@noticed_by_autograd
def steps_by_itself(model, optimizer, step):
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.01)
    yield
    for param in model.parameters():
        param.data.add_(param.grad, alpha=-0.01)


@loop
def adds_a_little_to_one_element(model, optimizer, step):
    weight = _layer(model, step).weight.data
    weight[step % 100, 17] += 1e-3
    yield
