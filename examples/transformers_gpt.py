"""A small GPT-2, trained by Transformers' own `Trainer` on the source text of the Python library.

    python examples/transformers_gpt.py --out runs/gpt2 --steps 60

Kill it whenever you like and start it again: it goes on from the newest sound checkpoint. ``--out`` may be a URI, such
as s3://bucket/gpt2. With ``torchrun --nproc-per-node 2`` two processes train.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import transformers

import holdfast
from holdfast.transformers import HoldfastCallback

LENGTH = 64


def windows(count: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of text as bytes; what follows each byte is what is to be learnt."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20])
    pieces = torch.frombuffer(bytearray(text[: count * LENGTH]), dtype=torch.uint8).long().view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="the run: a directory or a URI; the same one again resumes")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    told = parser.parse_args()

    transformers.set_seed(1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir="trainer-output",  # scratch: the checkpoints that count are in --out
        use_cpu=not torch.cuda.is_available(),
        max_steps=told.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=told.every,
        save_steps=told.every,
        eval_strategy="steps",
        eval_steps=told.every,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    callback = HoldfastCallback(told.out, keep=holdfast.Keep(last=2, best=1, metric="eval_loss"))
    data = windows(640)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data[:600], eval_dataset=data[600:], callbacks=[callback]
    )
    start = callback.latest()
    print(f"going on from step {holdfast.Checkpoint(start).step}" if start else "a fresh start")
    trainer.train(resume_from_checkpoint=start)
    best = callback.best()
    if best is not None:
        print(f"the best is step {best.step}: {best.uri}, eval_loss {best.metrics['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
