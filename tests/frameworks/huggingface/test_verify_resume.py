"""`holdfast verify-resume` of a script with the framework's own trainer and its own checkpoints: no false verdict."""

from __future__ import annotations

import sys

import pytest

from holdfast.testing import ResumeDivergedError, assert_resumes

SCRIPT = """
import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16))
generator = torch.Generator().manual_seed(1)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 50, (48, 8), generator=generator)]
args = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=2, save_steps=5, report_to=[], use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train(resume_from_checkpoint=any(n.startswith("checkpoint") for n in os.listdir("out"))
              if os.path.isdir("out") else False)
"""


def test_a_trainer_that_resumes_is_exact(tmp_path):
    """`resume_from_checkpoint` of Transformers goes on in the middle of an epoch."""
    (tmp_path / "train.py").write_text(SCRIPT)
    assert assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1).lives[1].began


def test_a_trainer_that_keeps_only_its_model_is_named(tmp_path):
    """``save_only_model`` leaves out optimizer and scheduler, and the resume has neither."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("save_steps=5", "save_steps=5, save_only_model=True"))
    with pytest.raises(ResumeDivergedError, match="state of AdamW is lost"):
        assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1)


ACCELERATE = """
import os, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    epoch = batch = 0

    def state_dict(self):
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        self.epoch, self.batch = state["epoch"], state["batch"]


set_seed(0)
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=4, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)
if os.path.exists("out/last"):
    accelerator.load_state(os.path.realpath("out/last"))
while progress.epoch < 3:
    loader.set_epoch(progress.epoch)
    batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).pow(2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.batch += 1
        if progress.batch in (6, 12):
            name = f"step-{progress.epoch}-{progress.batch}"
            accelerator.save_state(f"out/{name}")
            if os.path.lexists("out/new"):
                os.remove("out/new")
            os.symlink(name, "out/new")
            os.replace("out/new", "out/last")
    progress.epoch, progress.batch = progress.epoch + 1, 0
"""


@pytest.mark.slow
def test_a_loop_with_accelerate_that_resumes_is_exact(tmp_path):
    """`save_state`, `load_state` and `skip_first_batches` go on in the middle of an epoch, with gathered gradients."""
    (tmp_path / "train.py").write_text(ACCELERATE)
    assert assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1).lives[1].began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        (
            "accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader", "loader",
            "in the middle of an epoch",
        ),
        # Each iterator of a DataLoader draws a seed: in a resumed life one more than in that which went through.
        ("torch.nn.ReLU()", "torch.nn.Dropout(0.1)", "the random numbers of torch are others"),
    ],
    ids=["skips nothing", "dropout"],
)  # fmt: skip
def test_a_loop_with_accelerate_that_does_not_is_named(tmp_path, right, wrong, named):
    """The interrupted epoch begins again, or goes on with other random numbers than those that were saved."""
    (tmp_path / "train.py").write_text(ACCELERATE.replace(right, wrong))
    with pytest.raises(ResumeDivergedError, match=named):
        assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1)
