"""Figures of the docs, from the files in `benchmarks/results/`: ``python -m benchmarks.figures`` writes them again.

A page holds ``<!-- measured NAME PART ... -->``, what is written here, and ``<!-- end -->``. NAME is a benchmark, whose
newest file is taken, or the name of a file without its suffix. A PART is ``goals`` (what has a bound), ``samples``
(medians of every method), ``first`` (those of the first turn beside them), or ``only=METHOD`` (a tilde for a
space; rows come in this order).
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["bounds_of", "figures_without_file", "rewritten"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- measured (?P<words>[^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_UNITS = {"microseconds": "us", "milliseconds": "ms", "seconds": "s"}
_IN_SECONDS = {"held", "durable", "warm", "cold", "upload", "download", "memcpy", "write", "lost"}
_FIGURE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?(us|ms|s|x|seconds|GiB/s|GB/s|MB/s)(?![\w/])")


def result(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of one file of results.

    Raises:
        FileNotFoundError: nothing has been measured under this name.
    """
    found = sorted(RESULTS.glob(f"{name}.json")) or sorted(RESULTS.glob(f"????-??-??-{name}.json"))
    if not found:
        raise FileNotFoundError(f"no result of {name} under {RESULTS}: run benchmarks/run.py {name}")
    return found[-1].name, json.loads(found[-1].read_text())


def rewritten(text: str, *, depth: int) -> str:
    """Return a page with its figures as the files of results have them.

    Args:
        text: the page.
        depth: how many folders below the root of the repository it lies.
    """
    return _BLOCK.sub(lambda match: match[1] + _block(match["words"].split(), "../" * depth) + match[3], text)


def figures_without_file(text: str) -> list[str]:
    """Name the figures (a number and a unit of time, rate or ratio) that stand on a page outside of its blocks.

    Bounds are none ("<= 20 us", "goal 0.3 s"), nor what is written as code.
    """
    text = re.sub(r"```.*?```|`[^`\n]*`", "", _BLOCK.sub("", text), flags=re.DOTALL)
    return [
        match[0] for match in _FIGURE.finditer(text) if not re.search(r"([<>]=|goal|over|of) $", text[: match.start()])
    ]


def bounds_of(goal: dict[str, Any]) -> str:
    """Return the bounds of a goal in a file of results, "" if it has none."""
    bounds = [f"<= {goal['at_most']:g}"] if goal["at_most"] is not None else []
    return " ".join(bounds + ([f">= {goal['at_least']:g}"] if goal["at_least"] is not None else []))


def _block(words: Sequence[str], up: str) -> str:
    name, measured = result(words[0])
    chosen = [word.removeprefix("only=").replace("~", " ") for word in words if word.startswith("only=")]
    parts = []
    if "samples" in words:
        parts.append(
            _table(_rows_of_ray(measured) if "rows" in measured else _medians(measured, chosen, "first" in words))
        )
    if "goals" in words:
        parts.append(_table(_goals(measured)))
    parts.append(f"{_circumstances(measured)} [{name}]({up}benchmarks/results/{name}).\n")
    return "\n".join(parts)


def _circumstances(measured: dict[str, Any]) -> str:
    machine = measured["hardware"]
    load = machine.get("load_average_before") or measured["load_average"]["before"]
    taken = (len(values) for kinds in measured.get("samples", {}).values() for values in kinds.values())
    turns = f", {number} turn{'s' * (number > 1)}" if (number := max(taken, default=0)) else ""
    where = machine.get("machine") or f"{machine['cores']} cores ({machine['cpu']})"
    return f"Measured on {measured['date'][:10]}, {where}, load {load[0]:.1f} before{turns}:"


def _medians(measured: dict[str, Any], chosen: Sequence[str], with_first: bool) -> Iterator[list[str]]:
    samples, first = measured["samples"], measured["first"]
    kinds = list(dict.fromkeys(kind for values in samples.values() for kind in values))
    kinds = [kind for kind in kinds if any(samples[method].get(kind) for method in chosen or samples)]
    yield ["method", *map(_heading, kinds), *(f"first: {_heading(kind)}" for kind in kinds if with_first)]
    for method in chosen or samples:
        medians = {kind: statistics.median(values) for kind, values in samples[method].items() if values}
        shown = [medians, first.get(method) or {}] if with_first else [medians]
        yield [method, *(_number(values[kind]) if kind in values else "" for values in shown for kind in kinds)]


def _goals(measured: dict[str, Any]) -> Iterator[list[str]]:
    yield ["what", "measured", "goal", "reached"]
    for goal in measured["goals"]:
        if bounds := bounds_of(goal):
            value = "" if goal["value"] is None else f"{_number(goal['value'])} {goal['unit']}".rstrip()
            yield [goal["what"], value, bounds, "yes" if goal["reached"] else "**no**"]


def _rows_of_ray(measured: dict[str, Any]) -> Iterator[list[str]]:
    kinds = {"start": "first_line_s", "rate": "per_s", "directory": "report_s"}
    yield ["case", "Holdfast", "Ray Train"]
    for case in dict.fromkeys(row["case"] for row in measured["rows"]):
        kind = kinds.get(case, "recovery_s")
        values = {row["tool"]: _number(row[kind]) for row in measured["rows"] if row["case"] == case}
        yield [f"{case}: {_heading(kind)}", values["holdfast"], values["ray"]]


def _heading(kind: str) -> str:
    name, _, unit = kind.rpartition("_")
    if kind in _UNITS:
        return _UNITS[kind]
    if kind.endswith("per_s"):
        return kind.removesuffix("per_s").replace("_", " ") + "per second"
    if unit in {"s", "ms", "us", "mb", "mib"} and name:
        return f"{name.replace('_', ' ')} ({unit})"
    return f"{kind} (s)" if kind.split(maxsplit=1)[0] in _IN_SECONDS else kind.replace("_", " ")


def _number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{float(f'{value:.3g}'):.15g}"


def _table(rows: Iterator[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("|  |", "| |").replace("  |", " |")


def main(words: list[str]) -> int:
    """Write all pages again; with ``--check``, say which are not as the files have them."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        new = rewritten(text, depth=len(path.relative_to(ROOT).parts) - 1)
        if new != text:
            stale.append(path.name)
            if "--check" not in words:
                path.write_text(new)
    print(f"{'differ' if '--check' in words else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
