"""The GPT of gpt.py on several processes, each with a copy of the model (DistributedDataParallel).

    torchrun --nproc-per-node 4 examples/ddp.py --out runs/ddp --steps 200

Kill it whenever you like and start it again, with the same number of processes or with another one: it goes on from
the last checkpoint, and within an epoch each sample is seen once, by whichever process. With GPUs each process takes
one, without them it trains on the CPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import holdfast
from gpt import BATCH, GPT, Windows, loss_of, make_optimizer, note, read_library


def train(arguments: argparse.Namespace, device: torch.device, parallel: Callable[[GPT], nn.Module]) -> None:
    """Train, or go on training; the loop is that of one process."""
    rank = dist.get_rank()
    torch.manual_seed(1234)
    model = parallel(GPT().to(device))
    optimizer, scheduler = make_optimizer(model, arguments.steps)
    torch.manual_seed(1234 + rank)  # from here on ranks draw other numbers: dropout differs
    windows = Windows(read_library())
    data = Subset(windows, range(min(arguments.windows, len(windows))))
    loader = DataLoader(data, arguments.batch, shuffle=True)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with holdfast.Checkpointer(arguments.out, state, every=arguments.every) as ck:
        for _ in ck.epochs(1000):
            for ids, inputs, targets in ck.batches(loader):  # the part of this rank
                if ck.global_step >= arguments.steps:
                    return  # this batch comes again, should the run go on: it was not trained
                loss = loss_of(model, inputs.to(device), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                note(arguments.trace, rank=rank, step=ck.global_step + 1, epoch=ck.epoch, ids=ids.tolist())
                ck.step(loss=loss)


def main(parallel: Callable[[GPT], nn.Module]) -> None:
    """Read the command line, join the other processes, train a model that ``parallel`` has made parallel."""
    parser = argparse.ArgumentParser()  # torchrun takes --run and --log for abbreviations of options of its own
    parser.add_argument("--out", required=True, help="directory of the run; the same one again resumes")
    parser.add_argument("--steps", type=int, default=200, help="steps to train")
    parser.add_argument("--every", default="25ba", help='how often to save: "25ba", "10min"')
    parser.add_argument("--batch", type=int, default=BATCH, help="samples in the batch of one process")
    parser.add_argument("--windows", type=int, default=1 << 40, help="use so many samples only")
    parser.add_argument("--trace", help="append one line of JSON for each trained step of each process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(arguments, device, parallel)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(DistributedDataParallel)
