"""Print the figures of the house, or what one of them counts: `python -m benchmarks.house [--tree CHECKOUT]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from .passed import PATHS, loaded, measure, passed
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
    parser.add_argument("--passed", choices=PATHS, help="list the functions of one path, each with its callers")
    parser.add_argument("--loaded", action="store_true", help="list the modules that the README's own loop loads")
    options = parser.parse_args()
    tree = options.tree.resolve()
    if options.passed:
        _list(passed(tree, options.passed))
        return
    if options.loaded:
        for file, lines in sorted(loaded(tree).items(), key=lambda row: -row[1]):
            print(f"{lines:>6,} {file.rpartition('/holdfast/')[2]}")
        return
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


def _list(found: dict[tuple[str, str, int], set[tuple[str, str, int]]]) -> None:
    """Print the functions by module, in the order of the source, each with how many call it and one of them."""
    modules = Counter(file for file, _, _ in found)
    for file, count in modules.items():
        print(f"{file.rpartition('/holdfast/')[2]}: {count} functions")
        for function in sorted((one for one in found if one[0] == file), key=lambda one: one[2]):
            callers = sorted(found[function])
            one = f"{callers[0][0].rpartition('/holdfast/')[2]} {callers[0][1]}"
            print(f"  {function[2]:>4} {function[1]:<32} {len(callers):>3} callers: {one}")


if __name__ == "__main__":
    main()
