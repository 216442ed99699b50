"""The page and the example of Keras run."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_kit import pages_of, run_example, run_page


@pytest.mark.parametrize("page", pages_of("keras"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All Python blocks of the page run one after the other."""
    run_page(page, tmp_path)


def test_example(tmp_path: Path) -> None:
    """The example is killed by itself, goes on, and finds the same weights as without."""
    said = run_example("keras_fit.py", tmp_path, "--folder", str(tmp_path))
    assert "the same weights, bit by bit" in said
