"""What a resume of a `Trainer` does not bring back is said: in the first life, and where it is gone on from."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import tiny
import torch
from torch.utils.data import IterableDataset, WeightedRandomSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

import holdfast as hf
from holdfast.frameworks.trainer_resume import what_is_not_read, what_is_unsaved
from holdfast.transformers import HoldfastCallback

Said = Callable[..., list[str]]


@pytest.fixture
def said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Said:
    """Trains 4 steps, an epoch, or as told, saving each second; returns the warnings."""

    def train(
        change: Callable[[Trainer], None] = lambda trainer: None, *, callbacks: tuple[TrainerCallback, ...] = (),
        resume: bool = False, **options: Any,
    ) -> list[str]:  # fmt: skip
        caplog.clear()
        callback = HoldfastCallback(tmp_path / "run", keep=None)
        chosen: dict[str, Any] = {"max_steps": 4, "eval_strategy": "no", **options}
        trainer = tiny.make(tmp_path / "out", [callback, *callbacks], **chosen)
        change(trainer)
        with caplog.at_level(logging.WARNING, "holdfast.transformers"):
            trainer.train(resume_from_checkpoint=callback.latest() if resume else None)
        messages = [record.message for record in caplog.records if record.name == "holdfast.transformers"]
        return [message.removeprefix("holdfast: ") for message in messages]

    return train


def test_what_is_exact_is_not_warned_of(said: Said) -> None:
    """Nothing is said of a training that is exact, evaluates at its saves, and goes on in its second epoch."""
    assert said(eval_strategy="steps", max_steps=6) == []
    assert said(eval_strategy="steps", max_steps=8, resume=True) == []


def test_a_callback_is_given_once(said: Said) -> None:
    """Given twice it would keep each checkpoint twice, and see the trainer load batches that it does not."""

    def again(trainer: Trainer) -> None:
        [ours] = (one for one in trainer.callback_handler.callbacks if isinstance(one, HoldfastCallback))
        trainer.add_callback(ours)

    with pytest.raises(hf.ConfigError, match=r"callbacks twice .* give it once"):
        said(again)


class Rows(IterableDataset[Any]):
    """A stream of four batches, without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from tiny.data(16, 0)


def test_the_second_pass_of_a_stream(said: Said) -> None:
    """Transformers finds its place only in the first pass; the second is warned of, and so is a resume in it."""

    def stream(trainer: Trainer) -> None:
        trainer.train_dataset = Rows()

    assert said(stream, max_steps=4) == []
    [found] = said(stream, max_steps=6, resume=True)
    assert "begins again" in found
    assert "give it __len__" in found
    found = said(stream, max_steps=8, resume=True)[0]
    assert found.startswith("the position in the data is lost: step 6 was at epoch 1.333,")


class Masked:
    """A collator that draws what it masks."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __call__(self, rows: list[Any]) -> Any:
        self.draw()
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(
    ("draw", "name"), [(lambda: torch.rand(4), "torch"), (random.random, "python"), (torch.Generator, None)]
)
def test_random_numbers_of_loading(said: Said, draw: Callable[[], Any], name: str | None) -> None:
    """Batches made with the generators that training draws from are said, once."""

    def masked(trainer: Trainer) -> None:
        trainer.data_collator = Masked(draw)

    found = said(masked)
    assert [one.startswith(f"data are loaded with random numbers of {name} ") for one in found] == [True] * bool(name)
    assert said(masked, save_strategy="epoch") == [], "which is exact"


@pytest.mark.parametrize(
    "options", [{"train_sampling_strategy": "group_by_length"}, {"accelerator_config": {"use_seedable_sampler": False}}]
)
def test_an_order_from_the_generator_of_training(said: Said, options: dict[str, Any]) -> None:
    """An order that is drawn when an epoch begins, as of lengths that are grouped, is said before anything is saved."""
    [found] = said(max_steps=1, **options)
    assert "random numbers of torch" in found


def test_generators_of_samplers(said: Said) -> None:
    """A sampler whose own generator goes on from epoch to epoch is named, unless training ends in the first."""

    def weighted(trainer: Trainer) -> None:
        sampler = WeightedRandomSampler([1.0] * 16, 16, generator=torch.Generator())
        trainer._get_train_sampler = lambda dataset=None: sampler  # type: ignore[method-assign]

    assert said(weighted, max_steps=4) == []
    [found] = said(weighted, max_steps=6)
    assert found.startswith("WeightedRandomSampler draws from a generator of its own")


def test_settings_that_are_not_exact(said: Said) -> None:
    """Workers that stay and data that are not skipped are named."""
    [found] = said(dataloader_num_workers=1, dataloader_persistent_workers=True, max_steps=2)
    assert found.startswith("dataloader_persistent_workers=True: after a resume")
    [found] = said(ignore_data_skip=True, max_steps=2)
    assert found.startswith("ignore_data_skip=True: a resume in an epoch begins the epoch anew")
    [found] = said(dataloader_num_workers=1, max_steps=4, resume=True)
    assert found.startswith("what the workers of the loader draw at random")


def test_batches_that_rank_0_deals_out(said: Said) -> None:
    """Of what several processes were dealt of a map-style data set, a resume of Accelerate leaves out too little."""
    trainers: list[Trainer] = []
    assert said(trainers.append, accelerator_config={"dispatch_batches": True}, max_steps=1) == []
    [trainer] = trainers
    loader: Any = trainer.callback_handler.train_dataloader
    loader.state = SimpleNamespace(num_processes=2)
    [found] = what_is_not_read(trainer.args, trainer.state, loader)
    assert "a resume in an epoch leaves out 1 of 2, and trains the others again" in found
    loader.split_batches = True
    assert what_is_not_read(trainer.args, trainer.state, loader) == []


def test_early_stopping_begins_anew(said: Said) -> None:
    """The patience of `EarlyStoppingCallback` is saved and not read, unless transformers is told to."""
    options = {"eval_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    [found] = said(callbacks=(EarlyStoppingCallback(3),), **options)
    assert "the state of EarlyStoppingCallback is saved" in found
    assert said(callbacks=(EarlyStoppingCallback(3),), restore_callback_states_from_checkpoint=True, **options) == []


def test_what_trains_outside_of_the_model(said: Said) -> None:
    """Weights of a loss that the optimizer steps are in no checkpoint."""

    def loss(trainer: Trainer) -> None:
        trainer.create_optimizer()
        assert trainer.optimizer is not None
        trainer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 2))]})

    trainers: list[Trainer] = []
    [found] = said(lambda trainer: [loss(trainer), trainers.append(trainer)])  # type: ignore[func-returns-value]
    assert "the optimizer trains a tensor of shape (3, 2) outside of the model" in found
    [trainer] = trainers
    assert what_is_unsaved(trainer.args, trainer.state, SimpleNamespace(), trainer.optimizer, None) == [], "of SetFit"


class Projector:
    """Something in the state of an optimizer that is no tensor."""


class Projected(torch.optim.SGD):
    """An optimizer like GaLore's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["projector"] = Projector()
        return super().step(closure)


def test_what_optimizers_keep(said: Said) -> None:
    """State that the trainer does not save is named, and so is what it saves and does not read again."""

    def layer_by_layer(trainer: Trainer) -> None:
        trainer.optimizer = LayerWiseDummyOptimizer()

    [found] = said(layer_by_layer, max_steps=1)
    assert found.startswith("LayerWiseDummyOptimizer steps within the backward pass, and the trainer does not save")

    def projected(trainer: Trainer) -> None:
        trainer.optimizer = Projected(trainer.model.parameters())  # type: ignore[union-attr]

    [found] = said(projected)
    name = f"{__name__}.Projector"
    assert found.startswith(f"the optimizer keeps {name} in its state, and a resume of transformers fails at that")
    with torch.serialization.safe_globals([Projector]):
        assert said(projected, max_steps=6, resume=True) == []
    with pytest.raises(pickle.UnpicklingError, match="Projector"):
        said(projected, max_steps=8, resume=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own call
def test_what_trains_beside_an_adapter(said: Said) -> None:
    """Weights of the base that were unfrozen by hand are named, those of modules_to_save are not."""

    def adapted(trainer: Trainer, **options: Any) -> None:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, **options)
        trainer.model = peft.get_peft_model(trainer.model, config)  # type: ignore[arg-type]

    def by_hand(trainer: Trainer) -> None:
        adapted(trainer)
        for name, parameter in trainer.model.named_parameters():  # type: ignore[union-attr]
            parameter.requires_grad |= "ln_f" in name

    [found] = said(by_hand)
    assert found.startswith("base_model.model.transformer.ln_f.weight, base_model.model.transformer.ln_f.bias change ")
    assert said(lambda trainer: adapted(trainer, modules_to_save=["ln_f"], bias="lora_only")) == []

    def several(trainer: Trainer) -> None:
        adapted(trainer)
        model: Any = trainer.model
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        model.base_model.set_adapter(["default", "second"])

    [found] = said(several)
    assert "adapters ['default', 'second'] train together" in found


def test_what_trl_keeps_to_itself(said: Said) -> None:
    """A reference model that moves, and completions that are used for several steps."""

    def told(**options: Any) -> Callable[[Trainer], None]:
        def change(trainer: Trainer) -> None:
            for name, value in {"steps_per_generation": 1, "num_iterations": 1, **options}.items():
                setattr(trainer.args, name, value)  # as in a GRPOConfig

        return change

    assert said(told(num_iterations=2)) == []
    [found] = said(told(num_iterations=3))
    assert "save_steps=2 (x gradient_accumulation_steps=1) is no multiple of steps_per_generation x num_itera" in found
    [found] = said(told(sync_ref_model=True))
    assert "the trainer does not save the reference model" in found


def test_what_differs_after_a_resume(said: Said) -> None:
    """The loss that is logged first, and other data than before, are said where training goes on."""
    assert said(max_steps=2, logging_steps=3) == []
    [found] = said(max_steps=4, logging_steps=3, resume=True)
    assert found == "the first loss that is logged is the mean of 1 steps instead of 3"

    def more(trainer: Trainer) -> None:
        trainer.train_dataset = tiny.data(32, 0)

    found, _ = said(more, max_steps=6, resume=True)
    assert "give it the same data, batch size and number of processes" in found
