"""``holdfast stats``: figures as a table, JSON and OpenMetrics."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from command_kit import invoke

import holdfast as hf
from holdfast.cli.stats import openmetrics
from holdfast.page import collect
from holdfast.run.catalog import upkeep
from holdfast.storage import LocalStorage

_SAMPLE = re.compile(r'[a-z_]+\{(?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*\} [0-9.eE+-]+')


def call(*arguments):
    return invoke(*arguments, code=None)


def train(root, steps, *, error=False, **more):
    try:
        with hf.Checkpointer(root, {"w": torch.zeros(64)}, every="2ba", **more) as ck:
            while ck.global_step < steps:
                ck.step(loss=1.0)
                if error and ck.global_step == 3:
                    raise InterruptedError("the plug")
    except InterruptedError:
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two lives: the first saves step 2 and fails after step 3."""
    root = tmp_path_factory.mktemp("stats") / "gpt"
    train(root, 8, error=True, keep=hf.Keep(last=2))
    train(root, 8, keep=hf.Keep(last=2))
    return root


def parsed(text):
    """Read with the reference parser, where it is installed; the form of each line is checked in any case."""
    *lines, end, empty = text.split("\n")
    assert (end, empty) == ("# EOF", "")
    assert all(_SAMPLE.fullmatch(line) or line.startswith(("# TYPE ", "# HELP ", "# UNIT ")) for line in lines)
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    samples = [one for family in parser.text_string_to_metric_families(text) for one in family.samples]
    return {(one.name, one.labels.get("run"), one.labels.get("quantile")): one.value for one in samples}


def test_one_document(run):
    """Saves with their times, bytes, deletions by rule, and what the failure cost."""
    told = json.loads(call("stats", run, "--json").output)
    assert told["saves"] == 4
    assert told["checkpoints"] == 2 + 1, "the last two, and the one resumed from"
    assert told["durable_s"]["count"] == told["held_s"]["count"] == 4
    assert 0 < told["durable_s"]["p50"] <= told["durable_s"]["p95"] <= told["durable_s"]["max"]
    assert told["bytes_written"] > 0
    assert told["deleted_by"] == {"not among last 2": 1}
    assert (told["failures"], told["lost_steps"]) == (1, 1)
    assert told["attempts"][0]["reason"].startswith("InterruptedError")


def test_for_people(run):
    """The same in words; nothing of it is cut in a pipe."""
    result = call("stats", run)
    assert result.exit_code == 0, result.output
    assert "4 saves; 3 checkpoints are there" in result.output
    assert "1 deleted: not among last 2" in result.output
    assert "2 starts, 1 ended in a failure: 1 step " in result.output
    assert re.search(r"until durable\s+4\s", result.output)


def test_a_folder_of_runs(run):
    """A line for each; a folder that is no run is left out."""
    (run.parent / "notes").mkdir(exist_ok=True)
    train(run.parent / "other", 2)
    told = json.loads(call("stats", run.parent, "--json").output)
    assert {one["name"]: one["saves"] for one in told["runs"]} == {"gpt": 4, "other": 1}
    result = call("stats", run.parent)
    assert result.exit_code == 0
    assert "2 runs" in result.output


def test_openmetrics(run, tmp_path):
    """The file is what the format's own parser reads, and nothing is left beside it."""
    target = tmp_path / "metrics.txt"
    result = call("stats", run, "--openmetrics", target)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.txt"]
    found = parsed(target.read_text())
    assert found["holdfast_step", "gpt", None] == 8
    assert found["holdfast_saves_total", "gpt", None] == 4
    assert found["holdfast_failures_total", "gpt", None] == 1
    assert found["holdfast_training", "gpt", None] == 0
    assert found["holdfast_durable_seconds_count", "gpt", None] == 4
    assert found["holdfast_durable_seconds", "gpt", "0.5"] > 0
    assert time.time() - found["holdfast_last_durable_timestamp_seconds", "gpt", None] < 600
    assert found["holdfast_free_bytes", "gpt", None] > 0


def test_labels_are_escaped():
    """A run may be called anything; a figure that nobody knows is left out."""
    name = 'a"b\\c\nd\udce9'
    found = parsed(openmetrics([({"run": name}, {"step": 1, "free_bytes": None, "held_seconds": 0.25})]))
    assert found == {
        ("holdfast_step", 'a"b\\c\nd?', None): 1,
        ("holdfast_held_seconds_total", 'a"b\\c\nd?', None): 0.25,
    }
    assert openmetrics([]) == "# EOF\n"


def test_watching_ends_with_the_run(tmp_path, monkeypatch):
    """--watch writes while somebody trains, once more after the end, and stops."""
    from holdfast.cli import stats as command

    root, target = tmp_path / "run", tmp_path / "metrics.txt"
    ck = hf.Checkpointer(root, {"w": torch.zeros(2)}).start()
    ck.step()
    ck.save()
    ck.wait()
    seen, real_sleep = [], time.sleep

    def pause(_):
        seen.append(target.read_text())
        if len(seen) == 1:
            ck.step()
            ck.save()
            ck.wait()
        elif len(seen) == 2:
            ck.close()
        else:
            real_sleep(0.05)  # its writer gives the lease back

    monkeypatch.setattr(command.time, "sleep", pause)
    result = call("stats", root, "--openmetrics", target, "--watch")
    assert result.exit_code == 0, result.output
    seen = [*seen[:2], target.read_text()]
    assert [re.search(r"^holdfast_step\S* (\d+)$", text, re.MULTILINE)[1] for text in seen] == ["1", "2", "2"]
    assert [re.search(r"^holdfast_training\S* (\d+)$", text, re.MULTILINE)[1] for text in seen] == ["1", "1", "0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--watch"], "--openmetrics FILE"),
        (["--openmetrics", "x.prom", "--json"], "one of them"),
        (["--openmetrics", "x.prom", "--watch", "--poll", "0s"], "at least one second"),
    ],
)
def test_wrong_usage(run, arguments, said):
    """Options that do not go together are refused with what to do."""
    result = call("stats", run, *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_no_run(tmp_path):
    """A folder without a run is wrong usage, and a file that cannot be written a problem."""
    assert call("stats", tmp_path).exit_code == 2
    train(tmp_path / "run", 2)
    (tmp_path / "folder").mkdir()
    result = call("stats", tmp_path / "run", "--openmetrics", tmp_path / "folder")
    assert result.exit_code == 1
    assert not list(tmp_path.glob(".*"))


def test_where_the_time_went(run):
    """The parts add up to the time since the first start; text and OpenMetrics show them."""
    parts = json.loads(call("stats", run, "--json").output)["goodput"]
    assert parts["again_s"] > 0
    assert parts["starting_s"] > 0
    names = ("useful_s", "again_s", "held_s", "slowed_s", "starting_s", "down_s")
    assert sum(parts[name] for name in names) == pytest.approx(parts["wall_s"])
    assert re.search(
        r"of .* since the first start: [0-9.]+% useful steps, [0-9.]+% steps done again", call("stats", run).output
    )
    assert call("stats", run, "--openmetrics", run / "it.txt").exit_code == 0
    figures = parsed((run / "it.txt").read_text())
    assert figures["holdfast_goodput_ratio", "gpt", None] == pytest.approx(parts["ratio"])
    assert figures["holdfast_saving_held_seconds", "gpt", None] == pytest.approx(parts["held_s"])


def test_what_ended_an_attempt(run):
    """The supervisor's word of a death stands with its attempt, for scripts and on the page."""
    with upkeep(LocalStorage(run)) as catalog:
        event = {"what": "died", "time": time.time(), "attempt": 1, "why": "exit status 1: ValueError: no (train.py:3)"}
        catalog.index.journal.take([event])
    rows = json.loads(call("stats", run, "--json").output)["attempts"]
    assert [row["died"] for row in rows] == [event["why"], None]
    assert rows == [{name: row[name] for name in rows[0]} for row in collect(LocalStorage(run))["attempts"]]
