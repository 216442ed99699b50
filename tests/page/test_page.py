"""The page of a run: what is in it, and what can never be."""

import json
import math
import re
import time

import pytest
import torch
from command_kit import invoke
from hypothesis import given
from hypothesis import strategies as st
from page_kit import HOSTILE, killed, log_rows, train

import holdfast as hf
from holdfast.page import clock, collect, grouped, render, run_facts, thin
from holdfast.storage import resolve

KEEP = hf.Keep(last=2, best=1, metric="val", mode="min")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two lives: the first ends in an error after step 12, the second goes on from step 10 and finishes at 20."""
    root = tmp_path_factory.mktemp("page") / "gpt"
    train(root, 20, die_at=12, val=lambda step: abs(step - 14) / 10)
    train(root, 20, keep=KEEP, val=lambda step: abs(step - 14) / 10)
    return root


def facts_in(html):
    return json.loads(re.search(r'<script id="facts" type="application/json">(.*?)</script>', html, re.DOTALL)[1])


# ---- facts


def test_the_facts_of_a_run(run):
    """Curves of what counts, checkpoints with why they are kept, lives with what they cost."""
    facts = run_facts(resolve(run))
    curves = {curve["name"]: curve["points"] for curve in facts["metrics"]}
    assert set(curves) == {"loss", "val"}
    steps = [step for step, _ in curves["loss"]]
    assert steps == sorted(set(steps)), "what the first life reported beyond the resume does not count"
    assert facts["state"]["word"] == "finished"
    assert not facts["live"]
    by_state = {}
    for row in facts["checkpoints"]:
        by_state.setdefault(row["state"], []).append(row)
    good = by_state["ok"]
    assert good[0]["step"] == 20
    assert "newest" in good[0]["marks"]
    assert any("best" in row["marks"] and row["why"].startswith("best 1 by val") for row in good)
    assert all(row["size_bytes"] > 0 and row["why"] for row in good)
    assert {row["name"] for row in by_state["deleted"]}.isdisjoint(row["name"] for row in good)
    first, second = facts["attempts"]
    assert first["from_name"] is None
    assert second["from_name"] is not None
    assert (first["last_step"], second["first_step"], first["lost_steps"]) == (11, 10, 2), "steps 10 and 11, done again"
    assert facts["ranking"] == {"metric": "val", "mode": "min"}
    about = good[0]["details"]
    assert about["parent"] in {row["name"] for row in facts["checkpoints"]} or "no longer there" in about["parent"]
    assert ("w", 1, 32) in [(item["name"], item["tensors"], item["bytes"]) for item in about["items"]]
    assert about["checked"].startswith("manifest and sizes of all files are right")


def test_a_life_that_was_killed(tmp_path):
    """The state of a run whose trainer is gone without a word, as long as nobody has taken it over."""
    killed(tmp_path / "run", 6)
    until = time.monotonic() + 30
    while (state := collect(resolve(tmp_path / "run"))["state"])["word"] == "training" and time.monotonic() < until:
        time.sleep(0.05)  # its writer ends what was begun
    assert state["word"] == "stopped"
    assert "trainer" in state["text"]


def test_somebody_trains(tmp_path):
    """While a trainer holds the run the page says who, and that it may change."""
    with hf.Checkpointer(tmp_path / "run", state={"w": torch.zeros(2)}) as ck:
        ck.step()
        ck.save()
        ck.wait()
        facts = collect(resolve(tmp_path / "run"))
        assert facts["live"]
        assert facts["state"]["word"] == "training"


def test_what_is_damaged_is_said(run, tmp_path):
    """Damaged and unfinished checkpoints are rows of their own, and warnings."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    newest = run_facts(resolve(run))["checkpoints"][0]["name"]
    (copy / newest / "manifest.json").write_bytes(b"{}")
    (copy / "run.json").unlink()
    facts = collect(resolve(copy))
    row = next(row for row in facts["checkpoints"] if row["name"] == newest)
    assert row["state"] == "corrupt"
    assert any(newest in text for text in facts["warnings"])
    assert any("run.json" in text for text in facts["warnings"])
    newest_good = facts["checkpoints"][0]
    assert (newest_good["name"], newest_good["state"]) == ("step_00000019", "ok")


def test_values_that_cannot_be_drawn(tmp_path):
    """NaN and infinities are left out of the curve and counted; texts and flags are no curves."""
    odd = {3: math.nan, 4: math.inf}
    train(tmp_path / "run", 6, x=lambda step: odd.get(step, 1.0), name=lambda _: "text", flag=lambda _: True)
    facts = collect(resolve(tmp_path / "run"))
    curves = {curve["name"]: curve for curve in facts["metrics"]}
    assert "name" not in curves
    assert "flag" not in curves
    assert curves["x"]["count"] == 4
    assert any(text.startswith("x: 2 of its values") for text in facts["warnings"])
    json.dumps(facts_in(render(facts)), allow_nan=False)


def test_nothing_there(tmp_path):
    """A folder without runs is an error that names it."""
    result = invoke("page", tmp_path, "-o", tmp_path / "x.html", code=2)
    assert "there is no run at" in result.output
    assert not (tmp_path / "x.html").exists()


# ---- curves


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6)), max_size=400), st.integers(4, 60))
def test_thin_keeps_every_extreme(points, most):
    """At most so many points, in order, all of them real ones, with the ends and the extremes."""
    points = sorted(points)
    thinned = thin(points, most)
    assert len(thinned) <= max(most, 4)
    assert set(thinned) <= set(points)
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    if points:
        assert {thinned[0], thinned[-1]} == {points[0], points[-1]}
        assert min(y for _, y in thinned) == min(y for _, y in points)
        assert max(y for _, y in thinned) == max(y for _, y in points)


def test_many_reports(tmp_path):
    """A curve of 50 000 values has 2 000 points on the page, the one spike among them, and says so."""
    storage = resolve(tmp_path / "run")
    rows = ({"step": n, "metrics": {"loss": 9.0 if n == 31_234 else 1.0 + n % 2 / 10}} for n in range(50_000))
    log_rows(storage, rows)
    curve = collect(storage)["metrics"][0]
    assert curve["count"] == 50_000
    assert len(curve["points"]) <= 2000
    assert [31_234, 9.0] in [list(point) for point in curve["points"]]


def test_every_metric_is_drawn_in_order():
    """The ranking metric, then losses, then groups by first parts of names; none is left out, few stay together."""
    names = ["zz", "b/loss", "aloss", *(f"g/{at:02}" for at in range(70)), "alone/x", "plain", "val"]
    rows = grouped([{"name": name} for name in names], "zz")
    assert len(rows) == len(names)
    assert [row["name"] for row in rows[:4]] == ["zz", "aloss", "b/loss", "g/00"]
    assert [(row["name"], row["group"]) for row in rows[-3:]] == [(name, "other metrics") for name in names[-3:]]
    assert {row["group"] for row in rows} == {"", "g", "other metrics"}
    assert {row["group"] for row in grouped([{"name": name} for name in names[:9]], None)} == {""}


def test_the_clock_of_a_run():
    """Seconds since the first row, and epochs that run evenly between their first steps."""
    rows = [{"step": step, "time": 1000.0 + step / 2, "epoch": step // 10} for step in range(25)]
    ticks, began = clock([*rows, {"step": 99, "time": None, "epoch": 3}])
    assert began == 1000
    assert ticks[0] == [0, 0, 0]
    assert ticks[5] == [5, 2.5, 0.5]
    assert ticks[24] == [24, 12, 2.4]
    assert len(clock([{"step": step, "time": 1.0 * step} for step in range(50_000)])[0]) <= 2001


# ---- the file


def test_one_file_that_asks_for_nothing(run):
    """The page refers to nothing outside, forbids every request, and holds the facts word for word."""
    facts = collect(resolve(run))
    html = render(facts)
    head = html[: html.index("<script")]
    assert "default-src 'none'" in head
    assert not re.search(r"<(?:link|img|iframe|script)[^>]+(?:src|href)=", html.split("<script>")[0])
    assert facts_in(html)["checkpoints"] == json.loads(json.dumps(facts["checkpoints"]))


def test_hostile_names_stay_text(tmp_path):
    """Names and metrics that look like HTML end no element."""
    train(tmp_path / HOSTILE.replace("/", "_"), 6, **{HOSTILE: lambda step: step})
    facts = collect(resolve(tmp_path / HOSTILE.replace("/", "_")))
    html = render({**facts, "warnings": [HOSTILE]})
    assert HOSTILE not in html
    assert "<img src=x" not in html
    assert facts_in(html)["warnings"] == [HOSTILE]
    assert html.count("<script") == html.count("</script>")


def test_no_secrets(tmp_path, monkeypatch):
    """Neither the environment nor what a run notes about its configuration gets into a page."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "zzz-secret-of-the-environment")
    train(tmp_path / "run", 6)
    storage = resolve(tmp_path / "run")
    index = json.loads((tmp_path / "run/run.json").read_text())
    assert "attempts" in index
    html = render(collect(storage))
    assert "zzz-secret" not in html
    told = json.dumps(facts_in(html))
    assert "notes" not in told
    assert "environ" not in told


# ---- the command


def test_the_command(run, tmp_path):
    """One run, a folder of runs, and the facts alone."""
    invoke("page", run, "-o", tmp_path / "a.html")
    assert facts_in((tmp_path / "a.html").read_text())["kind"] == "run"
    train(run.parent / "other", 6)
    invoke("page", run.parent, "-o", tmp_path / "b.html")
    facts = facts_in((tmp_path / "b.html").read_text())
    apart = json.loads(invoke("page", run, run.parent / "other", run.parent / "other", "--json").output)
    assert [one["name"] for one in apart["runs"]] == ["gpt", "other"]
    assert apart["title"] == "2 runs"
    result = invoke("page", run, tmp_path / "none", "--json", code=2)
    assert "there is no run at" in result.output
    assert [one["name"] for one in facts["runs"]] == ["gpt", "other"]
    assert {metric["name"]: len(metric["curves"]) for metric in facts["metrics"]} == {"loss": 2, "val": 1}
    assert json.loads(invoke("page", run, "--json").output)["kind"] == "run"
    assert not list(tmp_path.glob(".*.tmp"))


def test_what_cannot_be_written(run, tmp_path):
    """A target that is no file is an error and leaves nothing behind."""
    (tmp_path / "folder").mkdir()
    result = invoke("page", run, "-o", tmp_path / "folder", code=1)
    assert "folder" in result.output
    assert not list(tmp_path.glob(".*"))


def test_watching_ends_with_the_run(tmp_path, monkeypatch):
    """--watch writes the page again when something has happened, and ends when the run has."""
    from holdfast.cli import stats as command

    root, target = tmp_path / "run", tmp_path / "run.html"
    state = {"w": torch.zeros(2)}
    ck = hf.Checkpointer(root, state=state).start()
    ck.step()
    ck.save()
    ck.wait()
    seen, real_sleep = [], time.sleep

    def pause(_):
        seen.append(facts_in(target.read_text()))
        if len(seen) == 1:
            ck.step()
            ck.save()
            ck.wait()
        elif len(seen) == 2:
            ck.close()
        else:
            real_sleep(0.05)  # its writer gives the lease back

    monkeypatch.setattr(command.time, "sleep", pause)
    invoke("page", root, "-o", target, "--watch")
    seen = [*seen[:2], facts_in(target.read_text())]
    assert [one["live"] for one in seen] == [True, True, False]
    assert [one["checkpoints"][0]["step"] for one in seen] == [1, 2, 2]
    assert seen[0]["reload_s"] == 5.0


def test_the_interval_of_auto(tmp_path):
    """What every="auto" had chosen is known of each checkpoint; of other runs nothing is said."""
    for name, every in (("auto", "auto"), ("fixed", 1)):
        with hf.Checkpointer(tmp_path / name, state={"w": torch.zeros(2)}, every=every) as ck:
            ck.step()
    chosen, fixed = (
        [row["details"]["every_s"] for row in collect(resolve(tmp_path / name))["checkpoints"]]
        for name in ("auto", "fixed")
    )
    assert chosen[0] > 0
    assert fixed == [None]
