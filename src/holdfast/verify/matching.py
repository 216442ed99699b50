"""Match the life of a resumed script with an uninterrupted one, by content; pure functions.

Step numbers mean nothing here: a life counts from where it began. The weights before its first step are looked for
among those of the uninterrupted life, which gives the step it went on from; from there both are compared step by step.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .trace import Record, Step, stages

EARLY = 16
"""So many steps may be made before a checkpoint is loaded: to warm up, to measure, to give an optimizer its state."""
_ROUNDED = 0.02  # relative: bfloat16 keeps 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference of a resumed life from the uninterrupted one.

    Attributes:
        kind: what differs; a key of `report._TEXTS`.
        step: the step that differs, as the uninterrupted life counts.
        at_resume: it is there before the first step of the life.
        items: what differs, with its value in the uninterrupted life and in this one.
        facts: what the texts need.
    """

    kind: str
    step: int
    at_resume: bool = False
    items: tuple[tuple[str, str, str], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a life is to the uninterrupted one.

    Attributes:
        began: the step it went on from, None if its state is that of no step.
        steps: the steps it made.
        findings: the differences, the one to mend first in front.
        notes: what differs and leads to nothing.
        early: the steps that it made before it loaded its checkpoint, which are none of ``steps``.
    """

    began: int | None
    steps: int
    early: int = 0
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def compare_fresh(reference: Record, other: Record, *, to_end: bool) -> Finding | None:
    """Compare two lives that began anew: is the script repeatable?"""
    for number, (left, right) in enumerate(zip(reference.steps, other.steps, strict=False)):
        fields = _unequal(left, right)
        if left["r"] != right["r"]:
            fields.append("r")
        if fields and fields != ["r"]:
            facts: dict[str, Any] = {"fields": fields, "goes_on": number == 0 and _goes_on(reference, other)}
            return Finding(kind="not repeatable", step=number, items=_items(fields, left, right), facts=facts)
    if to_end and len(reference.steps) != len(other.steps):
        facts = {"fields": ["length"], "left": len(reference.steps), "right": len(other.steps)}
        facts["goes_on"] = not other.steps
        return Finding(kind="not repeatable", step=min(len(reference.steps), len(other.steps)), facts=facts)
    return None


def _goes_on(reference: Record, other: Record) -> bool:
    """Tell whether a life that should begin anew has the weights that another one had later, or at its end."""
    first, ended = other.steps[0]["w"], reference.end["w"].values() if reference.end is not None else ()
    return reference.steps[0]["w"] != first and first in (*ended, *(step["w"] for step in reference.steps))


def match_life(
    reference: Record, life: Record, *, killed_at: int, saved: bool, to_end: bool, before: Sequence[str] = ()
) -> Match:
    """Match a life that was started again.

    Args:
        reference: the uninterrupted life.
        life: the one that was started after a kill.
        killed_at: the step before which the life before it was killed.
        saved: something was saved before that.
        to_end: it was not killed in its turn.
        before: what may be checkpoints that were there before the uninterrupted life.
    """
    if not life.steps:
        return Match(began=None, steps=0, findings=(Finding(kind="no training", step=killed_at, at_resume=True),))
    num_seen, life = len(life.steps), from_checkpoint(reference, life, killed_at=killed_at)
    first, early = life.steps[0], num_seen - len(life.steps)
    began = _locate(reference.steps, first, killed_at)
    if began is None:
        found = _unknown_weights(reference, life, killed_at)
        return Match(began=None, steps=len(life.steps), early=early, findings=(found,))
    anew = reference.steps[0]
    if began == 0 and not _unequal_state(anew, first):
        facts = {"saved": saved, "killed_at": killed_at, "before": before}
        return Match(began=0, steps=len(life.steps), findings=(Finding(kind="starts over", step=0, facts=facts),))
    findings, notes = _compare_steps(reference, life, began, to_end=to_end)
    if early:
        many = "the step that a life makes" if early == 1 else f"the {early} steps that a life makes"
        notes.append(f"{many} before it loads its checkpoint: not compared, nothing is left of it")
    return Match(began=began, steps=len(life.steps), early=early, findings=tuple(findings), notes=tuple(notes))


def find_state(reference: Record, life: Record, *, killed_at: int) -> tuple[int | None, bool]:
    """Find the state before the first step of a life among those of the uninterrupted one.

    Returns:
        The step, the number of all steps for the end, None if the weights are those of no step, or are not those that
        belong to the optimizer state; and whether the rest of the state is that of the step, too (of the end: no).
    """
    first, steps = life.steps[0], reference.steps
    began = _locate(steps, first, killed_at)
    if began is None:
        is_end = reference.end is not None and first["w"] in reference.end["w"].values()
        return (len(steps) if is_end else None), False
    if first["s"] and not _same_state(steps[began], first) and any(_same_state(step, first) for step in steps):
        return None, False
    return began, not _unequal_state(steps[began], first)


def is_followed(reference: Record, life: Record, began: int) -> bool:
    """Tell whether each state of a life, from its first step on, is that of the uninterrupted one."""
    pairs = zip(reference.steps[began:], life.steps, strict=False)
    return len(life.steps) <= len(reference.steps) - began and not any(
        name in ("w", "s") for left, right in pairs for name in _unequal_state(left, right)
    )


# ---- where a life goes on


def from_checkpoint(reference: Record, life: Record, *, killed_at: int) -> Record:
    """Leave out the steps that a life made before it loaded its checkpoint.

    Those begin with the weights of a fresh start. Then the weights are others than the last step has left.
    """
    known, steps = reference.steps, life.steps
    began = _locate(known, steps[0], killed_at) if steps and _same(known[0], steps[0], "w") else None
    if began is None:
        return life
    for number in range(1, min(len(steps), EARLY + 1)):
        as_ever = known[began + number] if began + number < len(known) else None
        place = _locate(known, steps[number], killed_at)
        if _is_loaded(known, steps, number, as_ever, is_known=place is not None):
            return replace(life, steps=steps[number:])
    return life


def _is_loaded(
    known: Sequence[Step], steps: Sequence[Step], number: int, as_ever: Step | None, *, is_known: bool
) -> bool:
    """Tell whether a checkpoint was loaded just before a step.

    Args:
        known: the uninterrupted life.
        steps: the life.
        number: of the step in it.
        as_ever: the step of the uninterrupted life, if nothing was loaded.
        is_known: the weights before the step are those of the uninterrupted life at some step.
    """
    step, before = steps[number], steps[:number]
    if step["o"] not in {one["o"] for one in before}:  # an optimizer's first step: those before it were of another one
        gone, kept = [one["o"] for one in before], {one["o"] for one in known[number:]}
        is_warm_up = gone == [one["o"] for one in known[:number]] and not kept & {*gone}
        return is_warm_up and is_known and as_ever is not None and not _same(as_ever, step, "w")
    if not _is_put(step):
        return False
    if as_ever is not None and _is_put(as_ever) and (not is_known or _same(as_ever, step, "w")):
        return False  # this script changes its weights between its steps
    # The other optimizers have got their weights at the same time, as far as the life shows their next steps.
    for other in {one["o"] for one in before} - {step["o"]}:
        after = next((one for one in steps[number:] if one["o"] == other), None)
        if after is not None and after.get("was") is not None and not _is_put(after):
            return False
    return True


def _is_put(step: Step) -> bool:
    """Tell whether the weights are others than the last step of their optimizer has left; known of early steps."""
    return step.get("was") is not None and step["was"] != step["w"]


def _locate(steps: Sequence[Step], first: Step, killed_at: int) -> int | None:
    """Return the step before which the weights were those of ``first``; the one whose other state fits best."""
    same = [n for n, step in enumerate(steps) if _same(step, first, "w")]
    if not same:
        return None

    def rank(number: int) -> tuple[int, ...]:
        # Optimizers are numbered by their first steps: in a life that goes on in a later stage they are others.
        step = steps[number]
        fits = (step["s"] == first["s"], step["lr"] == first["lr"], step["x"] == first["x"] and step["g"] == first["g"])
        own = int(step["o"] == first["o"])
        return (sum(fits[:2]), own, int(fits[2]), int(number <= killed_at), number if number <= killed_at else -number)

    return max(same, key=rank)


def _unknown_weights(reference: Record, life: Record, killed_at: int) -> Finding:
    """Say what can be said of weights that are those of no step."""
    first, steps = life.steps[0], reference.steps
    anew = steps[0]
    names = _names(life, first)
    if len(first.get("each", ())) > 1:
        equal = [
            (sum(a == b for a, b in zip(step.get("each", ()), first["each"], strict=False)), number)
            for number, step in enumerate(steps[: killed_at + 1])
            if len(step.get("each", ())) == len(first["each"])
        ]
        count, number = max(equal, default=(0, 0))
        if count and number:
            wrong = [n for n, (a, b) in enumerate(zip(steps[number]["each"], first["each"], strict=True)) if a != b]
            fresh = all(first["each"][n] == anew["each"][n] for n in wrong)
            items = tuple((names[n], f"that of step {number}", "another") for n in wrong[:8])
            facts = {"names": [names[n] for n in wrong], "fresh": fresh, "of": len(first["each"])}
            return Finding(kind="partial weights", step=number, at_resume=True, items=items, facts=facts)
    near = [(_distance(step["wv"], first["wv"]), -number) for number, step in enumerate(steps[: killed_at + 1])]
    distance, negative = min(near, default=(1.0, 0))
    if distance < _ROUNDED and _is_rounded(first["wv"]):
        facts = {"error": distance}
        return Finding(kind="rounded weights", step=-negative, at_resume=True, facts=facts)
    if not first["s"] and first["lr"] == anew["lr"]:
        return Finding(
            kind="starts over", step=0, at_resume=True, facts={"saved": True, "killed_at": killed_at, "new": True}
        )
    return Finding(kind="unknown weights", step=killed_at, at_resume=True)


# ---- step by step


def _compare_steps(reference: Record, life: Record, began: int, *, to_end: bool) -> tuple[list[Finding], list[str]]:
    steps = reference.steps[began:]
    findings = _at_resume(reference, life, began, 0)
    notes = []
    first = life.steps[0]
    others = _drawn(reference, began, first)
    if not findings:
        stepped = {first["o"]}
        last: dict[int, tuple[int, Step, Step]] = {}  # of each optimizer
        if others:
            notes.append(
                f"the generators ({', '.join(others)}) are not those of the uninterrupted run at step {began}; so far "
                "nothing depends on them"
            )
        for number, (left, right) in enumerate(zip(steps, life.steps, strict=False)):
            if right["o"] not in stepped and (findings := _at_resume(reference, life, began, number)):
                return findings, notes
            stepped.add(right["o"])
            if left["en"] != right["en"]:
                notes += [_UNCOMPARED] if _UNCOMPARED not in notes else []
            found = _of_step(reference, life, began + number, left, right, last.get(right["o"]), at_resume=number == 0)
            if found is not None:
                return [found], [] if found.kind == "generators" else notes
            last[right["o"]] = began + number, left, right
        if to_end and len(life.steps) != len(steps):
            kind = "more steps" if len(life.steps) > len(steps) else "fewer steps"
            facts = {"left": len(reference.steps), "right": began + len(life.steps)}
            findings = [Finding(kind=kind, step=began + min(len(life.steps), len(steps)), facts=facts)]
        elif to_end and reference.end is not None and life.end is not None and reference.end["w"] != life.end["w"]:
            made = (_of_options(reference, life, *step) for step in last.values())
            end = Finding(kind="unexplained", step=len(reference.steps), items=(("weights at the end", "", ""),))
            findings = [next((one for one in made if one is not None), end)]
    return findings, notes


def _at_resume(reference: Record, life: Record, began: int, number: int) -> list[Finding]:
    """Compare the state before the first step of an optimizer, and its data; several things may be wrong at once."""
    left, right = reference.steps[began + number], life.steps[number]
    at: dict[str, Any] = {"step": began + number, "at_resume": number == 0}
    findings = []
    if not _same_state(left, right):
        findings.append(_optimizer_state(reference, left, right, at))
    if left["lr"] != right["lr"]:
        facts = {"left": left["lr"], "right": right["lr"], "fresh": right["lr"] == reference.steps[0]["lr"],
                 "sched": left["sched"], "sched_now": right["sched"]}  # fmt: skip
        findings.append(Finding(kind="learning rate", items=_items(["lr"], left, right), facts=facts, **at))
    if not _same(left, right, "b"):
        findings.append(Finding(kind="buffers", **at))
    if not _same(left, right, "e"):
        fresh = _same(reference.steps[0], right, "e")
        findings.append(Finding(kind="other modules", facts={"fresh": fresh}, **at))
    if left["scale"] != right["scale"]:
        findings.append(Finding(kind="loss scale", items=_items(["scale"], left, right), **at))
    if findings:  # the gradients tell nothing then; the data do
        data = _data(reference, life, began + number, left, right, at_resume=number == 0)
        findings += [] if data is None else [data]
    return findings


def _of_step(
    reference: Record,
    life: Record,
    number: int,
    left: Step,
    right: Step,
    last: tuple[int, Step, Step] | None,
    *,
    at_resume: bool,
) -> Finding | None:
    """Compare a step, all steps before which were equal; ``last`` is the one before of its optimizer, if any."""
    data = _data(reference, life, number, left, right, at_resume=at_resume)
    if data is not None:
        return data
    fields = _unequal(left, right)
    if len(left["x"]) != len(right["x"]):
        fields = [name for name in fields if name != "x"]
    if not fields:
        return None
    items = _items(fields, left, right)
    at: dict[str, Any] = {"step": number, "at_resume": at_resume, "items": items}
    if left["gn"] != right["gn"] and not {"w", "s"} & set(fields) and not _drawn(reference, number, right):
        return Finding(kind="frozen weights", facts={"left": left["gn"], "right": right["gn"]}, **at)
    if {*fields} <= {"x", "g"}:
        drawn = _drawn(reference, number, right)
        seen = bool(left["x"] or left["d"])
        return Finding(kind="generators" if drawn else "carried", facts={"drawn": drawn, "seen": seen}, **at)
    # What made other weights of equal ones is the step before: an averaged copy of them only follows.
    has_other_weights = bool({"w", "s"} & set(fields))
    if has_other_weights and last is not None and (found := _of_options(reference, life, *last)) is not None:
        return found
    if "lr" in fields:
        facts = {"left": left["lr"], "right": right["lr"], "fresh": False, "sched": left["sched"],
                 "sched_now": right["sched"]}  # fmt: skip
        return Finding(kind="learning rate", facts=facts, **at)
    for name, kind in (("e", "other modules"), ("b", "buffers")):
        if name in fields and not has_other_weights:
            return Finding(kind=kind, facts={"fresh": False, "later": True}, **at)
    return Finding(kind="unexplained", facts={"fields": fields}, **at)


def _of_options(reference: Record, life: Record, number: int, left: Step, right: Step) -> Finding | None:
    """Say which options of its optimizer a step was made with that are others; None if none are, or none are known."""
    options, now = left.get("opt") or {}, right.get("opt") or {}
    others = [name for name in options if name in now and options[name] != now[name]]
    if not others:
        return None
    items = tuple((name, _short(options[name]), _short(now[name])) for name in others)
    kind = reference.optimizers.get(left["o"], {}).get("kind", "the optimizer")
    facts = {"optimizer": kind, "names": others}
    return Finding(kind="options", step=number, at_resume=right is life.steps[0], items=items, facts=facts)


def _data(reference: Record, life: Record, number: int, left: Step, right: Step, *, at_resume: bool) -> Finding | None:
    """Say how the data of a step differ; None if they do not, or if they could not be seen."""
    if left.get("open") or right.get("open"):
        return None
    name = "x" if left["x"] and right["x"] else "d"
    mine, other = _data_of(left, name), _data_of(right, name)
    if not mine or not other:
        return None
    short = min(len(mine), len(other))
    batches, batches_now = _data_of(left, "d"), _data_of(right, "d")
    if name == "x":
        # What goes in later depends on the weights and the generators: the first input is data alone.
        if mine[:1] == other[:1] and len(mine) == len(other):
            return None
        if mine[-short:] == other[-short:]:
            # What goes in beside them and leaves the gradients as they are is an evaluation. Most steps have none.
            usual = Counter(len(step[name]) for step in reference.steps).most_common(1)[0][0]
            return None if left["g"] == right["g"] or (at_resume and len(other) == usual) else Finding(
                kind="fewer batches", step=number, at_resume=at_resume, facts={"left": len(mine), "right": len(other)}
            )  # fmt: skip
        if batches and batches_now and batches[-1:] == batches_now[-1:]:
            drawn = _drawn(reference, number, right)
            return Finding(
                kind="changed inputs", step=number, at_resume=at_resume, facts={"drawn": drawn, "loaders": life.loaders}
            )
    elif mine[-short:] == other[-short:]:
        return None
    where: dict[int, list[int]] = {}
    for place, step in enumerate(reference.steps):
        for value in _data_of(step, name)[:1]:
            where.setdefault(value, []).append(place)
    places = where.get(other[0], [])
    facts: dict[str, Any] = {
        "loaders": life.loaders,
        "loader_seen": bool(batches_now),
        "epochs": stages(reference.steps),
    }
    facts["drawn"] = _drawn(reference, number, right)
    items = (("data of the step", _hex(mine[0]), _hex(other[0])),)
    at: dict[str, Any] = {"step": number, "at_resume": at_resume, "items": items}
    if not places:
        return Finding(kind="other data" if batches_now else "own data", facts=facts, **at)
    starts = [0, *facts["epochs"]]
    begins = [place for place in places if place in starts]
    began = max(start for start in starts if start <= number)
    # Where all epochs have one order it is the one of the step that begins again.
    place = min(begins or places, key=lambda one: (one != began, abs(one - number)))
    facts["place"] = place
    other_began = max(start for start in starts if start <= place)
    if begins and number not in starts:
        facts["epoch_began"] = began
    facts["same_place"] = began != other_began and number - began == place - other_began
    return Finding(kind="data again" if place < number else "data left out", facts=facts, **at)


def _drawn(reference: Record, number: int, right: Step) -> list[str]:
    """Return the generators that a step draws from, and that are others than in the uninterrupted life."""
    near = reference.steps[max(0, number - 1) : number + 2]
    return [
        name
        for name, value in reference.steps[number]["r"].items()
        if right["r"].get(name) != value and len({step["r"].get(name) for step in near}) > 1
    ]


def _data_of(step: Step, name: str) -> list[int]:
    return [value[1] if name == "d" else value for value in step[name]]


def _optimizer_state(reference: Record, left: Step, right: Step, at: dict[str, Any]) -> Finding:
    missing = sorted(left["s"].keys() - right["s"].keys())
    items = tuple(
        (f"optimizer state {key}", _hex(left["s"].get(key)), _hex(right["s"].get(key)))
        for key in sorted(left["s"].keys() | right["s"].keys())
        if left["s"].get(key) != right["s"].get(key)
    )
    kind = reference.optimizers.get(left["o"], {}).get("kind", "the optimizer")
    facts: dict[str, Any] = {
        "optimizer": kind,
        "missing": missing,
        "keys": [item[0].rpartition(" ")[2] for item in items],
    }
    if not right["s"]:
        return Finding(kind="optimizer lost", items=items, facts=facts, **at)
    wrong = [key for key in left["sv"] if key in right["sv"] and left["s"].get(key) != right["s"].get(key)]
    near = bool(wrong) and all(_distance(left["sv"][key], right["sv"][key]) < _ROUNDED for key in wrong)
    if near and not missing and any(_is_rounded(right["sv"][key]) for key in wrong):
        return Finding(kind="optimizer rounded", items=items, facts=facts, **at)
    zero = [key for key in wrong if not any(_floats(right["sv"][key]))]
    if missing or zero:
        facts["missing"] = missing or zero
        return Finding(kind="optimizer lost", items=items, facts=facts, **at)
    return Finding(kind="optimizer", items=items, facts=facts, **at)


# ---- fields of a row

_UNCOMPARED = (
    "there are modules beside the one that trains (an averaged copy, a second model) in one of the lives only, at the "
    "first step of an optimizer: those were not compared"
)


def _same(left: Step, right: Step, name: str) -> bool:
    if name == "e" and left["en"] != right["en"]:
        # Modules that one life has and the other has not made yet, or no more, tell nothing; those of both do.
        few, many = sorted((left["ee"] or [], right["ee"] or []), key=len)
        return not Counter(few) - Counter(many)
    whole, whole_now = left.get("whole"), right.get("whole")
    if whole is not None and whole_now is not None and whole.get(name) != whole_now.get(name):
        return False
    return bool(left[name] == right[name])


def _same_state(left: Step, right: Step) -> bool:
    return _same(left, right, "s")


def _unequal_state(left: Step, right: Step) -> list[str]:
    return [name for name in ("w", "s", "b", "e") if not _same(left, right, name)] + (
        ["lr"] if left["lr"] != right["lr"] else []
    )


def _unequal(left: Step, right: Step) -> list[str]:
    fields = _unequal_state(left, right) + [name for name in ("x", "g") if left[name] != right[name]]
    if left.get("open") or right.get("open"):  # it was killed before its closure had run
        return [name for name in fields if name not in ("b", "x", "g")]
    return fields


_WORDS = {"w": "weights", "s": "optimizer state", "b": "buffers", "e": "other modules", "lr": "learning rate",
          "x": "inputs of the model", "g": "gradients", "r": "generators", "scale": "loss scale"}  # fmt: skip


def _items(fields: Sequence[str], left: Step, right: Step) -> tuple[tuple[str, str, str], ...]:
    return tuple((_WORDS[name], _short(left[name]), _short(right[name])) for name in fields)


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return ", ".join(f"{number:.6g}" for number in value[:4])
    if isinstance(value, int):
        return _hex(value)
    text = str(value)
    return text if len(text) < 60 else f"{text[:59]}…"


def _hex(value: Any) -> str:
    return "nothing" if value is None else f"{int(value):08x}"


def _names(life: Record, first: Step) -> list[str]:
    known = life.optimizers.get(first["o"], {}).get("names", [])
    return [known[n] if n < len(known) and known[n] else f"weight {n}" for n in range(len(first.get("each", ())))]


def _floats(text: str) -> tuple[float, ...]:
    data = base64.b64decode(text)
    return struct.unpack(f"{len(data) // 4}f", data)


def _distance(left: str, right: str) -> float:
    """Return how far values are from others, relative to their size."""
    a, b = _floats(left), _floats(right)
    if len(a) != len(b) or not a:
        return 1.0
    size = sum(abs(x) for x in a)
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / size if size else float(a != b)


def _is_rounded(text: str) -> bool:
    """Tell whether values of 32 bits carry no more than 16 bits of a shorter format."""
    words = struct.unpack(f"{len(base64.b64decode(text)) // 4}I", base64.b64decode(text))
    return bool(words) and all(word & 0x1FFF == 0 for word in words)
