"""Transformers' Trainer with save_steps, resumed from `get_last_checkpoint`, as in its example scripts."""

import os

from _training import EVERY, STEPS, Net, Samples
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

arguments = TrainingArguments(
    output_dir="out", max_steps=STEPS, per_device_train_batch_size=4, save_strategy="steps", save_steps=EVERY,
    report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no", seed=0,
)  # fmt: skip
trainer = Trainer(model=Net(), args=arguments, train_dataset=Samples())
last = get_last_checkpoint("out") if os.path.isdir("out") else None
trainer.train(resume_from_checkpoint=last)
