"""`make docs` builds a site whose links lead somewhere, and which a browser shows without asking anybody else.

In the sweeps, and in `make test-frameworks`: it installs packages and builds for half a minute. Each time
`tests/test_docs.py` follows the links of the pages as they are written, and CI builds the site.
"""

from __future__ import annotations

import fcntl
import functools
import html.parser
import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_kit import ROOT

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]
STORES = ROOT / "tests" / "stores" / "node_modules"


class _Page(html.parser.HTMLParser):
    """The links of one page, and what of it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names |= {value for key in ("id", "name") if (value := found.get(key))}
        self.links += [value for key in ("href", "src") if (value := found.get(key)) and tag != "form"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site (strict: a link of the Markdown that leads nowhere fails); return a copy of it."""
    copy = tmp_path_factory.mktemp("site") / "site"
    with open(ROOT / "Makefile") as lock:  # two processes of pytest would build in one folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.copytree(ROOT / "build" / "site", copy)
    return copy


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """Return the text of each page."""
    return {path.name: path.read_text() for path in sorted(site.glob("*.html"))}


def test_links(site: Path, pages: dict[str, str]) -> None:
    """Every link and every picture of every page is there, with its anchor; none leads to a file of the checkout."""
    parsed = {name: _Page(text) for name, text in pages.items()}
    for name, page in parsed.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if ":" in target or name == "404.html":  # the page for what is not there has links from the root
                continue
            assert not target or (site / target).exists(), f"{name}: {link}"
            if anchor and (target or name) in parsed:
                assert anchor in parsed[target or name].names, f"{name}: {link}"


def test_every_page_and_every_name_is_there(pages: dict[str, str]) -> None:
    """All of docs/ is built, in the order of the index, and the reference has the docstrings."""
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= set(pages)
    reference = pages["reference.html"]
    for name in ("holdfast.Checkpointer", "holdfast.save", "holdfast.storage.Storage", "holdfast.torch.TorchTrainer"):
        assert f'id="{name}"' in reference, name
    assert reference.count("doc-heading") > 300
    assert "<li>- " not in "".join(pages.values())


@pytest.fixture
def origin(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(
    shutil.which("node") is None or not (STORES / "playwright-core").exists(), reason="make test-frameworks installs it"
)
def test_in_a_browser(pages: dict[str, str], origin: str, tmp_path: Path) -> None:
    """At 1400 and 390 pixels: a silent console, no request to elsewhere, no page wider than the window; it finds."""
    names = ["index.html", *(name for name in pages if name not in ("404.html", "index.html"))]
    done = subprocess.run(
        ["node", Path(__file__).with_name("site.mjs"), json.dumps([origin, names, [1400, 390]])],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "STORES": str(STORES), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["told"]) == 2 * len(names)
    wrong = [one for one in result["told"] if one["errors"] or one["foreign"] or one["wider"] > 0]
    assert not wrong, json.dumps(wrong, indent=1)
    assert result["results"] > 3
