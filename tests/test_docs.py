"""Every code block of the documentation runs; every make target and file it names exists."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_kit import NOTEBOOKS, PAGES, ROOT, blocks, groups_of, pages_of, run_forked, run_page
from ranks_kit import RankServer

from holdfast.cli.main import cli

_SLOW = {"not-models.md", "function-trainer.md", "migrate-from-ray-train.md", "migrate-from-composer.md", "interop.md"}


@pytest.mark.parametrize(
    "page", [page for page in pages_of(None) if page.name not in _SLOW], ids=lambda page: page.name
)
def test_python_blocks_run(ranks: RankServer, page: Path, tmp_path: Path) -> None:
    """All Python blocks of a page, one after the other, in a clean folder and a process of their own."""
    run_forked(ranks, page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages_of(None) if page.name in _SLOW], ids=lambda page: page.name)
def test_python_blocks_run_in_an_interpreter_of_their_own(page: Path, tmp_path: Path) -> None:
    """The pages whose scripts start interpreters themselves, or take long."""
    run_page(page, tmp_path, timeout_s=120)


def test_pages_of_frameworks_are_run() -> None:
    """A page that leaves blocks to a framework's group names one whose tests run it."""
    for page in PAGES:
        for group in groups_of(page):
            assert (ROOT / f"tests/frameworks/{group}/test_docs.py").exists(), f"{page.name}: {group}"


def test_notebooks_have_no_outputs() -> None:
    """What a cell prints is seen when it is run; a stored output would be stale, and big."""
    for page in NOTEBOOKS:
        cells = json.loads(page.read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), page.name


def test_commands_exist() -> None:
    """Every `make` target and every `holdfast` sub-command the pages name exists."""
    makefile = (ROOT / "Makefile").read_text()
    commands = (ROOT / "src/holdfast/cli/main.py").read_text()
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).splitlines():
            if not line or line.startswith(("#", "pip install ")):
                continue
            tool, word = line.split()[:2]
            assert tool in ("make", "holdfast"), f"{page.name}: {line}"
            if tool == "make":
                assert re.search(rf"^{word}:", makefile, re.MULTILINE), f"{page.name}: {line}"
            else:
                assert word.replace("-", "_") in commands, f"{page.name}: {line}"


@pytest.mark.slow
def test_the_commands_of_readme_work_after_its_example(tmp_path: Path) -> None:
    """Who types README's first example and then its commands, one after the other, gets no error."""
    (tmp_path / "train.py").write_text(blocks(ROOT / "README.md", "python")[0])
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    lines = "\n".join(blocks(ROOT / "README.md", "bash")).splitlines()
    commands = [line.partition("#")[0].split() for line in lines if line.startswith("holdfast ")]
    mine = [
        words for words in commands if not {"old.pt", "verify-resume"} & set(words) and "s3://" not in " ".join(words)
    ]
    assert len(mine) > 6
    for words in mine:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        differs = words[1] == "diff"  # two steps of a training
        assert done.returncode == int(differs), f"{words}:\n{done.stdout}\n{done.stderr}"


# What opens a run by its folder, and the configuration of workers, whose run is a name in a folder.
_FOLDER = r'(?:Checkpointer|Callback|CheckpointIO|Keeper|save_folder|folder)(?:=|\(\s*)"([\w./-]+)"'
_REPORTS = r'RunConfig\(\s*name="([\w-]+)",\s*storage_path="(\w+)"'


def test_every_page_has_a_run_folder_of_its_own() -> None:
    """Whoever tries one page after the other in one folder resumes no run of another page."""
    owner: dict[str, str] = {}
    for page in PAGES:
        for kind in ("python", *(f"python frameworks/{group}" for group in groups_of(page))):
            for block in blocks(page, kind):
                for found in re.findall(f"{_FOLDER}|{_REPORTS}", block):
                    name = "/".join(filter(None, found))
                    assert owner.setdefault(name, page.name) == page.name, f"{page.name}: {name} is {owner[name]}'s"
    assert len(owner) > 40


def test_links_resolve() -> None:
    """Every relative link of a page leads to a file, and to a heading of it if it names one."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_files_of_the_source_exist() -> None:
    """Each `folder/file.py` that a page names is there, of the two pages for developers each `file.py`, too.

    A `*` stands for letters.
    """
    folders = ("src", "tests", "examples", "benchmarks")
    files = "\n".join(path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    num_named = 0
    for page in PAGES:
        text = re.sub(r"^```(?:python|sh|bash|yaml)\b.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        names = re.findall(r"(?<![\w./])(?:[\w-]+/)+[\w*]+\.py\b", text)
        if page.name in ("ARCHITECTURE.md", "CONTRIBUTING.md"):
            names += re.findall(r"`(\w+\.py)`", text)
        for name in names:
            ending = re.escape(name).replace(r"\*", "[^/\n]*")
            assert re.search(f"/{ending}$", files, re.MULTILINE), f"{page.name}: {name}"
            num_named += 1
    assert num_named > 100


def anchors(page: Path) -> set[str]:
    """Return what links to the headings of a page are called: in lower case, without punctuation, with hyphens."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_page_of_the_command_line_names_every_option() -> None:
    """docs/cli.md has every command in a heading, each with all of its options and no others."""
    page = (ROOT / "docs/cli.md").read_text()
    sections = {
        name: body
        for title, body in re.findall(r"^## holdfast ([\w, -]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        for name in title.split(", ")
    }
    commands = cli.commands
    assert sorted(sections) == sorted(commands)
    for name, command in commands.items():
        known = {word for option in command.params for word in (*option.opts, *option.secondary_opts) if word[0] == "-"}
        table = "\n".join(line for line in sections[name].splitlines() if line.startswith("| `-"))
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", table)) == known, f"docs/cli.md: {name}"


def test_the_reference_names_everything_that_is_public() -> None:
    """docs/reference.md names what `holdfast` and its modules export, each value once."""
    listed = re.findall(r"^- `(holdfast[\w.]+)`$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    places = [name.rpartition(".") for name in listed]
    named = [id(getattr(importlib.import_module(module), member)) for module, _, member in places]
    assert len(listed) == len(set(listed))
    modules = {module for module, _, _ in places}
    assert {"holdfast", "holdfast.storage", "holdfast.torch", "holdfast.callbacks", "holdfast.core"} <= modules
    for module in sorted(modules):
        home = importlib.import_module(module)
        missing = [name for name in home.__all__ if id(getattr(home, name)) not in named]
        assert not missing, f"docs/reference.md does not name {module}: {missing}"


def test_messages_quoted_are_those_of_the_source() -> None:
    """Each message in docs/troubleshooting.md is one that the source has, with "..." for what it fills in."""
    said = "\n".join(sorted(messages()))
    quoted = re.findall(r"^> `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 50
    for quote in quoted:
        parts = [re.escape(part) for part in quote.split("...") if part.strip()]
        assert re.search(r"[^\n]*".join(parts), said), f"docs/troubleshooting.md: no message says {quote!r}"


def messages() -> set[str]:
    """Return all texts in the source; what they fill in is left out."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.replace("\n", " "))
            elif isinstance(node, ast.JoinedStr):
                texts = [part.value if isinstance(part, ast.Constant) else " ... " for part in node.values]
                found.add("".join(texts).replace("\n", " "))
    return found


def test_the_index_has_every_page() -> None:
    """docs/index.md links to every page of docs/, once; its numbers go on from one heading to the next."""
    index = (ROOT / "docs/index.md").read_text()
    numbers = [int(number) for number in re.findall(r"^(\d+)\. \[", index, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    linked = re.findall(r"^\d+\. \[[^]]+\]\(([\w.-]+\.md)\)", index, re.MULTILINE)
    assert sorted(linked) == sorted(
        page.name for page in PAGES if page.parent == ROOT / "docs" and page.stem != "index"
    )
