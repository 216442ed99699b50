"""Print the figures of the house: `python -m benchmarks.house [--tree CHECKOUT] [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .passed import measure
from .rooms import Rooms
from .tests import share_of_insiders

_GOALS = {
    "lines of src": 72_500,
    "modules": 300,
    "headers, % of lines": 8.5,
    "modules under 200 lines with one importer": 20,
    "step to commit: functions": 350,
    "step to commit: modules": 40,
    "step to commit: lines of these modules": 13_000,
    "save: functions": 170,
    "save: modules": 26,
    "lines loaded by the README's own loop": 22_000,
    "tests beside private imports of others, %": 40,
}


def main() -> None:
    """Count, run, print."""
    parser = argparse.ArgumentParser(prog="benchmarks.house", description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="another checkout to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tree = options.tree.resolve()
    rooms = Rooms(tree / "src" / "holdfast")
    insiders = {"tests beside private imports of others, %": share_of_insiders(tree)}
    figures = {**rooms.figures(), **insiders, **measure(tree)}
    if options.json:
        json.dump({"figures": figures, "packages": rooms.packages()}, sys.stdout, indent=1)
        return
    width = max(map(len, figures))
    for name, figure in figures.items():
        goal = f"   goal {_GOALS[name]:>8,}" if name in _GOALS else ""
        print(f"{name:<{width}} {figure:>10,}{goal}")
    print()
    for package, (lines, modules) in rooms.packages().items():
        print(f"{package:<24} {lines:>8,} lines {modules:>5} modules")


if __name__ == "__main__":
    main()
