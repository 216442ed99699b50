"""Observer: in any script whose resume is being verified, records each step of every torch optimizer.

It is loaded by `start/sitecustomize.py` into interpreters that need not have Holdfast, so it imports the standard
library alone, and torch once the script has imported it. It changes nothing that the script sees: it draws no random
numbers, and an error of its own ends the observation and not the script.

A row is written before each `Optimizer.step`: what was trained on (inputs of the model, batches of DataLoaders), with
what (weights, optimizer state, buffers, other modules, learning rates, generators), and the gradients. Values are
sampled by a fixed pattern, and summed whole as often as that costs no more than a fiftieth of the time. Rows are
appended with a single `write` each, so they survive SIGKILL.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import gc
import importlib.util
import json
import os
import random
import signal
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_SAMPLES = 16  # elements of each tensor in a row
_INPUT_SAMPLES = 64
_WHOLE_INPUT = 1 << 20  # inputs of up to so many elements are summed whole
_NUM_INPUTS = 16  # in a row
_NUM_GRADIENTS = 64
_NUM_NAMED = 256  # tensors that have a digest of their own in each row
_RAW = 48  # values kept as they are, to tell a rounded state from a lost one
_SHARE = 50  # whole sums may take this part of the time
_EARLY = 16  # steps that a script may make before it loads its checkpoint (`matching.EARLY`)
_F_SETSIG = 10  # of Linux' fcntl.h; `fcntl` does not name it


def start(path: str) -> None:
    """Observe this interpreter, as the plan at ``path`` says, from the moment it has imported torch."""
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    end_with(plan["signal"] + ".alive")
    if not plan.get("observe"):
        return
    seed = plan.get("seed")
    _once_imported("torch", lambda: Observer(plan).install())
    if seed is not None:
        random.seed(seed)
        _once_imported("numpy.random", lambda: sys.modules["numpy.random"].seed(seed))


def _once_imported(name: str, then: Callable[[], object]) -> None:
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


_CURRENT: list[Observer] = []


def stand_back() -> None:
    """Stop observing: a `Checkpointer` records the whole state (`holdfast.verify.witness`)."""
    for observer in _CURRENT:
        observer.off = True


def end_with(fifo: str) -> None:
    """Have the kernel end this process when nobody holds the other end of ``fifo`` any more: the verifier died."""
    import fcntl

    with contextlib.suppress(OSError):
        pipe = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


class _AfterImport:
    """A finder of modules that calls a function once a module is imported."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            with contextlib.suppress(Exception):
                self._then()

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


# ---- values as digests


def _flat(tensor: Any) -> Any:
    """Return all elements of a tensor in a row, as a view if its memory is dense."""
    if hasattr(tensor, "to_local"):  # a DTensor: the shard of this rank
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.is_sparse or tensor.layout is not sys.modules["torch"].strided:
        return tensor.to_dense().reshape(-1)
    return tensor.reshape(-1)


def _bits(flat: Any) -> Any:
    """Return the elements as integers of the same size, whose sum tells one changed bit."""
    torch = sys.modules["torch"]
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(kinds[flat.element_size()])


def _some(flat: Any, count: int) -> Any:
    return flat[:: max(1, flat.numel() // count)][:count]


def _bytes(tensors: Sequence[Any]) -> bytes:
    """Return the bytes of small tensors, copied from their device together."""
    torch = sys.modules["torch"]
    groups: dict[Any, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    parts = []
    for same in groups.values():
        joined = _bits(torch.cat(same) if len(same) > 1 else same[0].contiguous()).cpu()
        parts.append(joined.numpy().tobytes() if "numpy" in sys.modules else repr(joined.tolist()).encode())
    return b"".join(parts)


def _values(tensors: Sequence[Any]) -> str:
    """Return some of the values as they are."""
    torch = sys.modules["torch"]
    real = [_some(tensor, _RAW).float().cpu() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not real:
        return ""
    return base64.b64encode(_bytes([_some(torch.cat(real), _RAW).contiguous()])).decode()


class _Digest:
    """A digest of anything that a loader hands out or a model gets."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.number = 0

    def add(self, value: Any) -> None:
        torch = sys.modules["torch"]
        if isinstance(value, torch.Tensor):
            flat = _flat(value)
            self.number = zlib.crc32(f"{tuple(value.shape)}{value.dtype}".encode(), self.number)
            if flat.numel():
                self.parts.append(_some(flat, _INPUT_SAMPLES).clone())
                if flat.numel() <= _WHOLE_INPUT:
                    self.parts.append(_bits(flat).sum(dtype=torch.int64).reshape(1))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.add(item)
        elif hasattr(value, "items") and callable(value.items):
            for key, item in value.items():
                self.number = zlib.crc32(repr(key).encode(), self.number)
                self.add(item)
        elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
            self.number = zlib.crc32(value.tobytes(), self.number)
        elif isinstance(value, (str, bytes, int, float, bool, type(None))):
            self.number = zlib.crc32(repr(value).encode(), self.number)
        elif hasattr(value, "__dict__"):
            for key, item in vars(value).items():
                if isinstance(item, (torch.Tensor, list, tuple, dict, int, float, str)):
                    self.number = zlib.crc32(key.encode(), self.number)
                    self.add(item)

    def done(self) -> int:
        return zlib.crc32(_bytes(self.parts), self.number) if self.parts else self.number


class _Tensors:
    """A list of tensors that stay where they are, with views of the elements that are sampled."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._views: list[Any] = []
        self._sizes: list[int] = []
        self._alike = False  # all of 32 bits, of a device: their bytes lie in their order
        self._moved = False
        self._text = b""
        self.tensors: list[Any] = []

    def sample(self, tensors: list[Any]) -> int:
        """Return a digest of the samples."""
        if not tensors:
            return 0
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places, self.tensors = places, tensors
            # A copy would not follow the tensor: those are sampled anew each time.
            self._moved = any(not tensor.is_contiguous() for tensor in tensors)
            self._look()
        elif self._moved:
            self._look()
        self._text = _bytes(self._views)
        return zlib.crc32(self._text)

    def _look(self) -> None:
        float32 = sys.modules["torch"].float32
        self._views = [_some(_flat(tensor), _SAMPLES) for tensor in self.tensors]
        self._sizes = [4 * view.numel() for view in self._views]
        device = self._views[0].device
        self._alike = "numpy" in sys.modules and all(
            view.dtype is float32 and view.device == device for view in self._views
        )

    def each(self) -> list[int]:
        """Return a digest of the samples of each tensor."""
        if not self._alike:
            return [zlib.crc32(_bytes([view])) for view in self._views]
        ends, at = [], 0
        for size in self._sizes:
            ends.append(zlib.crc32(self._text[at : at + size]))
            at += size
        return ends

    def parts(self, counts: Sequence[int]) -> list[tuple[int, str]]:
        """Return digest and some values of the samples of successive groups of so many tensors."""
        found, at, first = [], 0, 0
        for count in counts:
            if self._alike:
                end = at + sum(self._sizes[first : first + count])
                text = self._text[at:end]
                step = 4 * max(1, len(text) // (4 * _RAW))
                raw = b"".join([text[place : place + 4] for place in range(0, len(text), step)][:_RAW])
                found.append((zlib.crc32(text), base64.b64encode(raw).decode()))
                at = end
            else:
                views = self._views[first : first + count]
                found.append((zlib.crc32(_bytes(views)), _values(views)))
            first += count
        return found

    def whole(self) -> list[int]:
        """Return the sum of each tensor."""
        torch = sys.modules["torch"]
        sums = [_bits(_flat(tensor)).sum(dtype=torch.int64) for tensor in self.tensors]
        return [int(number) for number in torch.stack([one.cpu() for one in sums]).tolist()] if sums else []


# ---- the observer


class _Trained:
    """What is known of one optimizer."""

    def __init__(self, optimizer: Any, number: int) -> None:
        self.number, self.kind = number, getattr(optimizer, "kind", type(optimizer).__name__)
        self.weights, self.others = _Tensors(), _Tensors()
        self.state = _Tensors()
        self.state_keys: dict[str, int] = {}  # how many tensors each key has
        self.other_tensors: list[Any] = []
        self.left: int | None = None  # the weights that its last step left


class _KerasOptimizer:
    """A Keras optimizer on torch, seen as one of torch: groups of weights, and a state for each weight.

    Args:
        optimizer: the one of Keras.
        variables: what it trains.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.kind, self.variables = type(optimizer).__name__, list(variables)
        self._optimizer = weakref.ref(optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        optimizer: Any = self._optimizer()
        return [{"params": [one.value for one in self.variables], "lr": float(optimizer.learning_rate)}]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """The variables of the optimizer, called by the last word of their names: momentum, velocity, iteration."""
        optimizer: Any = self._optimizer()
        weights = [one.value for one in self.variables]
        if not weights:
            return {}
        found: dict[Any, dict[str, Any]] = {weight: {} for weight in weights}
        count: dict[str, int] = {}
        for one in optimizer.variables:
            if one.path.endswith("learning_rate"):
                continue
            word = one.path.rpartition("/")[2].rpartition("_")[2]
            number = count[word] = count.get(word, -1) + 1
            found[weights[number % len(weights)]][f"{word}{number // len(weights) or ''}"] = one.value
        return found


class Observer:
    """Records the steps of the optimizers of this process.

    Args:
        plan: the plan of the life (`holdfast.verify.trace.LifePlan`), as read.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._file, self._pid, self._begun = -1, 0, 0.0
        self.off = False
        _CURRENT.append(self)
        self._num_rows = 0
        self._trained: weakref.WeakKeyDictionary[Any, _Trained] = weakref.WeakKeyDictionary()
        self._stack: list[int] = []
        self._open: dict[str, Any] | None = None
        self._inputs: list[_Digest] = []
        self._buffers: weakref.WeakKeyDictionary[Any, tuple[_Tensors, list[Any]]] = weakref.WeakKeyDictionary()
        self._buffers_before = 0
        self._batches: list[tuple[int, _Digest, int]] = []  # with their loader, and the number of its iterator
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_iterators = self._epoch = 0
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._schedulers: list[Any] = []
        self._scalers: list[Any] = []
        self._whole_at, self._whole_s = 0.0, 0.0
        self._spent_s = 0.0

    def install(self) -> None:
        """Hook into torch, which has just been imported."""
        optimizer = importlib.import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        self._wrap(optimizer.Optimizer, "__init__", self._made)
        self._follow_modules(sys.modules["torch"].nn.Module)
        loading = importlib.import_module("torch.utils.data.dataloader")
        self._follow(loading.DataLoader, loading._BaseDataLoaderIter)
        keras = "keras.src.optimizers.base_optimizer"
        _once_imported(keras, lambda: self._follow_keras(sys.modules[keras].BaseOptimizer))
        stateful = "torchdata.stateful_dataloader.stateful_dataloader"
        _once_imported(stateful, lambda: self._follow_stateful(sys.modules[stateful]))

    # ---- hooks

    def _guarded(self, work: Callable[[], object]) -> None:
        """Do a piece of work; an error ends the observation, and is recorded."""
        if self.off:
            return
        began = time.perf_counter()
        try:
            with sys.modules["torch"].no_grad():
                work()
        except Exception as error:  # noqa: BLE001 - an edge: the script is never at fault for the observer
            self.off = True
            with contextlib.suppress(Exception):
                self._write({"event": "error", "text": f"{type(error).__name__}: {error}"[:300]})
        self._spent_s += time.perf_counter() - began

    def _wrap(self, owner: Any, name: str, after: Callable[[Any], object]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            self._guarded(lambda: after(this))
            return result

        setattr(owner, name, wrapped)

    def _made(self, optimizer: Any) -> None:
        """Watch what goes into the modules whose weights an optimizer was made for."""
        ids = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for module in root_modules(stateful_objects()):
            mine = [module, *module.children()]
            if any(id(weight) in ids for weight in module.parameters()):
                for part in mine:
                    if any(id(weight) in ids for weight in part.parameters()):
                        self._watched.add(part)

    def _follow_modules(self, module_class: Any) -> None:
        """Have the calls of the watched modules noted; a hook in a module would be saved and copied with it."""
        torch = sys.modules["torch"]
        call, watched = module_class.__call__, self._watched

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and module in watched:
                self._before_forward(module, args, kwargs)
            return call(module, *args, **kwargs)

        module_class.__call__ = called

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        torch = sys.modules["torch"]
        if self.off or not torch.is_grad_enabled() or not module.training or len(self._inputs) >= _NUM_INPUTS:
            return

        def note() -> None:
            if not self._inputs:  # a forward changes buffers, so those before it are compared
                if module not in self._buffers:
                    self._buffers[module] = (_Tensors(), [one for one in module.buffers() if one.numel()])
                mine, buffers = self._buffers[module]
                self._buffers_before = mine.sample(buffers)
            digest = _Digest()
            digest.add(args)
            digest.add(kwargs)
            self._inputs.append(digest)

        self._guarded(note)

    def _follow_keras(self, kind: Any) -> None:
        """Note the steps of Keras' optimizers, which are none of torch."""
        if importlib.import_module("keras.src.backend").backend() != "torch":
            return
        seen: weakref.WeakKeyDictionary[Any, _KerasOptimizer] = weakref.WeakKeyDictionary()
        build, apply = kind.build, kind.apply

        def watched(optimizer: Any, variables: Sequence[Any]) -> None:
            seen[optimizer] = _KerasOptimizer(optimizer, variables)
            self._made(seen[optimizer])

        @functools.wraps(build)
        def built(optimizer: Any, variables: Any) -> Any:
            result = build(optimizer, variables)
            self._guarded(lambda: watched(optimizer, variables))
            return result

        @functools.wraps(apply)
        def applied(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            trainable_variables = None if trainable_variables is None else list(trainable_variables)
            if optimizer not in seen and trainable_variables is not None:  # its first step builds it
                self._guarded(lambda: watched(optimizer, trainable_variables))
            shown = seen.get(optimizer)
            if shown is not None:
                self._before_step(shown, (), {})
            result = apply(optimizer, grads, trainable_variables)
            if shown is not None:
                self._after_step(shown, (), {})
            return result

        kind.build, kind.apply = built, applied

    def _follow_stateful(self, module: Any) -> None:
        self._follow(module.StatefulDataLoader, module._StatefulBaseDataLoaderIter)

    def _follow(self, loader_class: Any, iterator_class: Any) -> None:
        """Note the batches that the loaders of a class hand out."""
        iterate, draw = loader_class.__iter__, iterator_class.__next__

        @functools.wraps(iterate)
        def iterated(loader: Any) -> Any:
            iterator = iterate(loader)
            with contextlib.suppress(Exception):
                if loader not in self._loaders:
                    self._loaders[loader] = len(self._loaders)
                    self._describe(loader)
                self._num_iterators += 1
                iterator._holdfast_loader = self._loaders[loader], self._num_iterators
            return iterator

        @functools.wraps(draw)
        def drawn(iterator: Any) -> Any:
            batch = draw(iterator)

            def note() -> None:
                digest = _Digest()
                digest.add(batch)
                loader, number = getattr(iterator, "_holdfast_loader", (-1, 0))
                self._batches.append((loader, digest, number))
                if len(self._batches) > 4 * _NUM_INPUTS:
                    del self._batches[: 2 * _NUM_INPUTS]

            self._guarded(note)
            return batch

        loader_class.__iter__ = iterated
        iterator_class.__next__ = drawn

    def _describe(self, loader: Any) -> None:
        sampler = getattr(loader, "sampler", None)
        self._write(
            {
                "event": "loader", "loader": self._loaders[loader], "kind": type(loader).__name__,
                "sampler": type(sampler).__name__, "dataset": type(loader.dataset).__name__,
                "workers": loader.num_workers, "persistent": loader.num_workers > 0 and loader.persistent_workers,
                "iterable": "Iterable" in type(sampler).__name__,
                "generator": getattr(sampler, "generator", None) is not None,
                "stateful": callable(getattr(loader, "state_dict", None)),
            }
        )  # fmt: skip

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stack:  # its last step ended with an error
            del self._stack[self._stack.index(id(optimizer)) :]
        self._stack.append(id(optimizer))
        if len(self._stack) == 1 and not _makes_state(optimizer):
            closure = any(callable(one) for one in [*args[1:], kwargs.get("closure")])
            self._guarded(lambda: self._row(optimizer, closure=closure))
            self._stop_here()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stack:
            del self._stack[self._stack.index(id(optimizer)) :]
        if self._stack:
            return
        if self._open is not None:
            row, self._open = self._open, None
            self._guarded(lambda: self._close(row, list(_weights(optimizer))))
        trained = self._trained.get(optimizer)
        if trained is not None and self._num_rows <= _EARLY:
            self._guarded(lambda: setattr(trained, "left", trained.weights.sample(list(_weights(optimizer)))))

    # ---- rows

    def _row(self, optimizer: Any, *, closure: bool) -> None:
        trained = self._trained.get(optimizer)
        if trained is None:
            trained = self._trained[optimizer] = _Trained(optimizer, len(self._trained))
            self._look_around(optimizer, trained)
        if self._batches:  # not where an iterator ends: it may be asked ahead, or never be drawn to its end
            self._epoch = max(self._epoch, self._batches[-1][2])
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        sample = trained.weights.sample(weights)
        ((_, raw),) = trained.weights.parts([len(weights)])
        row: dict[str, Any] = {
            "n": self._num_rows, "o": trained.number, "now": time.time(),
            "w": sample, "wv": raw, "was": trained.left if self._num_rows <= _EARLY else None,
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "opt": _options(optimizer),
            "e": trained.others.sample(trained.other_tensors), "en": len(trained.other_tensors),
            "ee": trained.others.each() if 0 < len(trained.other_tensors) <= _NUM_NAMED else None,
            "r": self._generators(), "ep": self._epoch,
        }  # fmt: skip
        if len(weights) <= _NUM_NAMED:
            row["each"] = trained.weights.each()
        row["s"], row["sv"] = self._state(optimizer, weights, trained)
        schedulers = [one() for one in self._schedulers]
        row["sched"] = [one.last_epoch for one in schedulers if one is not None]
        scales = [one() for one in self._scalers]
        row["scale"] = [
            float(one._scale) for one in scales if one is not None and one._scale is not None and one._scale.is_cpu
        ]
        began = time.perf_counter()
        if began - self._whole_at > _SHARE * self._whole_s or self._num_rows < 2 or self._plan.get("whole"):
            row["whole"] = self._whole(trained)
            self._whole_at = time.perf_counter()
            self._whole_s = self._whole_at - began
        if not closure:
            self._close(row, weights)
        elif self._num_rows == self._plan.get("kill_at"):
            self._close({**row, "open": True}, weights)
        else:
            self._open = row  # forward and backward come within the step

    def _close(self, row: dict[str, Any], weights: list[Any]) -> None:
        """Write a row with what the step is made of: its data and gradients, which a closure makes within the step."""
        row.update(
            b=self._buffers_before, g=self._gradients(weights), gn=sum(one.grad is not None for one in weights),
            x=[digest.done() for digest in self._inputs],
            d=[[loader, digest.done()] for loader, digest, _ in self._batches[-_NUM_INPUTS:]],
        )  # fmt: skip
        self._inputs, self._batches = [], []
        self._write(row)
        os.utime(self._file)  # inotify takes two events of one kind for one: this is another (`workplace.OutputWatch`)
        self._num_rows += 1

    def _gradients(self, weights: list[Any]) -> int:
        have = [weight.grad for weight in weights if weight.grad is not None]
        have = have[:: max(1, len(have) // _NUM_GRADIENTS)][:_NUM_GRADIENTS]
        return zlib.crc32(_bytes([_some(_flat(gradient), _SAMPLES) for gradient in have if gradient.numel()]))

    def _generators(self) -> dict[str, int]:
        torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
        state = random.getstate()  # the hash of integers is the same in each process
        found = {
            "python": hash((state[1], state[2] or 0.0)) & 0xFFFFFFFF,
            "torch": zlib.crc32(_bytes([torch.get_rng_state()])),
        }
        if numpy is not None and "numpy.random" in sys.modules:
            kind, words, *rest = numpy.random.get_state()
            found["numpy"] = zlib.crc32(words.tobytes(), zlib.crc32(repr((kind, *rest)).encode()))
        if torch.cuda.is_initialized():
            found["cuda"] = zlib.crc32(_bytes([torch.cuda.get_rng_state()]))
        return found

    def _state(self, optimizer: Any, weights: list[Any], trained: _Trained) -> tuple[dict[str, int], dict[str, str]]:
        torch = sys.modules["torch"]
        tensors: dict[str, list[Any]] = {}
        plain: dict[str, list[Any]] = {}
        states = optimizer.state  # one of Keras makes it anew each time
        for weight in weights:
            state = states.get(weight)
            for key, value in (state or {}).items():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(str(key), []).append(value)
                elif isinstance(value, (int, float, bool, str)):
                    plain.setdefault(str(key), []).append(value)
        digests = {key: zlib.crc32(repr(values).encode()) for key, values in plain.items()}
        trained.state_keys = {key: len(many) for key, many in tensors.items()}
        if not tensors:
            trained.state = _Tensors()
            return digests, {}
        trained.state.sample([tensor for many in tensors.values() for tensor in many])
        parts = dict(zip(tensors, trained.state.parts(list(trained.state_keys.values())), strict=True))
        digests.update({key: digest for key, (digest, _) in parts.items()})
        return digests, {key: raw for key, (_, raw) in parts.items()}

    def _whole(self, trained: _Trained) -> dict[str, Any]:
        sums, state, at = trained.state.whole(), {}, 0
        for key, count in trained.state_keys.items():
            state[key] = zlib.crc32(repr(sums[at : at + count]).encode())
            at += count
        return {
            "w": zlib.crc32(repr(trained.weights.whole()).encode()),
            "s": state,
            "e": zlib.crc32(repr(trained.others.whole()).encode()),
        }

    def _look_around(self, optimizer: Any, trained: _Trained) -> None:
        """Find, once for an optimizer, the names of its weights, their buffers, and what else a step may change."""
        torch = sys.modules["torch"]
        ids = {id(weight): number for number, weight in enumerate(_weights(optimizer))}
        names = [""] * len(ids)
        mine: set[int] = set()
        objects = stateful_objects()
        roots = root_modules(objects)
        anywhere = {id(weight) for one in self._trained for weight in _weights(one)}
        for module in roots:
            for name, weight in module.named_parameters():
                if id(weight) in ids:
                    names[ids[id(weight)]] = name
                    mine.add(id(module))
        for module in roots:
            own = [weight for weight in module.parameters() if id(weight) not in anywhere and weight.numel()]
            if own and not any(id(weight) in anywhere for weight in module.parameters()):
                trained.other_tensors += own
        kinds = [type(module).__name__ for module in roots if id(module) in mine]
        for one in objects:
            if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
                self._schedulers.append(weakref.ref(one))
            elif isinstance(one, torch.amp.GradScaler):
                self._scalers.append(weakref.ref(one))
        self._write(
            {
                "event": "optimizer", "o": trained.number, "kind": trained.kind, "names": names[:_NUM_NAMED],
                "modules": kinds, "others": len(trained.other_tensors), "schedulers": len(self._schedulers),
                "pid": os.getpid(), "rank": _rank(), "world_size": _world_size(),
            }
        )  # fmt: skip

    def _write(self, row: dict[str, Any]) -> None:
        if self._pid != os.getpid():  # the first row, or the first one in a fork
            self._pid, self._begun, self._num_rows = os.getpid(), time.perf_counter(), 0
            name = f"life-{self._plan['life']}.rank-{_rank()}.pid-{self._pid}.steps"
            place = os.path.join(self._plan["trace"], name)
            self._file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            atexit.register(self._end)
        os.write(self._file, json.dumps(row).encode() + b"\n")

    def _end(self) -> None:
        """Note that the process ends by itself, with the weights it leaves."""
        if self._pid != os.getpid() or self.off:
            return
        took = time.perf_counter() - self._begun
        left = {
            str(trained.number): trained.weights.sample(list(_weights(optimizer)))
            for optimizer, trained in list(self._trained.items())
        }
        self._write({"event": "end", "w": left, "spent_s": round(self._spent_s, 4), "seconds": round(took, 4)})

    def _stop_here(self) -> None:
        """Say that this process has come to the step where it shall be killed, and wait for that."""
        stop = self._plan.get("kill_at")
        if self.off or stop is None or self._num_rows != stop + 1:
            return
        moment = {"pid": os.getpid(), "rank": _rank(), "world_size": _world_size(), "step": stop}
        with open(self._plan["signal"], "wb", buffering=0) as pipe:
            pipe.write(json.dumps({**moment, "session": os.getsid(0)}).encode() + b"\n")
        go = self._plan["signal"] + ".go"
        while not (self._plan.get("gentle") and os.path.exists(go)):
            time.sleep(0.01)


def _makes_state(optimizer: Any) -> bool:
    """Tell whether torch's `get_state_dict` makes this step, without gradients, to have a state that can be loaded."""
    frame = None if isinstance(optimizer, _KerasOptimizer) or optimizer.state else sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


def _weights(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _options(optimizer: Any) -> dict[str, list[Any]]:
    """Return the numbers that the groups of an optimizer have beside the learning rate: weight_decay, betas."""
    found: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            parts = value if isinstance(value, (tuple, list)) else (value,)
            are_numbers = 0 < len(parts) < 5 and all(type(part) in (int, float) for part in parts)
            if are_numbers and name not in ("params", "lr"):
                found.setdefault(str(name), []).append(value)
    return found


def stateful_objects() -> list[Any]:
    """Return everything with a ``state_dict``: modules, schedulers, scalers; hundreds of thousands are looked at."""
    known: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        saved = known.get(kind)
        if saved is None:
            saved = known[kind] = hasattr(kind, "state_dict")
        if saved:
            found.append(one)
    return found


def root_modules(objects: list[Any]) -> list[Any]:
    """Return the modules that are no part of another one."""
    torch = sys.modules["torch"]
    modules = [one for one in objects if issubclass(type(one), torch.nn.Module) and "_modules" in vars(one)]
    inside = {id(part) for module in modules for part in module._modules.values()}
    return [module for module in modules if id(module) not in inside]


def _rank() -> int:
    return int(os.environ.get("RANK") or _distributed("get_rank", 0))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or _distributed("get_world_size", 1))


def _distributed(name: str, otherwise: int) -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return otherwise
    return int(getattr(distributed, name)())
