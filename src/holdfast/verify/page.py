"""A report as one HTML page: strips of steps, coloured where a life differs (verify-resume) or lost some (attack)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from .report import LifeReport, Report
from .survival import FINE, OUTCOMES, Survival, Trial

__all__ = ["page", "survival_page"]

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
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{what}: {shown}</title>',
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
