"""`holdfast log`: what was reported, by the trainer and by others, in the form that is asked for."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from catalog_kit import begin, save
from test_cli import _arguments, as_json, invoke  # noqa: F401

from holdfast import Checkpoint
from holdfast.run.data_ring import DataRing
from holdfast.storage import LocalStorage


@pytest.fixture
def run(tmp_path) -> str:
    """Forty steps of a falling loss, a checkpoint at each tenth, one evaluated by another process."""
    storage = LocalStorage(tmp_path / "gpt")
    catalog = begin(storage)
    rows = [{"step": n, "epoch": n / 10, "metrics": {"loss": 1 / n, "lr": math.nan}} for n in range(1, 41)]
    catalog.index.report(rows)
    for step in (10, 20, 30, 40):
        save(catalog, step, metrics={"loss": 1 / step})
    Checkpoint.at(storage, "step_0020").report(val=0.25)
    return storage.uri


def test_the_table_has_the_last_rows_and_says_so(run) -> None:
    """What another process reported stands in the row of its step."""
    out = invoke("log", run).stdout
    assert "the last 30 of 40 rows" in out
    assert "0.25" in next(line for line in out.splitlines() if line.split()[:1] == ["20"])
    assert "the last" not in invoke("log", run, "--tail", 0).stdout


def test_machines_get_every_row(run) -> None:
    """CSV, JSON lines and one JSON document say the same; NaN is a name, not broken JSON."""
    rows = [json.loads(line) for line in invoke("log", run, "--format", "jsonl").stdout.splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[0]["metrics"] == {"loss": 1.0, "lr": "NaN"}
    assert as_json("log", run)["rows"] == rows
    table = list(csv.DictReader(io.StringIO(invoke("log", run, "--format", "csv").stdout)))
    assert (table[19]["val"], table[19]["checkpoint"], len(table)) == ("0.25", "step_0020", 40)
    assert [row["step"] for row in as_json("log", run, "--metric", "val")["rows"]] == [20]
    assert [row["step"] for row in as_json("log", run, "--tail", "2")["rows"]] == [39, 40]


def test_the_plot_falls_with_the_loss(run) -> None:
    """First point at the top left, last at the bottom right; what cannot be drawn is said."""
    lines = invoke("log", run, "--plot", "loss").stdout.splitlines()
    assert lines[1].startswith("    1 ┤•")
    assert lines[-3].count("•") > 10
    assert "step 1" in lines[-1]
    assert lines[-1].endswith("step 40")
    assert "no finite number" in invoke("log", run, "--plot", "lr", code=2).stderr
    assert "there is: loss, lr, val" in invoke("log", run, "--plot", "vla", code=2).stderr
    assert "leave out" in invoke("log", run, "--plot", "loss", "--format", "csv", code=2).stderr


def test_the_ledger_says_what_was_trained(tmp_path) -> None:
    """Each batch with its step, epoch, life and loader; the last one was given, nothing shows it as trained."""
    root = LocalStorage(tmp_path / "run")
    begin(root)
    ring = DataRing(tmp_path / "run", 0, run_id="")
    for number in range(40):
        ring.add((number + 1, 0, 1 + number // 20, 0, 0, number, number // 10, number % 10, 4), "train")
    ring.close()
    rows = as_json("log", root.uri, "--data", "--tail", 2)["batches"]
    assert [(row["step"], row["epoch"], row["batch"], row["loader"], row["state"]) for row in rows] == [
        (39, 3, 8, "train", "trained"),
        (40, 3, 9, "train", "given"),
    ]
    assert "train" in invoke("log", root.uri, "--data").stdout
    lines = invoke("log", root.uri, "--data", "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line)["attempt"] for line in lines] == [1] * 20 + [2] * 20
    assert "leave out" in invoke("log", root.uri, "--data", "--plot", "loss", code=2).output


def test_a_run_without_metrics_says_so(tmp_path) -> None:
    """Its table would be a line of titles with nothing below."""
    save(catalog := begin(LocalStorage(tmp_path / "still")), 1)
    said = invoke("log", catalog.storage.uri)
    assert (said.stdout, said.stderr) == ("", f"holdfast: {catalog.storage.uri} has reported no metrics\n")


def test_a_table_of_very_many_metrics(tmp_path) -> None:
    """Its columns are measured once, not once for each that is left out; the first of those are named."""
    catalog = begin(LocalStorage(tmp_path / "wide"))
    save(catalog, 1, metrics={f"m{number:04}": number / 3 for number in range(3000)})
    said = invoke("log", catalog.storage.uri)
    head, row = said.stdout.splitlines()
    assert len(row) <= 160
    assert head.split()[1:3] == ["m0000", "m0001"]
    shown = len(head.split()) - 2
    assert f"no room for: m{shown:04}, " in said.stderr
    assert f" and {3000 - shown - 20} more (--metric chooses)" in said.stderr
