"""The report of a verification: one value for scripts with and without a `Checkpointer`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .words import advice

if TYPE_CHECKING:
    from .lives import Life
    from .matching import Finding
    from .records import Record
    from .resume import Examined
    from .scripts import KillAt

__all__ = ["Cause", "LifeReport", "Report", "of_examined", "of_findings"]

_VERDICTS = {
    "starts over": "starts over", "cannot resume": "cannot resume", "no training": "ends without training",
    "not repeatable": "not repeatable",
}  # fmt: skip
_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why something differs.

    Attributes:
        kind: what differs, in a word or two.
        text: the difference, or the likely cause alone where ``why`` is empty.
        why: the usual cause.
        without: how to mend it in the script as it is.
        with_holdfast: how it is mended with Holdfast.
    """

    kind: str
    text: str
    why: str = ""
    without: str = ""
    with_holdfast: str = ""


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
        verdict: "exact", "differs", "starts over", "cannot resume", "ends without training" or "not repeatable".
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
    causes, what, difference, verdict = [], "", None, "exact"
    seen: set[str] = set()
    for life, rank, finding in findings:
        texts = advice(finding)
        if not what:
            verdict = _VERDICTS.get(finding.kind, "differs")
            where = f" (rank {rank})" if rank else ""
            after = "" if life < 2 else f"; the first {life - 1} resume(s) were right, this is life {life + 1}"
            rows = [f"\n  {name}: {left} in the uninterrupted run, {right} here" for name, left, right in finding.items]
            what = texts.what + where + after + "".join(rows[:_SHOWN])
            difference = {
                "kind": finding.kind, "step": finding.step, "life": life + 1, "rank": rank,
                "resumed": lives[life].began if life else None, "saved": lives[life - 1].why if life else "",
                "items": [{"item": name, "uninterrupted": a, "resumed": b} for name, a, b in finding.items],
            }  # fmt: skip
        if finding.kind not in seen:
            seen.add(finding.kind)
            causes.append(
                Cause(
                    kind=finding.kind, text=texts.what, why=texts.cause, without=texts.without,
                    with_holdfast=texts.with_holdfast,
                )
            )  # fmt: skip
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
