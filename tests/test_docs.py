"""Every code block of the documentation runs; every make target and file it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """All Python blocks of a page run one after the other in a clean folder, in a process of their own."""
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks(page, "python")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_commands_exist() -> None:
    """Every `make` target and every `holdfast` sub-command the pages name exists."""
    makefile = (ROOT / "Makefile").read_text()
    commands = (ROOT / "src/holdfast/cli/main.py").read_text()
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).splitlines():
            if not line or line.startswith("#"):
                continue
            tool, word = line.split()[:2]
            assert tool in ("make", "holdfast"), f"{page.name}: {line}"
            if tool == "make":
                assert re.search(rf"^{word}:", makefile, re.MULTILINE), f"{page.name}: {line}"
            else:
                assert word in commands, f"{page.name}: {line}"


def test_links_resolve() -> None:
    """Every relative link of a page leads to a file."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
