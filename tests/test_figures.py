"""Figures in the docs are those of the files in `benchmarks/results/`, and none stands without its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import figures

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_as_the_files_have_them(page):
    """What stands between the marks of a page is what `python -m benchmarks.figures` would write."""
    text = page.read_text()
    assert text.count("<!-- measured ") == text.count("<!-- end -->")
    again = figures.rewritten(text, depth=len(page.relative_to(ROOT).parts) - 1)
    assert again == text, "run: python -m benchmarks.figures"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_figure_without_its_file(page):
    """Outside of the blocks a page with measurements has bounds and goals alone; others have no broken numbers."""
    found = figures.figures_without_file(page.read_text())
    if page.stem not in {"performance", "index"}:
        found = [figure for figure in found if re.match(r"\d+\.\d", figure)]  # settings are whole numbers
    assert not found


def test_what_was_missed_is_shown(tmp_path):
    """A goal that is not reached is in the table, and a changed figure is noticed."""
    name, measured = figures.result("save")
    text = figures.rewritten("<!-- measured save goals -->\n<!-- end -->\n", depth=0)
    assert name in text
    missed = [goal["what"] for goal in measured["goals"] if goal["reached"] is False]
    for what in missed:
        assert re.search(rf"^\| {re.escape(what)} \|.*\*\*no\*\* \|$", text, re.MULTILINE), what
    assert figures.rewritten(text.replace("| yes |", "| no |"), depth=0) == text
    assert figures.figures_without_file("it took 0.3 s, at most <= 20 us, goal 5 ms, `1.5 x`, 1.27 x") == [
        "0.3 s",
        "1.27 x",
    ]
