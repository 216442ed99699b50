"""The report of a verification: one value for scripts with and without a `Checkpointer`, as text, JSON and HTML.

What differs is said in the words of the code that makes it, with its mending with and without Holdfast (`advice`). The
page shows strips of steps, coloured where a life differs; `document` and `strip` make that of an attack, too.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from holdfast._units import listed

from .matching import Finding

if TYPE_CHECKING:
    from .lives import Life
    from .matching import Finding
    from .resume import Examined
    from .scripts import KillAt
    from .trace import Record

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
    names = listed(facts["names"], 5)
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
    samplers = {loader["sampler"] for loader in facts["loaders"].values()}
    by_epoch = samplers == {"DistributedSampler"}  # its order is a function of the seed and the number of the epoch
    if "epoch_began" in facts and facts["loader_seen"]:  # without a DataLoader nothing tells where an epoch begins
        cause = (
            "the script goes on in the middle of an epoch, and the DataLoader begins an epoch: its position is not "
            "saved, and the first batches count twice"
        )
    elif facts["drawn"] and facts["place"] == 0 and not by_epoch:
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
        if by_epoch:
            cause += " (the number of the epoch that has ended, which is trained again)"
        if not facts["loader_seen"]:
            cause += (
                "; or the position is right, and the order is that of an earlier epoch: the generator that it is drawn "
                "from (a `torch.Generator` or `random.Random` of the script's own) is not saved, and begins anew"
            )
    if facts["place"] == 0 and facts.get("epoch_began"):
        cause += "; the order is that of the first epoch again (its seed does not know the epoch: `sampler.set_epoch`)"
    mending = _of_position() if facts["loader_seen"] else _own_data(finding, facts)[2:]
    if by_epoch and "epoch_began" not in facts:
        mending = (
            "save the number of the next epoch (`epoch + 1`) when one has ended, and begin with that one",
            _BATCHES,
        )
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
        "skipped (`start_epoch = saved + 1`), or batches are skipped twice; or the order of the epoch is drawn anew, "
        "by a generator that is saved as it was after the first draw: then it is the order of a later epoch",
        "count a batch when its step is made, not when it is drawn; after a resume, go on with the epoch that was "
        "interrupted, in its order: save that, or the generator as it was before the order was drawn",
        _BATCHES,
    )


def _other_data(finding: Finding, facts: Mapping[str, Any]) -> _Texts:
    loaders = list(facts["loaders"].values())
    shuffled = any("Random" in loader["sampler"] for loader in loaders)
    drawn = facts["drawn"]
    mending = (
        "give the DataLoader a generator that is seeded by the epoch (`torch.Generator().manual_seed(seed + epoch)`), "
        "or save `torch.get_rng_state()` at the beginning of the epoch, and skip the batches that are done"
    )
    if any(loader.get("persistent") for loader in loaders):
        cause = (
            "workers stay from epoch to epoch (`persistent_workers=True`), and a resumed life makes new ones: their "
            "random numbers begin anew, and it draws a seed for them, so that the order is another one, too; or the "
            "generators are not saved at all"
        )
        mending = (
            "`persistent_workers=False`, and save the generators (`torch.get_rng_state()`) at the beginning of the "
            "epoch; or draw the order from a sampler whose generator is seeded by the epoch, and what is random in a "
            "sample from its index and the epoch"
        )
    elif shuffled:
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
        mending,
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
    if facts.get("goes_on"):
        return (
            "a run that should begin anew goes on from what the first one has saved",
            "they share the place that it is saved to, outside of the working directory (an absolute path, the home "
            "directory, an object store)",
            "name that place in the arguments as {run}, which each run gets anew (`-- python train.py --out {run}`); "
            "or give it a relative path",
            "the same; the directory of a `Checkpointer` is replaced by one for each run",
        )
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
        "the run makes {right} steps in all when it is resumed, and {left} when it is not",
        "the loop counts from 0 again, or begins the interrupted epoch again: its counter is not saved; or what ends "
        "the training early is not (the best score so far, a counter of patience)",
        "save the number of steps made and of the batches done in the epoch, and go on from them; and the best score "
        "and the patience that is left, if they end the training",
        f"{_COUNT}; the best score and the patience belong into the state",
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


# ---- the report


_VERDICTS = {
    "starts over": "starts over", "cannot resume": "cannot resume", "no training": "ends without training",
    "not repeatable": "not repeatable", "goes back": "goes back",
}  # fmt: skip
_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeReport:
    """A life of the run that was killed.

    Attributes:
        began: the step it began at or went on from, None if that is not known.
        steps: how many steps it made.
        killed_after: the step after which it was killed, None if it ended by itself.
        why: what was special about that moment.
        seconds: its duration.
        status: its exit status, if it ended by itself.
        differs_from: the first step that is not that of the uninterrupted life.
    """

    began: int | None
    steps: int
    killed_after: int | None = None
    why: str = ""
    seconds: float = 0.0
    status: int = 0
    differs_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification found.

    Attributes:
        command: program and arguments.
        verdict: "exact", "differs", "starts over", "goes back", "cannot resume", "ends without training" or
            "not repeatable".
        checkpointer: the script has a `Checkpointer`, and its whole state was compared.
        steps: of the uninterrupted life.
        items: values compared at each step.
        compared: steps compared, repeated ones included.
        lives: of the run that was killed.
        kills: the kills that were planned, as JSON.
        saves: after how many steps the script wrote files, as far as that is known.
        first: the first difference, as JSON.
        causes: the first to mend in front.
        notes: what else there is to know.
        ranks: number of processes that train.
        overhead: part of the time of the uninterrupted life that the observation took.
    """

    command: tuple[str, ...]
    verdict: str
    checkpointer: bool
    steps: int
    items: int
    compared: int
    lives: tuple[LifeReport, ...]
    kills: tuple[Mapping[str, Any], ...]
    saves: tuple[int, ...] = ()
    first: Mapping[str, Any] | None = None
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: int = 1
    overhead: float | None = None
    what: str = field(default="", repr=False)

    @property
    def exact(self) -> bool:
        """Tell whether the resume is exact."""
        return self.verdict == "exact"

    @property
    def kinds(self) -> list[str]:
        """Return what differs, the first to mend in front."""
        return [cause.kind for cause in self.causes]

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "command": list(self.command), "exact": self.exact, "verdict": self.verdict,
            "checkpointer": self.checkpointer, "steps": self.steps, "ranks": self.ranks, "items": self.items,
            "compared": self.compared, "kills": list(self.kills), "saves": list(self.saves),
            "lives": [asdict(life) for life in self.lives],
            "first_difference": self.first, "causes": [cause.why or cause.text for cause in self.causes],
            "findings": [asdict(cause) for cause in self.causes if cause.why],
            "notes": list(self.notes), "overhead": self.overhead,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Return it as text."""
        killed = sum(life.killed_after is not None for life in self.lives)
        if self.exact:
            times = "once" if killed == 1 else f"{killed} times"
            if self.checkpointer:
                yield (
                    f"EXACT: killed {times} and bit by bit as never killed: {self.steps} steps, {self.items} items of "
                    f"state, {self.compared} comparisons"
                )
            else:
                ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
                yield (
                    f"EXACT: killed {times} and step by step as never killed: {self.steps} steps{ranks}, with the same "
                    "data, weights, optimizer state, learning rates and gradients"
                )
        else:
            yield f"{self.verdict.upper()}: {self.what}"
        for number, cause in enumerate(self.causes):
            yield ""
            if cause.why:
                if number:
                    yield f"also: {cause.text}"
                yield f"cause: {cause.why}"
                yield f"fix: {cause.without}"
                yield f"with Holdfast: {cause.with_holdfast}"
            else:
                yield f"{'or' if number else 'likely cause'}: {cause.text}"
        for note in self.notes:
            yield f"note: {note}"


def of_findings(
    findings: Sequence[tuple[int, int, Finding]],
    *,
    command: Sequence[str],
    steps: int,
    lives: Sequence[LifeReport],
    notes: Sequence[str],
    kills: Sequence[KillAt],
    saves: Sequence[int],
    ranks: int,
    first: Life,
    reference: Mapping[int, Record],
) -> Report:
    """Return the report of a script that was observed from outside."""
    end = reference[0].end
    overhead = None if end is None else round(end["spent_s"] / max(first.seconds, 1e-9), 4)
    causes: list[Cause] = []
    what, difference, verdict = "", None, "exact"
    for life, rank, finding in findings:
        cause = advice(finding)
        if not what:
            verdict = _VERDICTS.get(finding.kind, "differs")
            where = f" (rank {rank})" if rank else ""
            after = "" if life < 2 else f"; the first {life - 1} resume(s) were right, this is life {life + 1}"
            rows = [f"\n  {name}: {left} in the uninterrupted run, {right} here" for name, left, right in finding.items]
            what = cause.text + where + after + "".join(rows[:_SHOWN])
            difference = {
                "kind": finding.kind, "step": finding.step, "life": life + 1, "rank": rank,
                "resumed": lives[life].began if life else None, "saved": lives[life - 1].why if life else "",
                "items": [{"item": name, "uninterrupted": a, "resumed": b} for name, a, b in finding.items],
            }  # fmt: skip
        if all(cause.kind != known.kind for known in causes):
            causes.append(cause)
    whole = sum("whole" in step for step in reference[0].steps)
    return Report(
        command=tuple(command), verdict=verdict, checkpointer=False, steps=steps,
        items=len(reference[0].steps[0]) + len(reference[0].steps[-1]["s"]), compared=sum(life.steps for life in lives),
        lives=tuple(lives),
        kills=tuple({"saved": None, "killed": {"step": kill.step}, "why": kill.why} for kill in kills),
        saves=tuple(saves), first=difference, causes=tuple(causes), ranks=ranks, overhead=overhead, what=what,
        notes=(*notes, f"weights and state are sampled at each step, and compared whole at {whole} of {steps}"),
    )  # fmt: skip


def of_examined(examined: Examined, command: Sequence[str], *, steps: int | None) -> Report:
    """Return the report of a script with a `Checkpointer`."""
    report, difference = examined.report, examined.difference
    first = None
    if difference is not None:
        items = [{"item": path, "uninterrupted": left, "resumed": right} for path, left, right in difference.items]
        first = {
            "kind": difference.kind, "step": difference.step, "life": difference.life + 1, "rank": difference.rank,
            "resumed": difference.resumed, "saved": examined.why,
            "items": items + [{"item": "batch", "uninterrupted": "", "resumed": ""}] * difference.batches,
        }  # fmt: skip
    lives = []
    for number, (began, killed) in enumerate(report.lives):
        end = report.steps if killed is None else killed
        bad = difference.step if difference is not None and difference.life == number else None
        lives.append(
            LifeReport(
                began=began, steps=max(0, end - began), killed_after=None if killed is None else killed,
                why=examined.kills[number].why if number < len(examined.kills) else "", differs_from=bad,
            )
        )  # fmt: skip
    kind = "" if difference is None else difference.kind
    return Report(
        command=tuple(command), verdict=examined.verdict, checkpointer=True, steps=report.steps, items=report.items,
        compared=report.compared, lives=tuple(lives),
        kills=tuple(
            {"saved": None if kill.save is None else asdict(kill.save), "killed": asdict(kill.stop), "why": kill.why}
            for kill in examined.kills
        ),
        saves=tuple(kill.save.step for kill in examined.kills if kill.save is not None),
        first=first, causes=tuple(Cause(kind=kind, text=text) for text in examined.causes), notes=report.notes,
        what=examined.what(),
    )  # fmt: skip


# ---- as a page


_CELLS = 1200  # more steps than this share cells
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #1b2733; }
h1 { font-size: 1.4em; } code { background: #eef2f5; padding: .1em .3em; border-radius: 3px; }
.exact { color: #1a7f4b; } .wrong { color: #b3261e; }
.strip { display: flex; height: 22px; margin: 2px 0; } .strip i { flex: 1 1 0; min-width: 0; }
.run { background: #2f6f9f; } .same { background: #3a9d6a; } .bad { background: #d1493f; }
.none { background: #eceff1; } .save { box-shadow: inset 0 -6px #f2b632; } .kill { box-shadow: inset -3px 0 #111; }
.name { font-size: .85em; color: #54626f; margin-top: .5em; }
pre { white-space: pre-wrap; background: #f6f8fa; padding: 1em; }
dt { font-weight: 600; margin-top: .6em; } dd { margin: 0; }
"""


def page(report: Report, seconds: float) -> str:
    """Return the page of a verification."""
    body = ['<div class="name">uninterrupted</div>', *_resume_strip(report, None)]
    for number, life in enumerate(report.lives):
        began = "began at an unknown step" if life.began is None else f"began at step {life.began}"
        end = "ended" if life.killed_after is None else f"killed after step {life.killed_after} ({life.why})"
        if life.status:
            end = f"ended with exit status {life.status}"
        body.append(f'<div class="name">life {number + 1}: {began}, made {life.steps} steps, {escape(end)}</div>')
        body += _resume_strip(report, life)
    return document(
        "verify-resume", "Is the resume of {} exact?", report.command, report.verdict, is_good=report.exact,
        text=f"{report.steps} steps uninterrupted, {len(report.lives)} lives of the run that was killed, "
        f"{seconds:.0f} s. Blue: uninterrupted. Green: the same step again. Red: another step. Yellow below: saved. "
        "Black edge: killed.",
        body=body, lines=report.lines(),
    )  # fmt: skip


def document(
    what: str, question: str, command: Sequence[str], verdict: str, *, is_good: bool, text: str, body: Iterable[str],
    lines: Iterable[str],
) -> str:  # fmt: skip
    """Return a page: its question about a command, the verdict, what the colours mean, the body, and the report."""
    shown = escape(shlex.join(command))
    report = escape("\n".join(lines))
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f'<meta name="generator" content="holdfast"><title>{what}: {shown}</title>',
        f"<style>{_STYLE}</style><h1>{question.format(f'<code>{shown}</code>')}</h1>",
        f'<p class="{"exact" if is_good else "wrong"}"><strong>{escape(verdict.upper())}</strong></p>',
        f"<p>{text}</p>", *body, f"<h2>Report</h2><pre>{report}</pre>",
    ]  # fmt: skip
    return "\n".join([*parts, "</html>\n"])


def _resume_strip(report: Report, life: LifeReport | None) -> Iterator[str]:
    total = max([report.steps, *((one.began or 0) + one.steps for one in report.lives)])
    return strip(
        total, lambda step: _mark(report, life, step), saves=report.saves if life is None else (),
        killed=None if life is None else life.killed_after,
    )  # fmt: skip


def strip(total: int, mark: Callable[[int], str], *, saves: Sequence[int], killed: int | None) -> Iterator[str]:
    """Yield the cells of a strip: a mark for each step, the steps after which was saved and the kill came."""
    size = max(1, -(-total // _CELLS))
    yield '<div class="strip">'
    for begin in range(0, total, size):
        cell = range(begin, min(begin + size, total))
        marks = [mark(step) for step in cell]
        first = "bad" if "bad" in marks else marks[0]
        if any(step + 1 in saves for step in cell):
            first += " save"
        if killed is not None and killed - 1 in cell:
            first += " kill"
        steps = f"step {begin}" if size == 1 else f"steps {begin} to {cell[-1]}"
        yield f'<i class="{first}" title="{steps}"></i>'
    yield "</div>"


def _mark(report: Report, life: LifeReport | None, step: int) -> str:
    if life is None:
        return "run" if step < report.steps else "none"
    if life.began is None:  # it is no step of the uninterrupted run
        return "bad" if step < life.steps else "none"
    if not life.began <= step < life.began + life.steps:
        return "none"
    return "bad" if life.differs_from is not None and step >= life.differs_from else "same"
