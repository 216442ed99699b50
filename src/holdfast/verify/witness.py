"""`Witness`: in a script whose resume is being verified, follows a `Checkpointer` through a life.

It records a line of JSON for each boundary of a step, with a digest of every item of the state, and waits to be
killed where the plan says so. The driver (`lives`) reads the lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from holdfast._ranks import current_ranks
from holdfast.checkpointer.functions import load, save
from holdfast.checkpointer.progress import RESERVED

from .observer import root_modules, stateful_objects
from .state import digests as digests_of
from .trace import BESIDE, Counter, LifePlan

_COUNTER = Counter()
_LEDGER = f"{RESERVED}/progress/ledger"
_State = Callable[[], Mapping[Any, Any]]


def digests(state: Any) -> dict[str, str]:
    """Describe a state, without the ledger of batches: it names the life that saved it."""
    return {path: text for path, text in digests_of(state).items() if not path.startswith(_LEDGER)}


def witness(plan: str, path: Any) -> Witness | None:
    """Return what follows the `Checkpointer` on ``path``, None where the plan leaves it alone."""
    return Witness(plan, path) if LifePlan.read(plan).witness else None


class Witness:
    """A `holdfast.checkpointer.boundaries.Watcher`.

    Args:
        plan: path of the plan.
        path: path of the run, as the script gives it.
    """

    def __init__(self, plan: str, path: Any) -> None:
        observer = sys.modules.get("_holdfast_observer")
        if observer is not None:
            observer.stand_back()
        self._plan = LifePlan.read(plan)
        text = os.fspath(path)
        self._run = text if "://" in text else os.path.abspath(text)
        if self._plan.root is not None:
            self._run = os.path.relpath(self._run, os.path.abspath(self._plan.root))
        self._batches: list[str] = []
        self._metrics: dict[str, str] = {}
        self._mismatch = ""
        self._boundaries = 0
        self._copies: list[weakref.ref[nn.Module]] = []

    def arguments(self, path: Any, **options: Any) -> tuple[Any, ...]:
        """Redirect the run into the plan's home; only planned saves happen there, and no tracker gets them."""
        home = self._plan.home
        if home is None:
            return (path, *options.values())
        name = re.sub(r"[^\w.-]+", "-", self._run.rstrip("/").rpartition("/")[2])[:60]
        place = f"{name}-{hashlib.blake2b(self._run.encode(), digest_size=4).hexdigest()}"
        return (os.path.join(home, place), *(None for _ in options))

    def entered(self, step: int, resumed: int | None, state: _State) -> None:
        """Record the state a life begins with; a fresh start of a later life gets the state of the first life."""
        others = self._same_start(state) if resumed is None and step == 0 else []
        objects = [str(name) for name, value in state().items() if callable(getattr(value, "load_state_dict", None))]
        self._row("start", step, state, resumed=resumed, drawn_anew=others, objects=objects)

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of a step for its row."""
        if self._is_traced(step):
            self._metrics = {**self._metrics, **digests(metrics)}

    def boundary(self, step: int, state: _State, save: Callable[[], object]) -> None:
        """Record the state, save if that is planned, stop if that is planned."""
        row = self._row("boundary", step, state)
        if any(moment.is_at(row) for moment in self._plan.save):
            save()
        self._stop_at(row)

    def reported(self, step: int, metrics: Mapping[str, Any], state: _State) -> None:
        """Record metrics and state."""
        self._metrics = digests(metrics)
        self._stop_at(self._row("report", step, state))

    def mismatched(self, text: str) -> None:
        """Keep what the ledger says of the batch that comes now for the row of its step."""
        self._mismatch = self._mismatch or text

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Note the digest of each batch."""
        return _Noted(batches, self._batches)

    # ---- inside

    def _is_traced(self, step: int) -> bool:
        stop = self._plan.stop
        return step % self._plan.every == 0 or (stop is not None and step == stop.step)

    def _row(self, event: str, step: int, state: _State, **more: Any) -> dict[str, Any]:
        """Write a row; between the traced steps it is returned only."""
        info = current_ranks()
        row: dict[str, Any] = {
            "event": event, "run": self._run, "step": step, "nth": _COUNTER.next(self._run, event, step),
            "rank": info.rank, "world_size": info.world_size, "pid": os.getpid(), **more,
        }  # fmt: skip
        if event == "start" or self._is_traced(step):
            values = state()
            items = digests(values)
            if event == "boundary":
                items.update(self._beside(values))
            # Several batches make a step where gradients are gathered, none at the second boundary of a step.
            drawn, self._batches[:] = list(self._batches), []
            metrics, self._metrics = self._metrics, {}
            row.update(items=items, batches=drawn, metrics=metrics, mismatch=self._mismatch)
            name = f"life-{self._plan.life}.rank-{info.rank}.jsonl"
            with open(os.path.join(self._plan.trace, name), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return row

    def _beside(self, state: Mapping[Any, Any]) -> dict[str, str]:
        """Describe the modules that have the shape of one in the state and are not in it: averaged copies, say.

        Looking for them takes as long as there are objects, so it is done after 1, 2, 4, ... boundaries.
        """
        self._boundaries += 1
        if self._boundaries & (self._boundaries - 1) == 0:
            self._copies = [weakref.ref(one) for one in _copies(state)]
        alike: dict[str, list[str]] = defaultdict(list)
        for one in self._copies:
            if (module := one()) is not None:
                text = json.dumps(digests(module))
                alike[type(module).__name__].append(hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
        # Nothing says which of several is which, so their number is part of the name, and they are one item.
        return {
            f"{BESIDE}/{len(found)} x {name}" if len(found) > 1 else f"{BESIDE}/{name}": f"module[] {sorted(found)}"
            for name, found in alike.items()
        }

    def _same_start(self, state: _State) -> list[str]:
        """Begin as the first life began; return the names of items that differed, as they do without seeds.

        Only the state is put back: values that a script draws before it makes its `Checkpointer` and does not save
        stay different, as in every life of the script.
        """
        if self._plan.initial is None:
            return []
        key = hashlib.blake2b(self._run.encode(), digest_size=8).hexdigest()
        place = Path(self._plan.initial) / key
        shared = Path(f"{place}.rank-{current_ranks().rank}.json")
        mine = digests(state())
        if not shared.exists():
            save(place, state(), overwrite=True)
            shared.write_text(json.dumps(mine), encoding="utf-8")
            return []
        first = json.loads(shared.read_text(encoding="utf-8"))
        others = sorted(name for name in mine.keys() | first.keys() if mine.get(name) != first.get(name))
        if others:
            load(place, state(), strict=False)
        return others

    def _stop_at(self, row: Mapping[str, Any]) -> None:
        """Wait to be killed, if this is the planned end of this life."""
        stop = self._plan.stop
        if stop is None or not stop.is_at(dict(row)):
            return
        moment = {key: row[key] for key in ("pid", "rank", "world_size", "step")}
        with open(self._plan.signal, "wb", buffering=0) as pipe:
            pipe.write(json.dumps({**moment, "session": os.getsid(0)}).encode() + b"\n")
        with open(f"{self._plan.signal}.alive", "rb", buffering=0) as alive:
            alive.read()
        os._exit(3)  # the driver is gone, and with it the other end


def _copies(state: Mapping[Any, Any]) -> list[nn.Module]:
    """Return the modules with the weights' shapes of one in the state, and none of its weights."""
    inside = {id(part): part for one in _modules_in(state) for part in one.modules()}
    shapes = [_shapes(module) for module in inside.values()]
    own = {id(weight) for module in inside.values() for weight in module.parameters(recurse=False)}
    return [
        module
        for module in root_modules(stateful_objects())
        if id(module) not in inside and _shapes(module) in shapes and not own & {*map(id, module.parameters())}
    ]


def _modules_in(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _modules_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _modules_in(item)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the weights; a module without any is like no other."""
    return [tuple(weight.shape) for weight in module.parameters()] or [(id(module),)]


class _Noted:
    """Iterates over batches, and notes the digest of each when it is drawn."""

    def __init__(self, batches: Any, noted: list[str]) -> None:
        self._batches, self._noted = batches, noted
        self._drawing: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._drawing = iter(self._batches)
        return self

    def __next__(self) -> Any:
        if self._drawing is None:
            self._drawing = iter(self._batches)
        batch = next(self._drawing)
        text = json.dumps(digests(batch))
        self._noted.append(hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
