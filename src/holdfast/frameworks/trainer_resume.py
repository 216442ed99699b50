"""What a resume of a `transformers.Trainer` from its own checkpoints does not bring back, as far as a callback sees it.

`what_is_unsaved` and `what_is_not_read` look at settings and objects when training begins, `resumed_otherwise` at the
checkpoint from which it goes on. `LoadingWatch` finds out, while training goes on, whether loading draws from the
generators that training draws from.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from holdfast._optional import require
from holdfast._units import listed
from holdfast.errors import ConfigError

_SHOWN = 3
_SEEDS = 4  # that iterators of other loaders draw: of an evaluation after the save, say
_SHARDED = {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"}
_STATELESS = {"LayerWiseDummyOptimizer", "AdaLomo"}  # as their state_dict says, for all that they keep
_PLAIN = {"builtins", "collections", "torch"}
_ROUNDING = 1e-6
_REPEAT = "let the stream repeat itself (datasets: repeat(None)), or give it __len__"


def what_is_unsaved(args: Any, state: Any, model: Any, optimizer: Any, loader: Any) -> list[str]:
    """List what trains and is in no checkpoint of the trainer.

    Args:
        args: the `TrainingArguments`, or those of a trainer built on `transformers.Trainer` (TRL).
        state: of the trainer.
        model: what the trainer saves.
        optimizer: what the trainer steps.
        loader: of the training data.
    """
    return [*_unsaved_weights(args, model, optimizer), *_unsaved_generators(loader, num_epochs=state.num_train_epochs)]


def _unsaved_weights(args: Any, model: Any, optimizer: Any) -> list[str]:
    found = []
    if foreign := _foreign(model, optimizer):
        found.append(
            f"the optimizer trains {_shown(foreign)} outside of the model (of a loss, say), which the "
            "trainer does not save: they begin anew after a resume; make them part of the model, or save them yourself"
        )
    if outside := _outside_of_adapters(args, model):
        found.append(
            f"{_shown(outside)} change in training and are no part of what PEFT stores of an adapter: the trainer does "
            "not save them, and they begin anew after a resume; name modules of the base in modules_to_save=[...]"
        )
    if _is_peft(model) and len(active := list(model.active_adapters)) > 1:
        found.append(
            f"adapters {active} train together: transformers resumes only the first, and then fails at the state of "
            "the optimizer; train one at a time, or in a loop of your own (holdfast.Checkpointer)"
        )
    if (kind := type(getattr(optimizer, "optimizer", optimizer)).__name__) in _STATELESS:
        found.append(
            f"{kind} steps within the backward pass, and the trainer does not save its moments: they begin anew after "
            "a resume; choose an optim= that steps behind it"
        )
    if getattr(args, "sync_ref_model", False):
        found.append(
            "sync_ref_model=True: the trainer does not save the reference model, so it is the first one again after a "
            "resume, and the loss another; save trainer.ref_model yourself (docs/transformers.md)"
        )
    return found


def _unsaved_generators(loader: Any, *, num_epochs: int) -> list[str]:
    found = []
    collator: Any = getattr(loader, "collate_fn", None)
    collator = getattr(collator, "data_collator", collator)
    if hasattr(collator, "generator") and (seed := getattr(collator, "seed", None)) is not None:
        found.append(
            f"{type(collator).__name__}(seed={seed}) draws from a generator of its own, which the trainer "
            "does not save: after a resume it begins anew, and batches are masked as at the start"
        )
    for sampler in samplers_of(loader) if num_epochs > 1 else ():  # the first order is that of a new generator
        if isinstance(getattr(sampler, "generator", None), torch.Generator) and not hasattr(sampler, "set_epoch"):
            found.append(
                f"{type(sampler).__name__} draws from a generator of its own, which the trainer does not save: after "
                "the first epoch a resume has another order; let its set_epoch(epoch) seed the generator"
            )
    return found


def what_is_not_read(args: Any, state: Any, loader: Any) -> list[str]:
    """List the settings under which a resume goes on in another way than training without it."""
    found = []
    if (num_parts := _dispatched(loader)) > 1 and not _saves_between_epochs(args):
        found.append(
            f"dispatch_batches=True with {num_parts} processes: of the batches that were trained a resume in an epoch "
            f"leaves out 1 of {num_parts}, and trains the others again; leave it out, set split_batches=True, or save "
            "at ends of epochs (save_strategy='epoch')"
        )
    if getattr(args, "ignore_data_skip", False):
        found.append("ignore_data_skip=True: a resume in an epoch begins the epoch anew, with the same data again")
    if getattr(args, "dataloader_persistent_workers", False) and args.dataloader_num_workers:
        found.append(
            "dataloader_persistent_workers=True: after a resume random numbers (dropout) are others from the next "
            "epoch on; leave it out"
        )
    exported = sorted(name for name in state.stateful_callbacks or {} if name != "TrainerControl")
    if exported and not getattr(args, "restore_callback_states_from_checkpoint", False):
        found.append(
            f"the state of {', '.join(exported)} is saved, but a resume does not read it, and begins with a new one: "
            "set restore_callback_states_from_checkpoint=True"
        )
    every = (getattr(args, "steps_per_generation", None) or 0) * (getattr(args, "num_iterations", None) or 1)
    taken = state.save_steps * args.gradient_accumulation_steps if every else 0
    if every and strategy_name(args.save_strategy) == "steps" and taken % every:
        found.append(
            f"save_steps={state.save_steps:g} (x gradient_accumulation_steps={args.gradient_accumulation_steps}) is no "
            f"multiple of steps_per_generation x num_iterations={every}: completions in use are not saved, so a "
            "resume generates others; choose such a multiple"
        )
    return found


def resumed_otherwise(args: Any, state: Any, loader: Any) -> list[str]:
    """List what is not as it was without the interruption in a training that goes on from ``state.global_step``."""
    step = state.global_step
    if not step or getattr(args, "ignore_data_skip", False):
        return []
    found, epoch, length = [], state.epoch or 0.0, _length(loader)
    parts = args.gradient_accumulation_steps
    in_epoch = state.max_steps if length is None else max(1, -(-length // parts))
    where = step / in_epoch
    if length is None:
        is_lost = epoch > 1 + _ROUNDING  # one pass is as long as training was to be
        what_to_do = f"it finds its place only in the first pass over a stream without a length; {_REPEAT}"
    else:
        where = step // in_epoch + min(step % in_epoch * parts / max(1, length), 1.0)
        is_lost = abs(where - epoch) > _ROUNDING
        what_to_do = "give it the same data, batch size and number of processes"
    if is_lost:
        found.append(
            f"the position in the data is lost: step {step} was at epoch {epoch:.4g}, and the trainer goes on at epoch "
            f"{where:.4g}: {what_to_do}"
        )
    elif step % in_epoch and getattr(args, "dataloader_num_workers", 0):
        found.append(
            "what the workers of the loader draw at random (masks, augmentation), if anything, differs until the next "
            "epoch begins"
        )
    if strategy_name(args.logging_strategy) == "steps" and (since := int(step % state.logging_steps)):
        found.append(
            f"the first loss that is logged is the mean of {int(state.logging_steps) - since} steps instead of "
            f"{int(state.logging_steps)}"
        )
    return found


class LoadingWatch:
    """Finds what in the loading of data a resume cannot repeat: its random numbers, and a stream's second pass.

    The trainer loads batches between the end of a step and the begin of the next. A resume sets the generators only
    when it has loaded the first batch, so what is drawn there is not drawn again.
    """

    def __init__(self) -> None:
        self._before: _Generators | None = None
        self._num_seeds = 0  # that may be drawn until the step begins
        self._epochs = 0
        self._is_exact = False  # checkpoints between epochs hold what loading draws from
        self._said: set[str] = set()
        self._state: Any = None  # of the training

    def trains(self, args: Any, state: Any) -> None:
        """Note that a training begins, with these `TrainingArguments`.

        Raises:
            ConfigError: it has begun before.
        """
        if state is self._state:
            raise ConfigError(
                "this callback is among the trainer's callbacks twice (callbacks=[...] and add_callback?), and would "
                "keep each checkpoint twice: give it once"
            )
        self._state = state
        self._before, self._epochs, self._is_exact = None, 0, _saves_between_epochs(args)

    def saved(self, optimizer: Any) -> str | None:
        """Note that a checkpoint was saved; batches are loaded next. Return, once, that it cannot be read again."""
        self._before, self._num_seeds = _Generators(), _SEEDS
        if not (kinds := _refused(optimizer)):
            return None
        names = listed((f"{kind.__module__}.{kind.__qualname__}" for kind in kinds), _SHOWN)
        return self._once(
            f"the optimizer keeps {names} in its state, and a resume of transformers fails at that: call "
            f"torch.serialization.add_safe_globals([{names}]) before trainer.train()"
        )

    def epoch_begins(self, loader: Any, *, step: int) -> str | None:
        """Return, once, that a stream begins again, in which a resume does not find its place.

        Args:
            loader: of the training data.
            step: the last one that was trained.
        """
        self._epochs += 1
        resumed = self._epochs == 1 and step > 0  # the trainer sets the generators, after the first batch
        self._before, self._num_seeds = None if resumed else _Generators(), 1
        if self._epochs == 1 or _length(loader) is not None:
            return None
        return self._once(
            "the stream of training data has ended and begins again: a resume from a checkpoint that follows does not "
            f"find its place in it; {_REPEAT}"
        )

    def step_begins(self) -> str | None:
        """Return, once, that loading has drawn from the generators of training."""
        before, self._before = self._before, None
        drawn = before.drawn(num_seeds=self._num_seeds) if before is not None else []
        if not drawn or self._is_exact:
            return None
        return self._once(
            f"data are loaded with random numbers of {' and '.join(drawn)} (masks, augmentation, an order): a resume "
            "in an epoch draws others; save at ends of epochs (save_strategy='epoch'), or draw them from generators "
            "that are seeded with the epoch or the sample"
        )

    def _once(self, said: str) -> str | None:
        if said in self._said:
            return None
        self._said.add(said)
        return said


class _Generators:
    """The states of the generators of a process, at one moment."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy: Any = np.random.get_state()
        self.torch = torch.get_rng_state()

    def drawn(self, *, num_seeds: int) -> list[str]:
        """Name the generators that were drawn from since; torch itself draws a seed for each iterator of a loader."""
        now = _Generators()
        is_same = {
            "python": self.python == now.python,
            "numpy": self.numpy[2:] == now.numpy[2:] and np.array_equal(self.numpy[1], now.numpy[1]),
            "torch": self._only_seeds(now, num_seeds),
        }
        return [name for name, same in is_same.items() if not same]

    def _only_seeds(self, now: _Generators, num_seeds: int) -> bool:
        generator = torch.Generator()
        generator.set_state(self.torch)
        for _ in range(num_seeds):
            if torch.equal(generator.get_state(), now.torch):
                return True
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return torch.equal(generator.get_state(), now.torch)


def strategy_name(strategy: Any) -> str:
    """Return the text of a strategy of the arguments, an enum or its value."""
    return str(getattr(strategy, "value", strategy))


def _saves_between_epochs(args: Any) -> bool:
    return strategy_name(args.save_strategy) == "epoch"


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _dispatched(loader: Any) -> int:
    """Return the number of parts in which rank 0 deals out its batches; 0 where a resume counts them right."""
    counts_right = getattr(loader, "split_batches", True) or isinstance(loader.dataset, IterableDataset)
    return 0 if type(loader).__name__ != "DataLoaderDispatcher" or counts_right else int(loader.state.num_processes)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, each around the next, from the outermost."""
    found: list[Any] = []
    one = getattr(loader, "batch_sampler", None)
    while one is not None and all(one is not other for other in found):
        found.append(one)
        one = getattr(one, "batch_sampler", None) or getattr(one, "sampler", None)
    return found


def _foreign(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Return what the optimizer trains and the model does not have; nothing where an engine has tensors of its own."""
    if not isinstance(model, torch.nn.Module) or optimizer is None:  # SetFit hands on what holds the module
        return []
    own = {id(parameter) for parameter in model.parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in trained if id(parameter) not in own]
    return foreign if len(foreign) < len(trained) else []


def _refused(optimizer: Any) -> list[type]:
    """Return the classes in the state of an optimizer that ``torch.load(weights_only=True)`` does not read."""
    values = [value for state in getattr(optimizer, "state", {}).values() for value in state.values()]
    kinds = {type(value) for value in values if not isinstance(value, torch.Tensor)}
    kinds -= {one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals()}
    return sorted((kind for kind in kinds if kind.__module__ not in _PLAIN), key=lambda kind: kind.__qualname__)


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _outside_of_adapters(args: Any, model: Any) -> list[str]:
    """Name what of a PEFT model changes in training and is no part of its adapters, which alone the trainer saves."""
    in_pieces = getattr(args, "deepspeed", None) or getattr(args, "fsdp", None) or _SHARDED & os.environ.keys()
    if in_pieces or not _is_peft(model):
        return []
    peft = require("peft", extra="transformers", purpose="a Trainer of a PEFT model")
    saved = {
        tensor.data_ptr()
        for name in model.peft_config
        for tensor in peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False).values()
    }
    for module in model.modules():  # PEFT itself decides when to save them
        if isinstance(module, torch.nn.Embedding):
            saved.add(module.weight.data_ptr())
    changing = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            changing.append((f"{name}.running_mean", module.running_mean))
    return [name for name, tensor in changing if tensor.data_ptr() not in saved]


def _shown(found: Sequence[Any]) -> str:
    return listed((one if isinstance(one, str) else f"a tensor of shape {tuple(one.shape)}" for one in found), _SHOWN)
