"""The report of a verification as one HTML page: two strips of steps, coloured where they differ."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from html import escape

from .report import LifeReport, Report

__all__ = ["page"]

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
    """Return the page."""
    command = escape(shlex.join(report.command))
    kind = "exact" if report.exact else "wrong"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>verify-resume: {command}</title>',
        f"<style>{_STYLE}</style><h1>Is the resume of <code>{command}</code> exact?</h1>",
        f'<p class="{kind}"><strong>{escape(report.verdict.upper())}</strong></p>',
        f"<p>{report.steps} steps uninterrupted, {len(report.lives)} lives of the run that was killed, "
        f"{seconds:.0f} s. Blue: uninterrupted. Green: the same step again. Red: another step. Yellow below: saved. "
        "Black edge: killed.</p>",
        '<div class="name">uninterrupted</div>', *_strip(report, None),
    ]  # fmt: skip
    for number, life in enumerate(report.lives):
        began = "began at an unknown step" if life.began is None else f"began at step {life.began}"
        end = "ended" if life.killed_after is None else f"killed after step {life.killed_after} ({life.why})"
        if life.status:
            end = f"ended with exit status {life.status}"
        parts.append(f'<div class="name">life {number + 1}: {began}, made {life.steps} steps, {escape(end)}</div>')
        parts += _strip(report, life)
    lines = "\n".join(report.lines())
    parts.append(f"<h2>Report</h2><pre>{escape(lines)}</pre>")
    return "\n".join([*parts, "</html>\n"])


def _strip(report: Report, life: LifeReport | None) -> Iterator[str]:
    total = max([report.steps, *((one.began or 0) + one.steps for one in report.lives)])
    size = max(1, -(-total // _CELLS))
    yield '<div class="strip">'
    for begin in range(0, total, size):
        cell = range(begin, min(begin + size, total))
        marks = [_mark(report, life, step) for step in cell]
        first = "bad" if "bad" in marks else marks[0]
        if life is None and any(step + 1 in report.saves for step in cell):
            first += " save"
        if life is not None and life.killed_after is not None and life.killed_after - 1 in cell:
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
