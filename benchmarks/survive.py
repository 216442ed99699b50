"""Who survives being killed: each script of `benchmarks/survival`, attacked as `holdfast attack` does.

    python benchmarks/survive.py ROW ... [--kills 200] [--power-cuts 50] [--seed 0] [--into FILE]
    python benchmarks/survive.py --table [--into FILE]      # the table of docs/who-survives.md

A row is a script's name without ".py"; without any, all whose packages are installed are run. The figures of a row
replace those that the file has of it; with --add they are added to those of other seeds.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.verify.attack import OUTCOMES, attack_script
from holdfast.verify.lives import LifeFailedError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "2026-11-28-survival.json"
ROWS = {
    # script: (what the table calls it, the package whose version counts)
    "torch_save_over": ("`torch.save`, written over", "torch"),
    "torch_save_new": ("`torch.save` to a new name, newest by time", "torch"),
    "torch_save_replace": ("`torch.save`, then `os.replace`", "torch"),
    "dcp_save": ("DCP `save`", "torch"),
    "dcp_async_save": ("DCP `async_save`", "torch"),
    "torch_checkpointing_manager": ("torch_checkpointing, async", "torch_checkpointing"),
    "transformers_trainer": ("Transformers `Trainer`", "transformers"),
    "lightning_trainer": ("Lightning `ModelCheckpoint`", "lightning"),
    "accelerate_loop": ("Accelerate `save_state`", "accelerate"),
    "orbax_manager": ("Orbax `CheckpointManager`, async", "orbax-checkpoint"),
    "holdfast_checkpointer": ("Holdfast `Checkpointer`", "holdfast"),
}


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], metavar="ROW")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--power-cuts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--into", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="add to the figures of other seeds")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and run nothing")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(json.loads(options.into.read_text()))))
        return
    for row in options.rows or [row for row, (_, package) in ROWS.items() if version(package)]:
        result = attacked(row, kills=options.kills, power_cuts=options.power_cuts, seed=options.seed)
        known = json.loads(options.into.read_text()) if options.into.exists() else {"rows": {}}
        before = known["rows"].get(row)
        if options.add and before is not None and before["version"] == result["version"]:
            result = added(before, result)
        known["rows"][row] = result
        known["rows"] = {name: known["rows"][name] for name in ROWS if name in known["rows"]}
        options.into.write_text(json.dumps(known, indent=1) + "\n")


def version(package: str) -> str:
    """Return the version of an installed package, "" if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def attacked(row: str, *, kills: int, power_cuts: int, seed: int) -> dict[str, Any]:
    """Attack a script."""
    began = time.monotonic()
    try:
        found = attack_script(
            [sys.executable, f"{row}.py"], cwd=HERE / "survival", kills=kills, power_cuts=power_cuts, seed=seed,
            timeout_s=300, say=lambda line: print(f"{row}: {line}", flush=True),
        )  # fmt: skip
    except LifeFailedError as error:
        raise SystemExit(f"{row}: {error}") from error
    document = found.document()
    firsts = {}
    for trial in document["trials"]:
        key = f"{trial['outcome']}{'' if trial['lost'] is None else ' (power cut)'}"
        if trial["outcome"] != "newest":
            firsts.setdefault(key, {name: trial[name] for name in ("at", "landed", "newest", "resumed", "refused")})
    return {
        "version": version(ROWS[row][1]), "torch": version("torch"), "kills": document["kills"],
        "power_cuts": document["power_cuts"], "landed": document["landed"], "saved": document["saved"],
        "lag": document["lag"], "firsts": firsts, "seeds": [seed], "seconds": round(time.monotonic() - began),
        "load": round(os.getloadavg()[1], 1), "date": str(datetime.datetime.now(tz=datetime.timezone.utc).date()),
    }  # fmt: skip


def added(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of both."""
    sums = {
        name: {key: before[name].get(key, 0) + result[name].get(key, 0) for key in {**before[name], **result[name]}}
        for name in ("kills", "power_cuts", "landed")
    }
    return {
        **result, **sums, "firsts": {**result["firsts"], **before["firsts"]}, "lag": max(before["lag"], result["lag"]),
        "saved": sorted({*before["saved"], *result["saved"]}), "seeds": [*before["seeds"], *result["seeds"]],
        "seconds": before["seconds"] + result["seconds"], "load": max(before["load"], result["load"]),
    }  # fmt: skip


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table in Markdown: kills, then power cuts after a slash."""
    lines = [
        "| | version | kills / power cuts | newest | older, said | older, silently | started over | refused | torn |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, result in results["rows"].items():
        kills, cuts = result["kills"], result["power_cuts"]
        cells = [f"{kills[outcome]} / {cuts[outcome]}" for outcome in OUTCOMES]
        total = f"{sum(kills.values())} / {sum(cuts.values())}"
        lines.append(f"| {ROWS[row][0]} | {result['version']} | {total} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
