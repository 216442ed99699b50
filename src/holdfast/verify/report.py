"""The report of a verification: one value for scripts with and without a `Checkpointer`, as text, JSON and HTML.

The page shows strips of steps, coloured where a life differs (verify-resume) or lost some (attack).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from .survival import FINE, OUTCOMES, Survival, Trial
from .words import Cause, advice

if TYPE_CHECKING:
    from .lives import Life
    from .matching import Finding
    from .resume import Examined
    from .scripts import KillAt
    from .trace import Record

__all__ = ["LifeReport", "Report", "of_examined", "of_findings", "page", "survival_page"]

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
_TRIALS = 300  # of more kills those that lost something are shown first
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
    return _document(
        "verify-resume", "Is the resume of {} exact?", report.command, report.verdict, is_good=report.exact,
        text=f"{report.steps} steps uninterrupted, {len(report.lives)} lives of the run that was killed, "
        f"{seconds:.0f} s. Blue: uninterrupted. Green: the same step again. Red: another step. Yellow below: saved. "
        "Black edge: killed.",
        body=body, lines=report.lines(),
    )  # fmt: skip


def survival_page(found: Survival, seconds: float) -> str:
    """Return the page of an attack."""
    trials = list(enumerate(found.trials, 1))
    shown = sorted(sorted(trials, key=lambda one: one[1].outcome in FINE)[:_TRIALS], key=lambda one: one[0])
    body = [] if len(shown) == len(trials) else [f"<p>{len(shown)} of {len(trials)} kills are shown.</p>"]
    for number, trial in shown:
        kill = trial.kill
        lost = "" if kill.lost is None else ", power cut"
        where = "" if trial.began is None else f" (step {trial.began})"
        name = f"{number}: killed after step {kill.at} ({kill.landed}){lost}: {OUTCOMES[trial.outcome]}{where}"
        body.append(f'<div class="name{"" if trial.outcome in FINE else " wrong"}">{escape(name)}</div>')
        body += _survival_strip(found, trial)
    return _document(
        "attack", "Does the saving of {} survive?", found.command,
        "survives" if found.survives else "does not survive", is_good=found.survives,
        text=f"{found.steps} steps, {len(found.trials)} kills, {seconds:.0f} s. A strip for each kill. Green: steps "
        "that were still there after it. Grey: steps that no complete checkpoint had. Red: steps that one had, and "
        "that were lost. Yellow below: saved. Black edge: killed.",
        body=body, lines=found.lines(),
    )  # fmt: skip


def _document(
    what: str, question: str, command: Sequence[str], verdict: str, *, is_good: bool, text: str, body: Iterable[str],
    lines: Iterable[str],
) -> str:  # fmt: skip
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
    return _strip(
        total, lambda step: _mark(report, life, step), saves=report.saves if life is None else (),
        killed=None if life is None else life.killed_after,
    )  # fmt: skip


def _survival_strip(found: Survival, trial: Trial) -> Iterator[str]:
    kept = 0 if trial.refused or trial.began is None else trial.began

    def mark(step: int) -> str:
        if step < kept:
            return "same"
        return "bad" if step < trial.newest else "none"

    return _strip(found.steps, mark, saves=found.saved, killed=trial.kill.at)


def _strip(total: int, mark: Callable[[int], str], *, saves: Sequence[int], killed: int | None) -> Iterator[str]:
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
