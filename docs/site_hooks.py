"""What the site shows otherwise than the Markdown in docs/, which keeps reading well by itself.

mkdocs calls these functions while it builds (`mkdocs.yml`, `make docs`): pages of the folder above become pages of the
site, the order of the pages is that of docs/index.md, and the names in docs/reference.md become their docstrings, which
griffe reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

__all__ = ["Examples", "on_config", "on_files", "on_page_markdown"]

_ROOT = Path(__file__).resolve().parents[1]
# Pages that lie beside README.md -> their names on the site. README itself is for those who see no site.
_ABOVE = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
_SITE = {**_ABOVE, "CHANGELOG.md": "changelog.md"}


def on_config(config: Any) -> Any:
    """Take the order of the pages from docs/index.md."""
    nav: list[Any] = [{"Holdfast": "index.md"}]
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", _index(), re.MULTILINE | re.DOTALL):
        pages = [{name: page} for name, page in re.findall(r"\[([^]]+)\]\(([\w.-]+\.md)\)", _numbered(body))]
        if pages:
            nav.append({title: pages})
    nav.append({"About": [{Path(name).stem.capitalize(): page} for name, page in _SITE.items()]})
    config["nav"] = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie above docs/."""
    for name, page in _SITE.items():
        text = (_ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the Markdown of one page that of the site."""
    text = re.sub(r"^```(\w+) [\w/-]+$", r"```\1", markdown, flags=re.MULTILINE)  # which tests run a block
    text = text.replace("](../README.md)", "](index.md)").replace("](README.md)", "](index.md)")
    for name, target in _SITE.items():
        text = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}", f"]({target}", text)
    # Scripts and tests are in the checkout, not on the site: their names stay.
    text = re.sub(r"\[([^]]+)\]\((?:\.\./)?((?:examples|src|tests|benchmarks)/[^)]*)\)", r"\1 (`\2`)", text)
    if page.file.src_uri == "reference.md":
        text = re.sub(r"^- `(holdfast[\w.]+)`$", r"::: \1", text, flags=re.MULTILINE)
    return _spaced_lists(text)


class Examples(griffe.Extension):
    """Our docstrings have one "Example:" each; the parser knows "Examples:" alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def _index() -> str:
    return (_ROOT / "docs/index.md").read_text(encoding="utf-8")


def _numbered(body: str) -> str:
    return "\n".join(line for line in body.splitlines() if re.match(r"\d+\. ", line))


def _spaced_lists(text: str) -> str:
    """Put an empty line before lists that follow a paragraph, as this dialect of Markdown needs it."""
    lines: list[str] = []
    fenced = False
    item = re.compile(r"(?:[-*]|\d+\.) ")
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        starts = item.match(line) and before and not before.startswith(" ") and not item.match(before)
        if starts and not fenced and not _in_list(lines):
            lines.append("")
        fenced ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _in_list(lines: list[str]) -> bool:
    """Tell whether the paragraph at the end is one of a list."""
    for line in reversed(lines):
        if not line:
            return False
        if re.match(r"\s*(?:[-*]|\d+\.) ", line):
            return True
    return False
