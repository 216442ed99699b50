"""Bytes written per save when 90 % of the parameters are frozen."""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast as hf

from .bench import Context, Goal, Outcome, remove
from .states import gpt2_state

__all__ = ["run"]

_SAVES = 12  # linked files are rewritten at every 10th save, which shows in the samples


def run(context: Context) -> Outcome:
    """Save a partly frozen model again and again; count the bytes that each save writes."""
    outcome = Outcome()
    state = gpt2_state(scale=context.scale, quick=context.quick, frozen=0.9)
    trained = {name.partition(".")[2] for name in state.tensors if name.startswith("exp_avg.")}
    changing = {name for name in state.tensors if name.partition(".")[2] in trained}
    changed = sum(state.tensors[name].nbytes for name in changing)
    parameters = sum(tensor.nbytes for name, tensor in state.tensors.items() if name.startswith("model."))
    frozen = sum(t.nbytes for name, t in state.tensors.items() if name not in changing)
    root = context.folder("frozen")
    written = []
    with hf.Checkpointer(root, state.objects, every=1, keep=hf.Keep(last=2)) as ck:
        before = 0
        for number in range(4 if context.quick else _SAVES):
            state.touch(changing)
            ck.step()
            ck.wait()
            written.append(ck.stats.bytes_written - before)
            before = ck.stats.bytes_written
            outcome.add("holdfast", bytes_written=written[-1], over_changed=written[-1] / changed)
            context.say(f"save {number + 1}: {written[-1] / 1e6:.1f} MB, {changed / 1e6:.1f} MB changed")
    remove(root)
    whole = _torch_save_bytes(context, state.tensors)
    outcome.add("torch.save", bytes_written=whole, over_changed=whole / changed)
    outcome.ratios["frozen share of the parameters"] = frozen / parameters
    outcome.goals.append(Goal(what="third save: bytes written / changed", value=written[2] / changed, at_most=1.02))
    for number, value in enumerate(written):
        if number != 2:
            outcome.goals.append(Goal(what=f"save {number + 1}: bytes written / changed", value=value / changed))
    outcome.goals.append(Goal(what="torch.save: bytes written / changed", value=whole / changed))
    return outcome


def _torch_save_bytes(context: Context, tensors: dict[str, torch.Tensor]) -> int:
    path: Path = context.folder("frozen")
    torch.save(tensors, path)
    size = path.stat().st_size
    remove(path)
    return size
