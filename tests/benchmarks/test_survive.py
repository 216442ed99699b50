"""docs/who-survives.md shows the figures of benchmarks/results, and names each script."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.survive import HERE, RESULTS, ROWS, table

PAGE = (HERE.parent / "docs" / "who-survives.md").read_text()


def test_the_page_shows_the_results():
    """The table is that of the file, and rows have the figures that their trials add up to."""
    results = json.loads(RESULTS.read_text())
    assert "\n".join(table(results)) in PAGE
    for row, result in results["rows"].items():
        assert sum(result["landed"].values()) == sum(result["kills"].values()) + sum(result["power_cuts"].values()), row
    assert "holdfast_checkpointer" in results["rows"]


def test_each_script_is_named():
    """Those of the folder are the rows of the benchmark, and the page says whose settings they have."""
    scripts = {path.stem for path in Path(HERE, "survival").glob("[!_]*.py")}
    assert scripts == set(ROWS)
    assert all(f"`{name}.py`" in PAGE for name in scripts)
