"""The examples in the documentation run."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_kit import pages_of, run_example, run_page


@pytest.mark.parametrize("page", pages_of("ray_tune"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """Every Python block of the page, in order, in one process."""
    run_page(page, tmp_path)


def test_the_example_runs(tmp_path: Path) -> None:
    """A small population, to its end."""
    said = run_example("ray_tune_pbt.py", tmp_path, "--trials", "2", "--epochs", "2", "--folder", "t", timeout_s=200)
    assert "best accuracy" in said
