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
