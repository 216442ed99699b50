"""The likely causes of a resume that is not exact: a table of rules, which new experience extends.

Each rule looks at the first difference and returns, if it fits, the usual cause and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .comparison import Difference, Unsteady

__all__ = ["likely_causes"]

_Rule = Callable[[Difference, str], str | None]


def likely_causes(found: Difference, why: str = "", *, noise: Unsteady | None = None) -> list[str]:
    """Return the likely causes of a difference, the likeliest first.

    Args:
        found: the difference.
        why: what is special about the moment that was saved ("after a report", ...).
        noise: the differences of two uninterrupted runs, if they were compared.
    """
    if noise is not None and noise.first is not None and found.kind in ("after", "length", "metrics"):
        return _of_noise(noise.first)
    causes = [text for rule in _RULES if (text := rule(found, why))]
    return causes or [_OUTSIDE]


_OUTSIDE = (
    "Everything that is saved was right at the resume, so something that is NOT in the state takes part in training: "
    "an object missing from the state given to Checkpointer (a second optimizer, an EMA, a scheduler), a random "
    "generator of your own, a global, data that do not come from ck.batches, or an operation that is not "
    "deterministic. Put it into the state"
)


def _of_noise(first: Difference) -> list[str]:
    """Return the causes where two uninterrupted lives already differ: the resume is not at fault."""
    if first.kind == "length":
        return [
            "Two uninterrupted runs make different numbers of steps: the loop ends by a clock, or by something random. "
            "Verify a run of a fixed number of steps (--steps)"
        ]
    if first.batches:
        return [
            "Two uninterrupted runs begin alike and train on different data: a split, a shuffle or an augmentation "
            "draws from a generator that nothing seeds, before the Checkpointer or past ck.batches. Each life of the "
            "script draws anew there, so a resume goes on with other data, too: seed it, "
            "random_split(..., generator=torch.Generator().manual_seed(0))"
        ]
    return [
        "Two uninterrupted runs with the same data already differ: kernels that are not deterministic (on a GPU: "
        "atomic additions, cuDNN's choice of algorithm), or randomness that nothing seeds (os.urandom, a generator "
        "of your own, a set's order). Try torch.use_deterministic_algorithms(True) with "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8, torch.backends.cudnn.benchmark = False and PYTHONHASHSEED=0: without it no "
        "resume can be exact to the bit"
    ]


def _paths(found: Difference) -> list[str]:
    return [path for path, _, _ in found.items]


def _all(found: Difference, *prefixes: str) -> bool:
    return bool(found.items) and all(path.startswith(prefixes) for path in _paths(found))


def _other_path(found: Difference, why: str) -> str | None:
    if found.kind != "path":
        return None
    return (
        f"The path of the run changes from life to life ({found.text}): it is made of a time, a process id or a "
        "temporary directory, so no life finds the checkpoints of the life before it. Give Checkpointer the same path "
        "each time"
    )


def _not_resumed(found: Difference, why: str) -> str | None:
    if found.kind != "not resumed":
        return None
    return (
        f"The script began at step {found.step} although {found.text}: resume='never', a fixed resume=CHECKPOINT, or "
        "code that empties the directory of the run at the start. Use resume='auto'"
    )


def _plain_value(found: Difference, why: str) -> str | None:
    owners = (*found.objects, "holdfast")
    names = [path for path in _paths(found) if path.partition("/")[0] not in owners]
    if found.kind != "at resume" or not names:
        return None
    return (
        f"{', '.join(names[:5])}: a plain value (a number, text, list, tensor) is saved and did not come back into the "
        "state. Keep it in the mapping alone (ck.state['best'] = ...) instead of a variable beside it, and read it "
        "from there after entering, or put it into an object with state_dict and load_state_dict"
    )


def _changed_before_batches(found: Difference, why: str) -> str | None:
    if found.kind != "at resume" or not _all(found, "holdfast/rng"):
        return None
    return (
        "The random generators are not those that were saved: something draws from them or seeds them after they were "
        "captured (an evaluation, a new iterator of a DataLoader, torch.manual_seed inside the body)"
    )


def _own_counters(found: Difference, why: str) -> str | None:
    if found.kind != "at resume" or not any(path.startswith("holdfast/progress") for path in _paths(found)):
        return None
    return (
        "Step, epoch or data position are not those that were saved. Is something else loading them? If not, this is a "
        "defect of Holdfast: please report it with this output"
    )


def _own_object(found: Difference, why: str) -> str | None:
    if found.kind != "at resume":
        return None
    names = sorted({path.partition("/")[0] for path in _paths(found)} & set(found.objects))
    if not names:
        return None
    return (
        f"{', '.join(names)}: was saved and did not come back. Its load_state_dict does not take in what its "
        "state_dict gives, or it was not the object that trains (make models, wrappers, optimizers and schedulers "
        "before `with Checkpointer(...)`), or it was saved in the middle of a step (call ck.save and ck.report after "
        "ck.step)"
    )


def _other_data(found: Difference, why: str) -> str | None:
    if found.kind not in ("after", "metrics") or not found.batches:
        return None
    if found.text:
        return (
            "The loader does not go on from its saved position, as the ledger of the run shows: look at its state_dict "
            "and load_state_dict, use a map-style data set, or a loader without state_dict, which is replayed by count"
        )
    return (
        "The data of this step are others: an order that is drawn outside of ck.batches (an iterator made by hand, a "
        "shuffle of your own, `enumerate` or `next(iter(loader))` on the loader itself), a sampler or an iterable with "
        "state that is not saved, a batch drawn ahead and lost, or augmentation in persistent workers. Draw from "
        "ck.batches(loader), and give loader or sampler a state_dict"
    )


def _generators_first(found: Difference, why: str) -> str | None:
    if found.kind != "after" or found.batches or not any(p.startswith("holdfast/rng") for p in _paths(found)):
        return None
    where = ""
    if why in ("after a report", "at the end of an epoch"):
        where = f" The life went on from a step saved {why}: an evaluation there is the usual place."
    return (
        "Random numbers are drawn in one life that the other does not draw: by code that runs only at the start (a "
        "sanity check, compiling, `iter(loader)`), or by code after ck.step (an evaluation with a DataLoader of its "
        f"own, sampling, dropout left on).{where} Give that code a generator of its own "
        "(DataLoader(..., generator=torch.Generator())), or move it in front of ck.step"
    )


def _learning_rate(found: Difference, why: str) -> str | None:
    if found.kind != "after" or not any(path.endswith(("/lr", "/initial_lr")) for path in _paths(found)):
        return None
    return (
        "The learning rate differs: it is computed from a variable that is not saved (a batch index of `enumerate`, "
        "which begins at 0 again, a step counter of your own: use ck.global_step), or a scheduler is not in the state "
        "or steps after ck.step"
    )


def _length_of_run(found: Difference, why: str) -> str | None:
    if found.kind != "length":
        return None
    return (
        f"{found.text[:1].upper()}{found.text[1:]}: the loop counts by itself (`for i in range(n)`, `enumerate`, a "
        "patience counter). Count with ck.epochs and ck.global_step, and put other counters into the state"
    )


def _metric_only(found: Difference, why: str) -> str | None:
    if found.kind != "metrics":
        return None
    return (
        "The state is equal and a metric is not: it is computed from a variable that is not saved, such as a running "
        "average or a list of losses, which a new life begins anew. Put it into the state"
    )


def _outside(found: Difference, why: str) -> str | None:
    return _OUTSIDE if found.kind == "after" else None


_RULES: Sequence[_Rule] = (
    _other_path,
    _not_resumed,
    _own_counters,
    _plain_value,
    _changed_before_batches,
    _own_object,
    _other_data,
    _generators_first,
    _learning_rate,
    _length_of_run,
    _metric_only,
    _outside,
)
