"""What a script has made its optimizers and schedulers with, and what a checkpoint says instead.

A resume puts back the learning rate and the length of a schedule with all else. Whoever has changed them in the script
has to hear that, for nothing fails: the run trains on as before. It stands beside `start`, which is long already.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["made_with", "not_as_made"]

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")
_DEPTH = 6  # levels of a state
_Made = dict[str, dict[str, Any]]


def made_with(state: Mapping[Any, Any]) -> _Made:
    """Return options that training itself leaves alone, by the path of their owner, and by name.

    Of an optimizer a list, with an entry for each group: the learning rate before any scheduler moved it.
    """
    found: _Made = {}

    def look(value: Any, path: str, depth: int) -> None:
        if isinstance(value, torch.optim.Optimizer):
            found[path] = {name: [_of_group(group, name) for group in value.param_groups] for name in _OPTIONS}
        elif isinstance(value, LRScheduler):
            found[path] = _of_scheduler(value)
        elif isinstance(value, Mapping) and depth:
            for key, item in value.items():
                look(item, f"{path}/{key}" if path else str(key), depth - 1)

    look(state, "", _DEPTH)
    return found


def not_as_made(made: _Made, loaded: _Made) -> list[str]:
    """Return a sentence for each option that a checkpoint has set to another value than the script had."""
    found = []
    for path, options in made.items():
        for name, own in options.items():
            saved: Any = loaded.get(path, {}).get(name, own)
            of_groups = isinstance(own, list)
            if repr(saved) == repr(own) or (of_groups and len(saved) != len(own)):
                continue
            part = f"{path}/param_groups" if of_groups else f"{path}/{name}"
            # A scheduler that another one holds is no part that can be named.
            advice = "" if " " in name else f", skip={part!r} takes the script's"
            now, script = _short(saved), _short(own)
            found.append(f"{path}: {name} is {now} as saved, {script} in the script: what was saved counts{advice}")
    return found


def _of_group(group: Mapping[str, Any], name: str) -> Any:
    if name == "lr":
        return _plain(group.get("initial_lr", group.get("lr")))
    is_moved = "base_momentum" in group or "max_momentum" in group  # by a scheduler, in each step
    return None if is_moved and name in ("momentum", "betas") else _plain(group.get(name))


def _of_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the arguments that it keeps under their names, and those of the schedulers that it holds."""
    held, found = vars(scheduler), {}
    names = inspect.signature(type(scheduler).__init__).parameters.keys() - {"optimizer", "schedulers", "last_epoch"}
    for name in sorted(names):
        kept = name if name in held else f"_{name}"
        if isinstance(value := held.get(kept), (bool, int, float, str, list, tuple, Counter)):
            found[kept] = _plain(value)
    for number, inner in enumerate(held.get("_schedulers") or ()):
        found.update((f"{name} of scheduler {number}", value) for name, value in _of_scheduler(inner).items())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, Counter)):
        return tuple(map(_plain, sorted(value.elements()) if isinstance(value, Counter) else value))
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _short(value: Any) -> str:
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    return repr(value)
