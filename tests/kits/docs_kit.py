"""Runs the code blocks of the documentation.

A page whose first line is ``<!-- tests: frameworks/GROUP -->`` needs a package of that group: it is left out of the
main suite, and `tests/frameworks/GROUP/test_docs.py` runs it (`page_test`). On any other page the blocks that begin
with ```` ```python frameworks/GROUP ```` are run there, by themselves; ```` ```python notest ```` is run by no test.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.testing import ForkServer

__all__ = [
    "NOTEBOOKS", "PAGES", "ROOT", "blocks", "group_of", "groups_of", "page_test", "pages_of", "run_example",
    "run_forked", "run_page",
]  # fmt: skip

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w+(?: [\w/-]+)?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_GROUP = re.compile(r"<!-- tests: frameworks/([\w-]+) -->\n")


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of one language in a page, in order; "python frameworks/GROUP" for those of a group.

    Those of a notebook are its cells of code.
    """
    if page in NOTEBOOKS:
        cells = json.loads(page.read_text())["cells"] if language == "python" else []
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
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
    """Return the pages and notebooks with Python blocks that a group runs."""
    return [page for page in (*PAGES, *NOTEBOOKS) if _language(page, group) is not None]


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


def run_forked(server: ForkServer, page: Path, folder: Path, *, timeout_s: float = 120) -> None:
    """As `run_page` for a page of the main suite, in a fork of a process that has torch in it already.

    Args:
        server: has this folder on its path.
        page: whose blocks are run.
        folder: where.
        timeout_s: bound of the whole.
    """
    script = folder / "page.py"
    script.write_text("\n\n".join(blocks(page, "python")))
    server.run("docs_kit:run_as_main", str(script), timeout_s=timeout_s).checked()


def run_as_main(script: str) -> None:
    """Be the process of a script, to the end of its interpreter."""
    folder = os.path.dirname(script)
    os.chdir(folder)
    sys.argv, sys.path = [script], [folder, *sys.path]
    os.environ |= _environment()
    runpy.run_path(script, run_name="__main__")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def page_test(group: str, *, timeout_s: float = 120) -> Callable[..., None]:
    """Return the test of a group's pages: all Python blocks of each run, as `run_page` does it.

    Args:
        group: of frameworks.
        timeout_s: for each page.
    """

    @pytest.mark.parametrize("page", pages_of(group), ids=lambda page: page.name)
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
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=folder,
        env={**os.environ, **_environment()},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{script.name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _environment() -> dict[str, str]:
    commands = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # `holdfast` among them
    return {"PYTHONPATH": str(ROOT / "src"), "PATH": commands}
