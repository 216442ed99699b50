"""Run the benchmarks: ``python benchmarks/run.py [names] [--quick] [--scale F] [--repeat N] [--out DIR]``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# As a script, this folder is first on the path, where `benchmarks/json.py` or the like would shadow other modules.
_ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(_ROOT)] + [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT / "benchmarks"]

BENCHMARKS = {
    "save": ("save", "run"),
    "first": ("first", "run"),
    "loaded": ("save", "run_loaded"),
    "lost": ("lost", "run"),
    "load": ("load", "run"),
    "small": ("small", "run"),
    "plan": ("plan", "run"),
    "control": ("control", "run"),
    "many": ("many", "run"),
    "ranks": ("ranks", "run"),
    "memory": ("memory", "run"),
    "step": ("step", "run"),
    "catalog": ("catalog", "run"),
    "growth_local": ("growth_local", "run"),
    "frozen": ("frozen", "run"),
    "startup": ("startup", "run"),
    "startup_trainer": ("startup_trainer", "run"),
    "restart": ("restart", "run"),
    "trainer": ("trainer", "run"),
    "remote": ("remote", "run"),
    "growth": ("growth", "run"),
    "goodput": ("goodput", "run"),
    "goodput_random": ("goodput", "run_random"),
    "loop": ("loop", "run"),
}


def hardware(scratch: Path) -> dict[str, Any]:
    """Describe the machine."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    here = str(scratch.resolve())
    best = max((m for m in mounts if here == m[1] or here.startswith(m[1].rstrip("/") + "/")), key=lambda m: len(m[1]))
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "filesystem": {"type": best[2], "device": best[0], "options": best[3]},
        "python": platform.python_version(),
        "load_average_before": os.getloadavg(),
    }


def show(name: str, result: dict[str, Any]) -> None:
    """Print one result as a table."""
    from rich.console import Console
    from rich.table import Table

    from benchmarks.figures import bounds_of

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"{name}  ({result['wall_s']:.0f} s)", title_justify="left")
    for column in ("what", "measured", "goal", "reached"):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for goal in result["goals"]:
        value = "-" if goal["value"] is None else f"{goal['value']:.4g} {goal['unit']}"
        reached = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[goal["reached"]]
        table.add_row(
            goal["what"] + (f" [dim]({goal['note']})[/]" if goal["note"] else ""), value, bounds_of(goal), reached
        )
    console.print(table)
    rows = Table(title="medians", title_justify="left")
    kinds = list(dict.fromkeys(kind for values in result["samples"].values() for kind in values))
    for column in ("method", *kinds, "first"):
        rows.add_column(column)
    for method, values in result["samples"].items():
        first = result["first"].get(method, {})
        cells = [f"{sorted(values[kind])[len(values[kind]) // 2]:.4g}" if values.get(kind) else "" for kind in kinds]
        rows.add_row(method, *cells, " ".join(f"{kind} {value:.4g}" for kind, value in first.items()))
    if kinds:
        console.print(rows)


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for; 1 if a benchmark broke (a goal that is not reached is a result, not an error)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny states, few repeats: proves that everything works")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the width of the state, or on the time")
    parser.add_argument("--repeat", type=int, help="samples per method after the first (default 5, 2 with --quick)")
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results", help="folder for the JSON files")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/hf-bench"), help="folder on the disk to measure")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    from benchmarks.bench import Context
    from benchmarks.peers import versions

    scratch = options.scratch / f"run-{os.getpid()}"
    scratch.mkdir(parents=True)
    options.out.mkdir(parents=True, exist_ok=True)
    broken = 0
    try:
        machine = {**hardware(scratch), "versions": versions()}
        for name in options.names or BENCHMARKS:
            context = Context(
                scratch=scratch,
                quick=options.quick,
                scale=options.scale,
                repeat=options.repeat or (2 if options.quick else 5),
                say=lambda text, name=name: print(f"  {name}: {text}", file=sys.stderr, flush=True),
            )
            print(f"{name} ...", file=sys.stderr, flush=True)
            module, function = BENCHMARKS[name]
            started, start = datetime.now(timezone.utc), time.perf_counter()
            try:
                outcome = getattr(importlib.import_module(f"benchmarks.{module}"), function)(context)
            except Exception:
                traceback.print_exc()
                broken += 1
                continue
            result = {
                "benchmark": name,
                "date": started.isoformat(timespec="seconds"),
                "wall_s": time.perf_counter() - start,
                "settings": {"quick": context.quick, "scale": context.scale, "repeat": context.repeat},
                "hardware": machine,
                **outcome.to_json(),
            }
            path = options.out / f"{started:%Y-%m-%d}-{name}.json"
            path.write_text(json.dumps(result, indent=1) + "\n")
            show(name, result)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
