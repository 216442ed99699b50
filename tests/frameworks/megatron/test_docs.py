"""The page and the example of Megatron-Core run."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_kit import pages_of, run_example, run_page


@pytest.mark.parametrize("page", pages_of("megatron"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All Python blocks of the page run one after the other."""
    run_page(page, tmp_path)


def test_example(tmp_path: Path) -> None:
    """The example loses a rank, and one rank goes on from what two have left."""
    said = run_example("megatron_tp.py", tmp_path, "--folder", str(tmp_path))
    assert "2 attempts" in said
    assert "'step': 60" in said
