"""The page of this group runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_kit import pages_of, run_page


@pytest.mark.parametrize("page", pages_of("optuna"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All Python blocks of a page run one after the other in a process of their own."""
    run_page(page, tmp_path)
