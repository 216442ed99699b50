"""A run, or several runs, as a single HTML file that needs no server and no network.

`facts` collects what the page shows as JSON, with its curves in order and bounded; `render` puts the JSON, the style
sheet and the scripts into one file. In the browser `chart.js` draws charts, `page.js` all else. No torch, no
lease: a page only reads. Start reading at `facts.collect`; ``holdfast page`` (cli/page.py) is the only user.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from holdfast.run.metrics import to_plain

__all__ = ["render"]

# The browser itself forbids every request, every frame, and every script and style but the two with these digests.
_POLICY = "default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; form-action 'none'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="holdfast">
<title>{title} · Holdfast</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#checkpoints">Skip to the table</a>
<main id="page" class="{kind}">
<noscript>This page draws itself with JavaScript, which is switched off here.</noscript>
</main>
<script id="facts" type="application/json">{facts}</script>
<script>{script}</script>
</body>
</html>
"""


def render(facts: Mapping[str, Any], *, reload_s: float | None = None) -> str:
    """Write the page of what `facts.collect` found.

    Args:
        facts: JSON; every text in it may come from strangers and is shown as text.
        reload_s: the page loads itself again after this many seconds, while the run lives.
    """
    embedded = {**to_plain(facts), "reload_s": reload_s}
    style, script = _asset("page.css"), _asset("chart.js") + _asset("page.js")
    return _PAGE.format(
        policy=_POLICY.format(script=_digest(script), style=_digest(style)),
        title=html.escape(str(facts.get("title", ""))),
        kind="runs" if facts.get("kind") == "folder" else "run",
        style=style,
        facts=_embed(embedded),
        script=script,
    )


def _embed(value: Any) -> str:
    """Return JSON that cannot end the script element that holds it."""
    text = json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
