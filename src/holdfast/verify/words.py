"""What each difference means in the words of the code that makes it, and how to mend it with and without Holdfast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .matching import Finding

__all__ = ["Cause", "advice"]

_BATCHES = "draw the batches from `ck.batches(loader)`, which goes on in the middle of an epoch"
_COUNT = "count with `ck.epochs`, `ck.batches` and `ck.global_step`"
_STATE = 'put it into the state: `holdfast.Checkpointer(path, {..., "%s": %s})`'


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why something differs.

    Attributes:
        kind: what differs, in a word or two.
        text: the difference in a sentence, or the likely cause alone where ``why`` is empty.
        why: the usual cause.
        without: how to mend it in the script as it is.
        with_holdfast: how it is mended with Holdfast.
    """

    kind: str
    text: str
    why: str = ""
    without: str = ""
    with_holdfast: str = ""


def advice(finding: Finding) -> Cause:
    """Return the texts for a difference."""
    texts, facts = _TEXTS[finding.kind], finding.facts
    if isinstance(texts, tuple):
        lists = {name: ", ".join(map(str, value)) for name, value in facts.items() if isinstance(value, (list, tuple))}
        words = {**facts, **lists, "missing": lists.get("missing") or "its state", "step": finding.step}
        what, cause, without, with_holdfast = texts[0].format(**words), texts[1].format(**words), *texts[2:]
    else:
        what, cause, without, with_holdfast = texts(finding, facts)
    return Cause(kind=finding.kind, text=what, why=cause, without=without, with_holdfast=with_holdfast)


_Texts = tuple[str, str, str, str]  # the last four of a `Cause`; facts stand in braces in the first two


def _starts_over(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    if facts.get("saved", True):
        new = ", with other initial weights" if facts.get("new") else ""
        cause = (
            "the script does not look for its checkpoint when it starts, looks at another place than the one it writes "
            'to (a time or a number in the path, a tracker file that is not written), or takes an error for "no '
            'checkpoint"'
        )
        return (
            f"the resumed life begins at step 0 again{new}, although files were written before the kill", cause,
            "load the newest checkpoint at the start, and let an error there end the script; or tell what resumes it: "
            "--resume \"python train.py --resume out/last\"",
            "`holdfast.Checkpointer(path, state)` resumes by itself, and never starts over when there is a checkpoint",
        )  # fmt: skip
    before = " or ".join(facts.get("before", ()))
    return (
        f"the resumed life begins at step 0 again: before step {facts['killed_at']}, where it was killed, no file was "
        "written in its working directory",
        "nothing is saved, or to a place that the tool does not see (an absolute path, an object store)"
        + (f"; or it goes on each time from {before}, which was there before, and made too few steps to save since"
           if before else ""),
        "save sooner; or name the directory of the run in the arguments as {run}, which each chain of lives gets anew"
        + (f"; or verify it in a folder without {before}" if before else ""),
        "`holdfast.Checkpointer(path, state, every=\"10min\")` saves, and resumes by itself",
    )  # fmt: skip


def _partial(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    names = ", ".join(facts["names"][:5]) + (", ..." if len(facts["names"]) > 5 else "")
    now = "have their initial values again" if facts["fresh"] else "have other values"
    return (
        f"the weights are those of step {finding.step}, but {len(facts['names'])} of {facts['of']} tensors "
        f"{now}: {names}",
        "a part of the model is not saved, or its names do not match when it is loaded (`strict=False`, a prefix such "
        "as `module.` or `_orig_mod.`, a head or adapter made after loading, experts of one rank only)",
        "load with `strict=True`, after the model is complete, and look at `missing_keys` and `unexpected_keys`",
        "`Checkpointer` loads strictly: what is missing is an error that names it",
    )


def _learning_rate(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    left, right = facts["left"][:1] or [0.0], facts["right"][:1] or [0.0]
    begins = " (that of step 0)" if facts["fresh"] else ""
    sched = (
        "the scheduler is not saved"
        if facts["sched"]
        else "the learning rate is computed from a counter that is not saved"
    )
    return (
        f"the learning rate jumps at step {finding.step}: {left[0]:.6g} in the uninterrupted run, "
        f"{right[0]:.6g}{begins} here",
        f"{sched}, or the loop counts its steps from 0 again (`enumerate`), or `last_epoch` or the number of all steps "
        "differs in the new life",
        "save and load `scheduler.state_dict()`, after the optimizer; compute a rate of your own from the saved step",
        f"{_STATE % ('scheduler', 'scheduler')}; for a rate of your own use `ck.global_step`",
    )  # fmt: skip


def _other_modules(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    begins = "begins anew" if facts["fresh"] else "is not that of the uninterrupted run"
    cause, fix = "it is made from the model at the start, and not saved", "save and load its `state_dict()`, too"
    if facts.get("later"):  # it came back as it was, and so did the weights
        cause = "what brings it up to date is not saved: the number of its updates, a rate or an interval of its own"
        fix = "save and load that, too (`n_averaged` is in the `state_dict()` of an `AveragedModel`)"
    return (
        f"a module beside the one that trains {begins} at step {finding.step}: an averaged copy of the weights (EMA), "
        "a target network",
        cause,
        fix,
        _STATE % ("ema", "ema"),
    )


def _data_again(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    where = _place(facts)
    if "epoch_began" in facts and facts["loader_seen"]:  # without a DataLoader nothing tells where an epoch begins
        cause = (
            "the script goes on in the middle of an epoch, and the DataLoader begins an epoch: its position is not "
            "saved, and the first batches count twice"
        )
    elif facts["drawn"] and facts["place"] == 0:
        cause = (
            f"the order is drawn from the generator of {' and '.join(facts['drawn'])}, which begins anew with the "
            "process: the order of the first epoch comes again, for the generator is not saved"
        )
    elif facts.get("same_place"):
        cause = (
            "the position in the epoch is right, and the order is that of an earlier epoch: the generator that it is "
            "drawn from (of a sampler, or of the script's own), or the number of the epoch that seeds it, is not saved"
        )
    else:
        cause = "the position in the data is not saved, or an older one than the weights"
        if not facts["loader_seen"]:
            cause += (
                "; or the position is right, and the order is that of an earlier epoch: the generator that it is drawn "
                "from (a `torch.Generator` or `random.Random` of the script's own) is not saved, and begins anew"
            )
    if facts["place"] == 0 and facts.get("epoch_began"):
        cause += "; the order is that of the first epoch again (its seed does not know the epoch: `sampler.set_epoch`)"
    mending = _of_position() if facts["loader_seen"] else _own_data(finding, facts)[2:]
    return (f"step {finding.step} trains on other data: again on those of {where}", cause, *mending)


def _place(facts: Mapping[str, Any]) -> str:
    start = facts["place"] in (0, *facts["epochs"])
    return f"step {facts['place']}" + (", the beginning of an epoch" if start else "")


def _of_position() -> tuple[str, str]:
    return (
        "save how many batches of the epoch are done and the generator of its order, and skip that many after a "
        "resume; or take torchdata's StatefulDataLoader and save its `state_dict()`",
        _BATCHES,
    )


def _left_out(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    return (
        f"step {finding.step} trains on other data: on those of {_place(facts)} of the uninterrupted run, "
        f"{facts['place'] - finding.step} later; what lies between is left out",
        "batches were drawn ahead of the steps (prefetching, workers) and counted as trained, the rest of the epoch is "
        "skipped (`start_epoch = saved + 1`), or batches are skipped twice",
        "count a batch when its step is made, not when it is drawn; after a resume, go on with the epoch that was "
        "interrupted",
        _BATCHES,
    )


def _other_data(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    loaders = list(facts["loaders"].values())
    shuffled = any("Random" in loader["sampler"] for loader in loaders)
    drawn = facts["drawn"]
    if shuffled:
        cause = "the DataLoader's order is drawn anew: the generator that shuffles is not saved"
    elif "numpy" in drawn or "python" in drawn:
        cause = f"the data are drawn or augmented with the generator of {' and '.join(drawn)}, which is not saved"
    else:
        cause = (
            "the order or the augmentation of the data is drawn anew: by a sampler of its own, by workers, or from a "
            "generator that is not saved"
        )
    return (
        f"step {finding.step} trains on other data, which no step of the uninterrupted run had",
        cause,
        "give the DataLoader a generator that is seeded by the epoch (`torch.Generator().manual_seed(seed + epoch)`), "
        "or save `torch.get_rng_state()` at the beginning of the epoch, and skip the batches that are done",
        f"{_BATCHES}; generators are saved with it",
    )


def _own_data(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    drawn = " and ".join(facts["drawn"])
    cause = (
        f"batches are made with the generator of {drawn}, which is not saved"
        if drawn
        else "the batches come from something that is not saved: an environment, a replay buffer, an iterator or a "
        "position of your own"
    )
    return (
        f"step {finding.step} trains on other data than in the uninterrupted run; no DataLoader handed them out",
        cause,
        "save the state of the generators (`torch.get_rng_state()`, `numpy.random.get_state()`, `random.getstate()`, "
        "`generator.get_state()` of one of your own), and of whatever the batches come from",
        "generators are saved always, but for those of your own: put them into the state, and what makes the batches, "
        "with a `state_dict`",
    )


def _changed_inputs(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    drawn = facts["drawn"]
    if drawn:
        names = " and ".join(drawn)
        cause = f"it is changed on its way with random numbers of {names} (noise, masks), whose state is not saved"
        fix = "save and load the state of that generator"
    else:
        cause = (
            "something that is carried from batch to batch goes into the model, too: a hidden state, a memory, a list"
        )
        fix = "save and load what is carried"
    return (
        f"step {finding.step} gets the right batch, and other inputs go into the model",
        cause,
        fix,
        "generators are saved always; put what is carried into the state: `ck.state[\"hidden\"] = hidden`",
    )  # fmt: skip


def _generators(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    drawn = " and ".join(facts["drawn"])
    what = "dropout, noise" if facts["seen"] else "dropout, noise, the choice of data"
    return (
        f"step {finding.step} has the same weights{' and data' if facts['seen'] else ''} and other gradients: the "
        f"random numbers of {drawn} are others",
        f"the state of the generator is not saved, and the step draws from it ({what}); or something draws from it "
        "that runs in one life only (an evaluation, a sanity check at the start)",
        "save and load `torch.get_rng_state()` (and of CUDA, NumPy, random), last of all when resuming",
        "generators are saved always, and restored last",
    )


def _carried(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    return (
        f"step {finding.step} has the same weights, {'data' if facts['seen'] else 'optimizer state'} and generators, "
        "and other gradients",
        "something that is not saved takes part: a value carried from step to step (a loss weight, a running mean, a "
        "hidden state, a baseline, a replay buffer), a generator of your own, or kernels that are not deterministic",
        "save and load it; try `torch.use_deterministic_algorithms(True)`",
        "put it into the state: `ck.state[\"beta\"] = beta`",
    )  # fmt: skip


def _cannot_resume(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    torn = facts["torn"]
    return (
        f"the resumed life ended with exit status {facts['status']}: {facts['said']}",
        "the checkpoint was torn by the kill: it is written over in place, or its parts are written one after the other"
        if torn
        else "the script cannot load what it saved itself: `weights_only`, other shapes, names or classes, a file that "
        "is not there yet",
        "write to a temporary name, fsync, and rename; keep the one before until then" if torn
        else "start it twice with a short training, and mend what the error says",
        "a checkpoint counts when it is whole: a save that dies costs that save only",
    )  # fmt: skip


def _not_repeatable(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    fields = facts["fields"]
    without = (
        "seed everything at the start (`random.seed`, `numpy.random.seed`, `torch.manual_seed`, generators of "
        "your own, "
        "`np.random.default_rng(seed)`), and try `torch.use_deterministic_algorithms(True)`; then verify again"
    )
    if "length" in fields:
        what = f"two uninterrupted runs make {facts['left']} and {facts['right']} steps"
        cause = "the loop ends by a clock, or by something random"
    elif finding.step == 0 and {"w", "e", "b"} & set(fields):
        what, cause = (
            "two uninterrupted runs begin with other weights",
            "the initialisation draws from an unseeded generator",
        )
    elif "x" in fields and not {"w", "s"} & set(fields):
        what = f"two uninterrupted runs train on other data at step {finding.step}"
        cause = "a split, a shuffle, an augmentation or a sampling draws from a generator that nothing seeds"
    elif fields[0] == "g":
        what = f"two uninterrupted runs have other gradients at step {finding.step}, with the same weights and data"
        cause = (
            "random numbers that nothing seeds" if "r" in fields else "kernels that are not deterministic, or random "
            "numbers from a generator of your own that nothing seeds"
        )  # fmt: skip
    else:
        what, cause = f"two uninterrupted runs differ at step {finding.step}", "something that nothing seeds"
    return what, cause, without, "the same: without it no resume can be exact to the bit"


_TEXTS: Mapping[str, _Texts | Callable[[Finding, Mapping[str, Any]], _Texts]] = {
    "buffers": (
        "buffers of the model (such as running means of BatchNorm) are not those of step {step}",
        "only parameters are saved, buffers are not persistent, or an evaluation in training mode changed them",
        "save `model.state_dict()` instead of `model.parameters()`; register the buffers with `persistent=True`",
        _STATE % ("model", "model"),
    ),
    "cannot resume": _cannot_resume,
    "carried": _carried,
    "changed inputs": _changed_inputs,
    "data again": _data_again,
    "data left out": _left_out,
    "fewer batches": (
        "step {step} is made of {right} batches, and of {left} in the uninterrupted run",
        "a life was killed, or saved, between two batches whose gradients are gathered for one step",
        "save after the optimizer's step only, or save the gathered gradients",
        "call `ck.step` after `optimizer.step`: a save never lies between the batches of a step",
    ),
    "fewer steps": (
        "the run makes {right} steps in all when it is resumed, and {left} when it is not: steps are left out",
        "the rest of the interrupted epoch is skipped (`start_epoch = saved + 1`), or the loop takes the saved step "
        "for more than it is",
        "save the number of batches done in the epoch, and finish the epoch after a resume",
        _COUNT,
    ),
    "frozen weights": (
        "step {step} has gradients for {right} weights, and for {left} in the uninterrupted run",
        "other layers are frozen: `requires_grad_` depends on a counter or a stage that is not saved, or is called for "
        "a fresh start alone",
        "freeze the layers before the optimizer is made, in each life alike, by the saved step or stage",
        "decide it by `ck.global_step` or `ck.epoch`, after entering",
    ),
    "generators": _generators,
    "goes back": (
        "a life that was killed after step {died} is resumed from step {step}, although it had finished {passed_over} "
        "saves after that",
        "the newest checkpoint is looked for by names sorted as text (step-8 comes after step-16), by a clock, "
        "or in a file that does not name it; or the newer ones cannot be loaded, and the error is caught",
        "choose by the number: `max(paths, key=lambda path: int(path.stem.rpartition('-')[2]))`, or write numbers "
        "with zeros in front; let an error of the newest checkpoint end the script, or print it",
        "`Checkpointer` goes on from the newest whole checkpoint, and says which ones it passes over and why",
    ),
    "learning rate": _learning_rate,
    "loss scale": (
        "the loss scale is not that of step {step}",
        "the state of `GradScaler` is not saved: it begins with its first scale, and skips steps until it has "
        "come down",
        "save and load `scaler.state_dict()`",
        _STATE % ("scaler", "scaler"),
    ),
    "more steps": (
        "the run makes {right} steps in all when it is resumed, and {left} when it is not: steps are counted twice",
        "the loop counts from 0 again, or begins the interrupted epoch again: its counter is not saved",
        "save the number of steps made and of the batches done in the epoch, and go on from them",
        _COUNT,
    ),
    "no training": (
        "the resumed life ends without training a step, with exit status 0, although it was killed at step {step}",
        "the saved counter says that all is done: an epoch is counted when it begins, or the interrupted one is "
        "skipped",
        "save the counter that the loop needs to go on: epochs that are finished",
        "`ck.epochs(n)` goes on in the epoch that was interrupted",
    ),
    "not repeatable": _not_repeatable,
    "optimizer": (
        "the state of {optimizer} is not that of step {step} ({keys})",
        "weights and optimizer state are of different steps (two files of which the kill let only one be written), or "
        "the state is loaded for parameters in another order",
        "write both into one file, to a temporary name, and rename it; keep the order of parameters",
        _STATE % ("optimizer", "optimizer"),
    ),
    "optimizer lost": (
        "the state of {optimizer} is lost at the resume ({missing}): the weights go on from step {step}, and the "
        "optimizer begins anew",
        "`optimizer.state_dict()` is not saved, or not loaded; or loaded into an {optimizer} that is thrown away (made "
        "again afterwards, for parameters that were replaced)",
        "save `optimizer.state_dict()` with the model, and call `optimizer.load_state_dict` on the one that trains",
        _STATE % ("optimizer", "optimizer"),
    ),
    "optimizer rounded": (
        "the state of {optimizer} came back rounded ({keys})",
        "it was cast when it was saved or loaded: `optimizer.load_state_dict` casts state to the dtype of the weights",
        "save it as it is, and load it before the model is cast; compare dtypes after loading",
        _STATE % ("optimizer", "optimizer"),
    ),
    "options": (
        "step {step} is made with other options of {optimizer} ({names}), and leaves other weights",
        "they follow a schedule of the script's own, whose counter begins anew with the process; or they are set after "
        "`optimizer.load_state_dict`, which restores them",
        "compute them from the saved step, or save what they are computed from; set them before the state is loaded",
        'compute them from `ck.global_step`, or keep the counter in the state: `ck.state["calls"] = calls`',
    ),
    "other data": _other_data,
    "other modules": _other_modules,
    "own data": _own_data,
    "partial weights": _partial,
    "ranks": (
        "the ranks go on from different steps: {began}",
        "each rank looks for the newest checkpoint by itself, and sees other files, or other parts of one",
        "let rank 0 choose, and broadcast the choice",
        "`Checkpointer` agrees on one checkpoint for all ranks",
    ),
    "rounded weights": (
        "the weights are those of step {step} rounded to 16 bits",
        "the checkpoint holds a half-precision copy (an export for inference) instead of the weights that train",
        "save the 32-bit weights (or the master weights of the optimizer) for resuming, and the export beside them",
        "`Checkpointer` saves each tensor in its own dtype",
    ),
    "starts over": _starts_over,
    "unexplained": (
        "after equal steps the weights differ at step {step}",
        "something changes them beside what is recorded of the optimizer: weights swapped for an evaluation, clipping "
        "by a running value, averaging of the weights by a counter that is not saved",
        "save that value or counter, and load it before the first step",
        "put the optimizer and that value into the state",
    ),
    "unknown weights": (
        "the weights after the resume are those of no step of the uninterrupted run",
        "other weights are saved than those that train (an averaged copy, a half-merged adapter), or something changes "
        "them after loading: a new initialisation, a quantisation, a load into another object",
        "save `model.state_dict()` of the model that trains, and load it after everything that changes weights",
        "give the model that trains to `Checkpointer`, made complete before `with`",
    ),
}
