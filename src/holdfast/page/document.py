"""A single HTML file: the facts as JSON, a style sheet, a script and the plotting library, nothing from elsewhere."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from holdfast._optional import require
from holdfast.run.record import to_plain

__all__ = ["render"]

# The browser itself forbids every request and every frame. Vega compiles its expressions, which are all ours.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="holdfast">
<title>{title} · Holdfast</title>
<style>
{style}
</style>
</head>
<body>
<a class="skip" href="#checkpoints">Skip to the table</a>
<div id="page"><noscript>This page draws itself with JavaScript, which is switched off here.</noscript></div>
<script id="facts" type="application/json">{facts}</script>
<script>{library}</script>
<script>
{script}
</script>
</body>
</html>
"""


def render(facts: Mapping[str, Any], *, reload_s: float | None = None) -> str:
    """Write the page of what `facts.collect` found.

    Args:
        facts: JSON; every text in it may come from strangers and is shown as text.
        reload_s: the page loads itself again after this many seconds, while the run lives.

    Raises:
        MissingExtraError: vl-convert-python, which brings the plotting library, is not installed.
    """
    embedded = {**to_plain(facts), "reload_s": reload_s}
    return _PAGE.format(
        policy=_POLICY,
        title=html.escape(str(facts.get("title", ""))),
        style=_asset("page.css"),
        facts=_embed(embedded),
        library=_library(),
        script=_asset("page.js"),
    )


def _embed(value: Any) -> str:
    """Return JSON that cannot end the script element that holds it."""
    text = json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__package__ or "holdfast.page").joinpath(name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script (0.9 MB), which sets them as names of the window."""
    bundle: str = require("vl_convert", extra="page", purpose="drawing a page").javascript_bundle()
    return bundle.replace("</script", "<\\/script")
