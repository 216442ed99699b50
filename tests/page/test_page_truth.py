"""The numbers that a reader sees, in a real browser, of a run whose lives were killed by SIGKILL at known steps."""

import subprocess
import sys

import pytest
from catalog_kit import index_of
from page_kit import browse, browser_is_here
from process_kit import wait_until

import holdfast as hf
from holdfast._units import format_bytes
from holdfast.page import collect, render
from holdfast.storage import resolve

pytestmark = [pytest.mark.frameworks, browser_is_here]

# Each life trains 30 steps with a checkpoint every 10; the first dies in step 17, the second, gone on from 10, in 24.
OWN = """
import os, sys, time, torch, holdfast as hf
state = {"w": torch.zeros(300)}
with hf.Checkpointer(sys.argv[1], state, every=10, keep=None) as ck:
    while ck.global_step < 30:
        ck.step(shown=100.0 * ck.attempt + ck.global_step + 1)
        if ck.global_step % 10 == 3:
            ck.wait()
        if ck.global_step == {1: 17, 2: 24}.get(ck.attempt):
            os.kill(os.getpid(), 9)
"""
LOOP = """
import os, sys, torch, holdfast as hf
from torch.nn import functional
from holdfast.callbacks import Callback

class Numbers(Callback):
    def batch_end(self, state, logger):
        step = int(state.timestamp.batch)
        logger.log_metrics({"shown": 100.0 * life + step})
        if step % 10 == 3:
            trainer._group.savers[0].settle()
        if step == {1: 17, 2: 24}.get(life):
            os.kill(os.getpid(), 9)

data = [(torch.ones(2, 4), torch.ones(2, 1))] * 40
trainer = hf.Trainer(
    model=torch.nn.Linear(4, 1), loss_fn=functional.mse_loss, train_dataloader=data, max_duration="30ba",
    save_folder=sys.argv[1], save_filename="b{batch}", save_interval="10ba", autoresume=True, callbacks=Numbers(),
)
life = {0: 1, 10: 2, 20: 3}[int(trainer.state.timestamp.batch)]
trainer.fit()
trainer.close()
"""
FUNCTION = """
import os, sys, time, holdfast as hf
from holdfast.torch import TorchTrainer

def newest():
    found = hf.get_checkpoint()
    return None if found is None else found.load()["step"]

def train():
    first = hf.get_checkpoint()
    start = 0 if first is None else first.load()["step"]
    life = {0: 1, 10: 2, 20: 3}[start]
    for step in range(start + 1, 31):
        hf.report({"shown": 100.0 * life + step}, state={"step": step} if step % 10 == 0 else None)
        while step % 10 == 3 and step > 10 and newest() != step - 3:
            time.sleep(0.01)
        if step == {1: 17, 2: 24}.get(life):
            time.sleep(0.1)  # what was reported in the last millisecond is lost
            os.kill(os.getpid(), 9)

place, name = os.path.split(sys.argv[1])
run = hf.RunConfig(name=name, storage_path=place, failure_config=hf.FailureConfig(max_failures=2))
TorchTrainer(train, scaling_config=hf.ScalingConfig(num_workers=1), run_config=run).fit()
"""
NAMES = {
    "own loop": ["step_00000010", "step_00000020", "step_00000030"],
    "loop trainer": ["b10", "b20", "b30"],
    "function trainer": ["checkpoint_000000", "checkpoint_000001", "checkpoint_000002"],
}
# The rows of a table as lists of {column: text}.
TABLE = """((selector) => {
  const table = document.querySelector(selector);
  const heads = [...table.querySelectorAll('thead th')].map((one) => one.textContent);
  return [...table.querySelectorAll('tbody tr')].map((row) =>
    Object.fromEntries([...row.children].map((cell, at) => [heads[at], cell.textContent])));
})"""
CARDS = """Object.fromEntries([...document.querySelectorAll('.card')].map((one) => [one.querySelector('dt').textContent,
  [one.querySelector('dd').firstChild.textContent, (one.querySelector('small') || {}).textContent]]))"""
CHART = """[...document.querySelectorAll('#metrics .chart')]
  .find((one) => one.querySelector('h3').textContent === 'shown').querySelector('.draw').chart"""
AT = f"""((step) => {{ const chart = {CHART};
  const place = chart.top.getBoundingClientRect();
  const there = {{clientX: place.left + chart.toX(step), clientY: place.top + 1, bubbles: true}};
  chart.top.dispatchEvent(new PointerEvent('pointermove', there));
  const names = [...document.querySelectorAll('.tip dt')];
  return Object.fromEntries(names.map((one) => [one.textContent, one.nextSibling.textContent]));
}})"""
MARKS = f"{CHART}.hits.map((one) => one.mark.step).sort((a, b) => a - b)"


def trained(tmp_path, script):
    """Run a script until it ends in order; return the run."""
    (tmp_path / "train.py").write_text(script)
    root = tmp_path / "run"
    for _ in range(4):
        command = [sys.executable, str(tmp_path / "train.py"), str(root)]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        if done.returncode == 0:
            return root
        assert done.returncode == -9, done.stderr.decode()
        wait_until(lambda: index_of(root).attempts[-1].ended is not None, timeout_s=30)
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    ("door", "script"), [("own loop", OWN), ("loop trainer", LOOP), ("function trainer", FUNCTION)], ids=str.split
)
def test_three_lives(tmp_path, door, script):
    """Lives, what they went on from, their ends, steps done again, checkpoints, sizes, values and costs are true."""
    root = trained(tmp_path, script)
    facts = collect(resolve(root))
    (tmp_path / "run.html").write_text(render(facts))
    names = NAMES[door]
    told = browse(
        tmp_path / "run.html",
        ["wait", f"{MARKS}.length === 3"],
        ["eval", f"{TABLE}('.wide[aria-label=\"Table of attempts\"] table')"],
        ["eval", "document.querySelector('section[aria-label^=Attempts] h2').textContent"],
        ["eval", f"{TABLE}('#checkpoints table')"],
        ["eval", CARDS],
        ["eval", MARKS],
        *[["eval", f"{AT}({step})"] for step in (1, 10, 11, 20, 21, 30)],
        ["scroll", 1200],
        ["wait", "[...document.querySelectorAll('#saving .draw')].every((one) => one.chart.drawn)"],
        [
            "eval",
            "[...document.querySelectorAll('#saving .draw')].map((one) => one.chart.drawn.map((line) => line.steps))",
        ],
        ["shot", str(tmp_path / "page.png")],
    )
    assert told["errors"] == []
    assert told["requests"] == 0
    lives, title, rows, cards, marks, *values, saves = told["values"]

    assert [row["attempt"] for row in lives] == ["3", "2", "1"]
    assert [row["went on from"] for row in lives] == [names[1], names[0], "a fresh start"]
    assert [(row["first step"], row["last step"]) for row in lives] == [("20", "30"), ("10", "24"), ("0", "17")]
    assert [row["steps done again"] for row in lives] == ["", "4", "7"]
    assert "11 steps had to be done again" in title
    assert lives[0]["how it ended"] == "finished"
    assert all("SIGKILL" in row["how it ended"] for row in lives[1:])
    assert all(row["lasted"] for row in lives)
    assert all(row["time done again"] and row["until the next"] for row in lives[1:])

    assert [row["checkpoint"] for row in rows] == names[::-1]
    assert [row["step"] for row in rows] == ["30", "20", "10"]
    assert [row["attempt"] for row in rows] == ["3", "2", "1"]
    sizes = [hf.Checkpoint(root / name).size_bytes for name in names[::-1]]
    assert [row["size"] for row in rows] == [format_bytes(size) for size in sizes]
    on_disk = [sum(file.stat().st_size for file in (root / name).rglob("*") if file.is_file()) for name in names[::-1]]
    assert all(size <= disk <= size + 20_000 for size, disk in zip(sizes, on_disk, strict=True)), "but for the manifest"

    assert marks == [10, 20, 30]
    steps = [(one["step"], one["value"]) for one in values]
    assert steps == [("1", "101"), ("10", "110"), ("11", "211"), ("20", "220"), ("21", "321"), ("30", "330")]

    assert cards["Newest checkpoint"][0] == "step 30"
    assert cards["Starts"][0] == "3"
    assert cards["Starts"][1].startswith("11 steps done again")
    assert cards["On disk"][1].startswith("3 checkpoints")
    parts = facts["goodput"]
    assert cards["Useful steps"][0] == f"{100 * parts['useful_s'] / parts['wall_s']:.1f}%"
    assert "down" in cards["Useful steps"][1] or door == "function trainer"
    assert all(line[-3:] == [10, 20, 30] for chart in saves for line in chart if line)
