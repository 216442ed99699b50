"""Train a small GPT, kill it three times with SIGKILL, and prove that nothing was lost.

Runs `examples/gpt.py` as a user does who leaves it alone: `holdfast run -- python examples/gpt.py ...` starts it again
whenever this demo has killed it, at random moments. A twin of it is never killed. At the end both must be bitwise the
same: weights, optimizer, generators, and the sequence of samples. Every number shown is measured in this run; the exit
status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import holdfast
from holdfast.run.catalog import Catalog
from holdfast.run.retention import decide
from holdfast.storage.resolve import resolve

HERE = Path(__file__).resolve().parent
EVERY = 15
KILLS = 3
STALL_S = 180.0
console = Console(width=100)


class DemoError(Exception):
    """It could not be shown: a trainer failed, or did not come to its end. Nothing was compared."""


class StalledError(DemoError):
    """No trainer has trained a step for `STALL_S`."""


class Trainer:
    """A command that trains, and what its processes wrote down.

    Args:
        directory: for everything that it writes; emptied first.
        steps: to train.
        *options: of gpt.py.
        every: steps from one checkpoint to the next.
        watched: let `holdfast run` start the script, and start it again when it dies.
    """

    def __init__(self, directory: Path, steps: int, *options: str, every: int = EVERY, watched: bool = False) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.directory, self.steps = directory, steps
        self.run, self.log, self.stats = directory / "run", directory / "steps.jsonl", directory / "stats.json"
        self.output = directory / "output.txt"
        paths = ["--run", str(self.run), "--log", str(self.log), "--stats", str(self.stats)]
        script = [sys.executable, str(HERE / "gpt.py"), "--steps", str(steps), "--every", f"{every}ba"]
        launcher = [sys.executable, "-m", "holdfast", "run", "--"] if watched else []
        self.command = [*launcher, *script, *paths, *options]
        self.process: subprocess.Popen[bytes] | None = None
        self._read, self._rows = 0, []  # type: ignore[var-annotated]

    def start(self) -> None:
        """Start the command, once."""
        with self.output.open("wb") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, env=environment)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each step trained so far, by all processes, in the order of time."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._rows.append(json.loads(line))
                    self._read += len(line)
        return self._rows

    def lives(self) -> list[list[dict[str, Any]]]:
        """Return the rows of each process that has trained, one after the other."""
        return [list(rows) for _, rows in itertools.groupby(self.rows(), key=lambda row: row["pid"])]

    def ended(self) -> bool:
        """Tell whether the command is done; raises if it failed."""
        if self.process is None or self.process.poll() is None:
            return False
        if self.process.returncode != 0:
            tail = "\n".join(self.output.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"{' '.join(self.command)}\nended with status {self.process.returncode}:\n{tail}")
        return True

    def stop(self) -> None:
        """End the command, if it still runs: `holdfast run` passes on that it should."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5.0)
            self.process.kill()
            self.process.wait()


def choose_kills(steps: int, chance: random.Random) -> list[int]:
    """Return steps somewhere in the beginning, the middle and the end of the run."""
    return [int(steps * (place + chance.uniform(0.0, 0.2))) for place in (0.12, 0.38, 0.64)]


def kill(process: int) -> None:
    """SIGKILL: no handler, no clean-up, no last words."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        raise DemoError(f"process {process} had ended before it was killed") from None


def train_and_kill(victim: Trainer, twin: Trainer, chance: random.Random) -> dict[int, float]:
    """Run both side by side, the trainer of one killed at random moments; return {process: when it was killed}."""
    kills: dict[int, float] = {}
    targets = choose_kills(victim.steps, chance)
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(38), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bars = {
            victim: progress.add_task("[bold]killed three times[/]", total=victim.steps, loss="-"),
            twin: progress.add_task("twin, never killed", total=twin.steps, loss="-"),
        }
        victim.start()
        twin.start()
        moved, seen = time.monotonic(), -1
        while not (victim.ended() and twin.ended()):
            for trainer, bar in bars.items():
                for row in trainer.rows()[-1:]:
                    progress.update(bar, completed=row["step"], loss=f"{row['loss']:.3f}")
            newest = victim.rows()[-1] if victim.rows() else {"pid": 0, "step": -1}
            if targets and newest["pid"] not in kills and newest["step"] >= targets[0]:
                time.sleep(chance.uniform(0.0, 0.2))  # anywhere in a step, or in the save that runs beside it
                kill(newest["pid"])
                kills[newest["pid"]] = time.monotonic()
                targets.pop(0)
                step = victim.rows()[-1]["step"] + 1
                progress.console.print(f"  [red]SIGKILL[/] to process {newest['pid']} in step {step}")
            total = len(victim.rows()) + len(twin.rows())
            if total != seen:
                moved, seen = time.monotonic(), total
            if time.monotonic() - moved > STALL_S:
                raise StalledError(f"no step was trained for {STALL_S:.0f} s, see {victim.output} and {twin.output}")
            time.sleep(0.05)
    return kills


def lives_of(victim: Trainer, kills: dict[int, float]) -> tuple[Table, list[str]]:
    """Return the table of lives, and what is wrong with them."""
    table = Table(title="The lives of the killed run", title_justify="left", width=100)
    for name in ("life", "started from", "steps trained", "ended", "steps lost", "back after"):
        table.add_column(name, justify="left" if name in ("started from", "ended") else "right")
    index, lives = Catalog(resolve(victim.run)).index, victim.lives()
    attempts = index.attempts
    died = [event.why for event in index.read_history().events if event.what == "died"]
    problems = [] if len(kills) == KILLS else [f"{len(kills)} kills instead of {KILLS}"]
    if died != ["killed by SIGKILL"] * len(kills) or not len(attempts) == len(lives) == len(kills) + 1:
        problems.append(f"{len(attempts)} attempts, {len(lives)} lives, {len(kills)} kills; `holdfast run` saw {died}")
    for number, life in enumerate(lives):
        resumed = attempts[number].resumed_from if number < len(attempts) else None
        start = int(resumed["step"]) if resumed else 0
        if life[0]["step"] != start + 1:
            problems.append(f"life {number + 1} was resumed from step {start} and trained {life[0]['step']} first")
        ended, lost, back = "[green]by itself[/]", "", ""
        if number + 1 < len(lives):
            last, after = life[-1], lives[number + 1][0]
            ended = f"[red]SIGKILL in step {last['step'] + 1}[/]"
            lost = str(last["step"] + 1 - after["step"])
            back = f"{after['at'] - kills.get(last['pid'], last['at']):.1f} s"
        table.add_row(
            str(number + 1), f"step {start}" if resumed else "fresh start",
            f"{start + 1} to {life[-1]['step']}", ended, lost, back,
        )  # fmt: skip
    return table, problems


def same(left: Any, right: Any, path: str = "state") -> tuple[int, int, list[str]]:
    """Compare two states bit by bit: (tensors, bytes in them, paths that differ)."""
    import torch  # not above: the trainers are not to wait for it

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return 1, 0, [path]
        bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
        return 1, bits[0].numel(), [] if torch.equal(*bits) else [path]
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        parts = [same(left[key], right[key], f"{path}/{key}") for key in left]
    elif isinstance(left, (list, tuple)) and type(left) is type(right) and len(left) == len(right):
        parts = [
            same(one, other, f"{path}/{place}") for place, (one, other) in enumerate(zip(left, right, strict=True))
        ]
    else:
        return 0, 0, [] if type(left) is type(right) and left == right else [path]
    return sum(p[0] for p in parts), sum(p[1] for p in parts), [name for p in parts for name in p[2]]


def compare_states(victim: Trainer, twin: Trainer) -> tuple[Table, list[str]]:
    """Load the last checkpoint of both runs and compare everything in them."""
    table = Table(title="Bitwise equal to the twin that was never killed?", title_justify="left", width=100)
    for name, ratio in (("what", 5), ("compared", 7), ("verdict", 4)):
        table.add_column(name, ratio=ratio)
    states = []
    for trainer in (victim, twin):
        newest = Catalog(resolve(trainer.run)).latest()
        if newest is None or newest.step != trainer.steps:
            raise DemoError(f"{trainer.run} has no checkpoint of step {trainer.steps}: {newest}")
        state = holdfast.load(trainer.run / newest.name)
        del state["holdfast"]["progress"]["ledger"]  # it names the attempts that trained the batches: theirs differ
        states.append(state)
    problems: list[str] = []
    names = {"model": "weights", "optimizer": "optimizer", "scheduler": "learning-rate schedule"}
    for key in sorted({*states[0], *states[1]}, key=lambda key: (key not in names, key)):
        tensors, size, differ = same(states[0].get(key), states[1].get(key), key)
        problems += differ
        label = names.get(key, "RNG, counters, data position")
        compared = f"{tensors} tensors, {size / 1e6:.1f} MB" if tensors else "plain values"
        table.add_row(label, compared, verdict(differ))
    return table, problems


def verdict(problems: list[str]) -> str:
    """Return the word for a table."""
    return f"[bold red]DIFFERS: {', '.join(problems[:3])}[/]" if problems else "[green]equal, every bit[/]"


def compare_samples(victim: Trainer, twin: Trainer, table: Table) -> list[str]:
    """Check the samples of every step: the last life's against the twin's, and re-trained steps against themselves."""
    kept: dict[int, tuple[list[int], float]] = {}
    again, changed = 0, []
    for row in victim.rows():
        now = (row["ids"], row["loss"])
        again += row["step"] in kept
        if kept.get(row["step"], now) != now:
            changed.append(f"step {row['step']} trained again")
        kept[row["step"]] = now
    expected = {row["step"]: (row["ids"], row["loss"]) for row in twin.rows()}
    differ = [f"step {step}" for step in sorted({*kept, *expected}) if kept.get(step) != expected.get(step)]
    count = sum(len(ids) for ids, _ in kept.values())
    table.add_row("samples and losses", f"{count} sample ids over {len(kept)} steps, in order", verdict(differ))
    table.add_row("steps trained twice", f"{again} steps after kills: same samples, same loss", verdict(changed))
    return differ + changed


def measure_lost(quiet: Trainer, every: int) -> tuple[float, float, int, float]:
    """Run ``quiet`` alone: (ms lost per save, its standard error, number of saves, usual ms of a step)."""
    with console.status("measuring what a save costs, on a machine that does nothing else"):
        quiet.start()
        while not quiet.ended():
            time.sleep(0.05)
    at = {row["step"]: row["at"] for row in quiet.rows()}
    took = {step: at[step + 1] - at[step] for step in at if step + 1 in at and step >= every}
    after = [step for step in took if step % every == 0 and step + 1 in took]
    usual = statistics.median(seconds for step, seconds in took.items() if step % every >= 2)
    lost = [(took[step] + took[step + 1] - 2 * usual) * 1e3 for step in after]
    error = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else float("nan")
    return statistics.mean(lost), error, len(lost), usual * 1e3


def cost_of_saves(twin: Trainer, quiet: Trainer, every: int) -> Panel:
    """Return the panel of what saving costs."""
    lost, error, count, usual = measure_lost(quiet, every)
    stats = json.loads(twin.stats.read_text())
    calm = json.loads(quiet.stats.read_text())
    text = Text()
    text.append(f"{calm['seconds_blocked'] / max(1, calm['saves']) * 1e3:8.1f} ms  ", "bold")
    text.append("the loop is held per save\n")
    text.append(f"{lost:8.1f} ms  ", "bold")
    text.append(f"lost per save in all, +- {error:.1f} ({lost / usual:.2f} of a step of {usual:.0f} ms)\n")
    text.append(f"{stats['bytes_written'] / 1e6:8.1f} MB  ", "bold")
    text.append(f"written by the {stats['saves']} saves of the twin, every one synced to disk and digested\n")
    text.append(
        f"How: a third run of {quiet.steps} steps alone on the machine, saving every {every}. Lost = the "
        f"two steps from each of {count} saves on, minus two median steps without a save.",
        "dim",
    )
    return Panel(text, title="What saving costs", title_align="left", width=100)


def what_was_kept(victim: Trainer) -> Table:
    """Return the table of checkpoints on disk, with the reason each is there."""
    catalog = Catalog(resolve(victim.run))
    keep = holdfast.Keep(**catalog.index.keep) if catalog.index.keep else holdfast.Keep()
    records = {record.name: record for record in catalog.records()}
    table = Table(
        title=f"On disk, of {victim.steps} steps and {len(victim.lives())} lives", title_justify="left", width=100
    )
    for name in ("checkpoint", "step", "val_loss", "size", "kept because"):
        table.add_column(name, justify="right" if name in ("step", "val_loss", "size") else "left")
    for one in decide(keep, records.values()):
        record = records[one.name]
        value = record.metrics.get("val_loss")
        shown = f"{value:.4f}" if isinstance(value, float) else ""
        table.add_row(
            one.name,
            str(record.step),
            shown,
            f"{record.size / 1e6:.1f} MB",
            one.why if one.keep else "goes at the next save",
        )
    return table


def written_text(trainer: Trainer, length: int) -> Panel:
    """Return a few lines of what the trained model writes: the end of what the trainer printed."""
    output = trainer.output.read_text(errors="replace").splitlines()
    text = "\n".join(line for line in output if not line.startswith("holdfast"))
    start = max(0, text.find("def ", len(text) - length - 20))
    lines = [line for line in text[start:].splitlines() if line.strip()][:9]
    return Panel(Text("\n".join(line[:94] for line in lines)), title="What it writes", title_align="left", width=100)


def demo(arguments: argparse.Namespace) -> list[str]:
    """Run everything and print it; returns what differs."""
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    root = Path(arguments.directory)
    head = (
        f"A byte-level GPT learns the standard library of Python {sys.version_info.major}.{sys.version_info.minor} in "
        f"a plain loop: {arguments.steps} steps, a checkpoint every {EVERY}.\nIts trainer is killed three times "
        f"(moments from seed {seed}), and `holdfast run` starts it again."
    )
    console.print(Panel(head, title="[bold]Holdfast[/]: whatever kills it, it goes on from where it was", width=100))
    victim = Trainer(root / "killed", arguments.steps, "--generate", str(arguments.generate), watched=True)
    twin = Trainer(root / "twin", arguments.steps)
    every = 8
    quiet = Trainer(root / "quiet", min(every * 9, arguments.steps), "--evals", "0", every=every)
    try:
        lives, problems = lives_of(victim, train_and_kill(victim, twin, random.Random(seed)))
        console.print(lives)
        table, differ = compare_states(victim, twin)
        problems += differ + compare_samples(victim, twin, table)
        console.print(table)
        console.print(cost_of_saves(twin, quiet, every))
        console.print(what_was_kept(victim))
        console.print(written_text(victim, arguments.generate))
    finally:
        for trainer in (victim, twin, quiet):
            trainer.stop()
    return problems


def main() -> int:
    """Run the demo; the exit status says whether the promise held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="demo-runs", help="where the runs go; emptied first")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--generate", type=int, default=300, help="bytes of text to write at the end")
    parser.add_argument("--seed", type=int, help="repeat the kill moments of an earlier demo")
    began = time.monotonic()
    try:
        problems = demo(parser.parse_args())
    except DemoError as error:
        word = "STALLED" if isinstance(error, StalledError) else "FAILED"
        console.print(Text(f"{word}, nothing was compared: {error}", "bold red"))
        return 1
    seconds = time.monotonic() - began
    if problems:
        console.print(Text("NOT EQUAL: " + "\n".join(problems[:10]), "bold red"))
        return 1
    console.print(f"[bold green]Nothing was lost: three kills, the same bits.[/] {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
