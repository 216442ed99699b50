"""The page about Lightning runs, and the example."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_kit import pages_of, run_example, run_page


@pytest.mark.parametrize("page", pages_of("lightning"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All Python blocks of a page run one after the other in a clean folder, in a process of their own."""
    run_page(page, tmp_path, timeout_s=240)


def test_example(tmp_path: Path) -> None:
    """The example kills itself, goes on, and finds the same weights."""
    said = run_example("lightning_resume.py", tmp_path)
    assert "the first life ended with status -9" in said
