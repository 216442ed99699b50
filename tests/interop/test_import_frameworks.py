"""Import and export against the real packages: Transformers, Accelerate, Lightning (where they are installed)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.testing import assert_state_equal

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict:
        ids = torch.arange(number, number + 8)
        return {"input_ids": ids, "labels": ids}


def test_transformers(tmp_path, monkeypatch) -> None:
    """from_pretrained opens an export; a checkpoint of the Trainer is taken over with its optimizer and its step."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    transformers = pytest.importorskip("transformers")
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, **ids)
    model = transformers.GPT2LMHeadModel(config)
    hf.save("ck", {"model": model})
    hf.export("ck", "out", to="hf", max_shard_size="10KB")
    config.save_pretrained("out")
    assert_state_equal(transformers.GPT2LMHeadModel.from_pretrained("out"), model)
    hf.import_checkpoint("out", "back")
    again = transformers.GPT2LMHeadModel(config)
    hf.load("back", {"model": again})
    assert_state_equal(again, model)

    def trainer(net: nn.Module) -> transformers.Trainer:
        options = {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        arguments = transformers.TrainingArguments("run", max_steps=3, save_steps=3, **options)
        return transformers.Trainer(model=net, args=arguments, train_dataset=Samples())

    first = trainer(model)
    first.train()
    done = hf.import_checkpoint("run/checkpoint-3", "taken")
    assert (done.format, done.checkpoint.step) == ("hf", 3)
    assert {"model", "optimizer", "scheduler", "trainer_state"} <= {name for name, _ in done.taken}
    optimizer = trainer(again).create_optimizer()
    hf.load("taken", {"model": again, "optimizer": optimizer}, only=["model", "optimizer"])
    assert_state_equal(again, model)
    trained = getattr(first.optimizer, "optimizer", first.optimizer)
    assert_state_equal(optimizer.state_dict()["state"], trained.state_dict()["state"])


def test_accelerate(tmp_path, monkeypatch) -> None:
    """A directory of save_state is taken over: model, optimizer, scheduler, states of generators."""
    monkeypatch.chdir(tmp_path)
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = accelerator.prepare(*made())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    accelerator.save_state("state")
    done = hf.import_checkpoint("state", "taken")
    assert (done.format, done.not_taken) == ("hf", ())
    keys = ("model", "optimizer", "scheduler")
    live = dict(zip(keys, made(), strict=True))
    hf.load("taken", live, only=list(keys))
    assert_state_equal(live["model"].state_dict(), accelerator.unwrap_model(model).state_dict())
    assert_state_equal(live["optimizer"].state_dict(), optimizer.optimizer.state_dict())


class _Options:
    """An object among the hyper-parameters."""


def test_lightning(tmp_path, monkeypatch) -> None:
    """A .ckpt with an object among its hyper-parameters is taken over, without that object."""
    monkeypatch.chdir(tmp_path)
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 3, options: object = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(width, 1)

        def training_step(self, batch, number):
            return self.net(batch[0]).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=4)
    module = Module(3, _Options())
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=str(tmp_path), **options)
    trainer.fit(module, data)
    done = hf.import_checkpoint(trainer.checkpoint_callback.best_model_path, "taken")
    assert (done.format, done.checkpoint.step) == ("lightning", 4)
    assert [path for path, _ in done.not_taken] == ["['hyper_parameters']['options']"]
    other = Module()
    (optimizer,), (scheduler,) = other.configure_optimizers()
    live = {"model": other, "optimizer": optimizer, "scheduler": scheduler}
    hf.load("taken", live, only=list(live))
    assert_state_equal(other.state_dict(), module.state_dict())
    assert_state_equal(optimizer.state_dict(), trainer.optimizers[0].state_dict())
    assert scheduler.last_epoch == 2
