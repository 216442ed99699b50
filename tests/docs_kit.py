"""Runs the code blocks of the documentation.

A page whose first line is ``<!-- tests: frameworks/GROUP -->`` needs a package of that group: it is left out of the
main suite, and `tests/frameworks/GROUP/test_docs.py` runs it (`page_test`). On any other page the blocks that begin
with ```` ```python frameworks/GROUP ```` are run there, by themselves; ```` ```python notest ```` is run by no test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

__all__ = ["PAGES", "ROOT", "blocks", "group_of", "groups_of", "page_test", "pages_of", "run_example", "run_page"]

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w+(?: [\w/-]+)?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_GROUP = re.compile(r"<!-- tests: frameworks/([\w-]+) -->\n")


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of one language in a page, in order; "python frameworks/GROUP" for those of a group."""
    return [body for kind, body in _BLOCK.findall(page.read_text()) if kind == language]


def group_of(page: Path) -> str | None:
    """Return the framework group that runs a page, None for the main suite."""
    found = _GROUP.match(page.read_text())
    return found.group(1) if found else None


def groups_of(page: Path) -> set[str]:
    """Return all groups that have something of a page to run."""
    marks = re.findall(r"^```python frameworks/(\S+)$", page.read_text(), re.MULTILINE)
    return {*marks, *filter(None, [group_of(page)])}


def pages_of(group: str | None) -> list[Path]:
    """Return the pages with Python blocks that a group runs."""
    return [page for page in PAGES if _language(page, group) is not None]


def run_page(page: Path, folder: Path, *, group: str | None = None, timeout_s: float = 280) -> None:
    """Run the Python blocks of a page one after the other, in a clean folder and a process of their own.

    Args:
        page: whose blocks are run.
        folder: where.
        group: whose blocks; None is the main suite.
        timeout_s: bound of the whole.
    """
    script = folder / "page.py"
    script.write_text("\n\n".join(blocks(page, _language(page, group) or "python")))
    _run(script, folder=folder, timeout_s=timeout_s)


def page_test(group: str | None, *, timeout_s: float = 120, slow: Collection[str] = ()) -> Callable[..., None]:
    """Return the test of a group's pages: all Python blocks of each run, as `run_page` does it.

    Args:
        group: of frameworks; None is the main suite.
        timeout_s: for each page.
        slow: names of pages that run in CI's sweep instead.
    """
    pages = [pytest.param(page, marks=pytest.mark.slow if page.name in slow else ()) for page in pages_of(group)]

    @pytest.mark.parametrize("page", pages, ids=lambda page: page.name)
    def run(page: Path, tmp_path: Path) -> None:
        run_page(page, tmp_path, group=group, timeout_s=timeout_s)

    return run


def _language(page: Path, group: str | None) -> str | None:
    """Return what marks the blocks of a page that a group runs, None if it has none."""
    language = "python" if group_of(page) == group else f"python frameworks/{group}"
    return language if blocks(page, language) else None


def run_example(name: str, folder: Path, *arguments: str, timeout_s: float = 280) -> str:
    """Run a script of examples/ in a folder; returns what it printed."""
    return _run(ROOT / "examples" / name, *arguments, folder=folder, timeout_s=timeout_s)


def _run(script: Path, *arguments: str, folder: Path, timeout_s: float) -> str:
    commands = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # `holdfast` among them
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PATH": commands},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{script.name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
