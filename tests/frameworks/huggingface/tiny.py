"""A tiny GPT-2 with random weights, trained by `transformers.Trainer`: in this process, by ranks, or killed."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import holdfast as hf
from holdfast.transformers import HoldfastCallback, ReportCallback, prepare_trainer

STEPS = 8


def data(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def make(folder: Path, callbacks: list[TrainerCallback], **options: Any) -> Trainer:
    """A trainer that saves and evaluates every 2 of 8 steps (2 epochs), with dropout: random numbers matter."""
    transformers.set_seed(3)
    torch.set_num_threads(1)  # sums are the same in every process
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    chosen = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "logging_steps": 1, "learning_rate": 1e-2,
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
        per_device_train_batch_size=4, **{**chosen, **options},
    )  # fmt: skip
    return Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=data(16, 0), eval_dataset=data(8, 1), callbacks=callbacks
    )


def weights(trainer: Trainer) -> dict[str, list[Any]]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.tolist() for name, value in model.state_dict().items()}


class KillAfterSave(TrainerCallback):
    """Ends this process as hard as the kernel can, right after the callbacks before it have seen a save.

    Args:
        step: of the save.
        keeping: whose writer process is ended first: an upload under way is cut off.
    """

    def __init__(self, step: int, keeping: HoldfastCallback | None = None) -> None:
        self.step, self.keeping = step, keeping

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if self.keeping is not None:
                session = self.keeping.keeper._session
                assert session is not None
                assert session.client.process_id is not None
                os.kill(session.client.process_id, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(trainer: Trainer, step: int) -> None:
    """End this process when `Trainer` has written the weights of a step, and nothing else."""
    save = trainer._save_optimizer_and_scheduler

    def killed(folder: str) -> None:
        if trainer.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        save(folder)

    trainer._save_optimizer_and_scheduler = killed


def reported(config: dict[str, Any]) -> None:
    """The ``train_func`` of the function trainer; the first life ends after the save of step ``kill_after``."""
    delete = config.get("delete", False)
    callbacks: list[TrainerCallback] = [ReportCallback(delete_local_checkpoint_after_upload=delete)]
    checkpoint = hf.get_checkpoint()
    if checkpoint is None and config.get("kill_after"):
        callbacks.append(KillAfterSave(config["kill_after"]))
    trainer = prepare_trainer(make(Path(config["folder"]), callbacks, **config.get("options", {})))
    with checkpoint.as_directory() if checkpoint else contextlib.nullcontext() as directory:
        trainer.train(resume_from_checkpoint=directory and os.path.join(directory, ReportCallback.CHECKPOINT_NAME))
    if hf.get_context().get_world_rank() == 0:
        Path(config["result"]).write_text(json.dumps({"weights": weights(trainer)}))


def main() -> None:
    """``tiny.py '{"run": ..., "folder": ..., "result": ..., "kill_after": 4, "kill_in": 6}'``: a plain trainer."""
    faulthandler.dump_traceback_later(150, exit=True)  # before `run_script` loses patience
    told = json.loads(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    callbacks: list[TrainerCallback] = []
    if told.get("run"):
        callbacks.append(HoldfastCallback(told["run"], keep=hf.Keep(last=1, best=1, metric="eval_loss")))
    if told.get("kill_after"):
        callbacks.append(KillAfterSave(told["kill_after"], callbacks[0] if told.get("kill_writer") else None))
    trainer = make(Path(told["folder"]), callbacks, **told.get("options", {}))
    if told.get("kill_in"):
        kill_in_save(trainer, told["kill_in"])
    start = callbacks[0].latest() if told.get("run") else None
    trainer.train(resume_from_checkpoint=start)
    if rank == 0:
        Path(told["result"]).write_text(json.dumps({"start": start, "weights": weights(trainer)}))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if not told.get("run") and "WORLD_SIZE" in os.environ:
        from hf_kit import leave_at_once

        leave_at_once()


if __name__ == "__main__":
    main()
