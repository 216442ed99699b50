"""Every code block of the documentation runs; every make target and file it names exists."""

from __future__ import annotations

import re

from docs_kit import PAGES, ROOT, blocks, group_of, page_test

_SLOW = {"function-trainer.md", "migrate-from-ray-train.md", "migrate-from-composer.md", "interop.md"}

test_python_blocks_run = page_test(None, slow=_SLOW)


def test_pages_of_frameworks_are_run() -> None:
    """A page that leaves its blocks to a framework's group names one whose tests run it."""
    for page in PAGES:
        group = group_of(page)
        assert group is None or (ROOT / f"tests/frameworks/{group}/test_docs.py").exists(), f"{page.name}: {group}"


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
