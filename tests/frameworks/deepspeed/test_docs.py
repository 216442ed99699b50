"""The page and the example of DeepSpeed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_kit import pages_of, run_example, run_page


@pytest.mark.parametrize("page", pages_of("deepspeed"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All Python blocks of the page run one after the other."""
    run_page(page, tmp_path)


def test_example(tmp_path: Path) -> None:
    """The example loses a rank on the way, and puts the weights of both together."""
    said = run_example("deepspeed_zero.py", tmp_path, "--folder", str(tmp_path))
    assert "2 attempts" in said
    assert "weights of both ranks put together" in said
