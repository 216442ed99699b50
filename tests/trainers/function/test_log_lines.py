"""How much of what workers print is shown, and where it is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from engine_kit import Driver
from nodes_kit import FakeNodes

from holdfast.trainers.function.engines.process_engine import ClusterEngine
from holdfast.trainers.function.engines.supervisor import LineLimit, shown_and_kept


def test_a_flood_is_cut_and_said() -> None:
    """A burst is shown, then a second's worth at a time; each gap says how long it is and where the lines are."""
    now = 0.0
    limit = LineLimit("rank-3.log", per_s=2, burst=4, clock=lambda: now)
    lines = [str(number) for number in range(6)]
    assert limit.choose(lines[:3]) == lines[:3]
    assert limit.choose(lines) == ["0", "[... too many lines to show all: they are in rank-3.log ...]"]
    now = 0.9
    assert limit.choose(lines[:2]) == []
    now = 1.0
    assert limit.choose(["a", "b"]) == ["[... 7 lines are left out here ...]", "a", "b"]
    now = 60.0
    assert limit.choose(lines[:4]) == lines[:4]


def test_the_file_has_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both streams of a process share what may be shown; its file and its last lines know nothing of that."""
    out, err = shown_and_kept("rank 0", tmp_path / "logs" / "0.log", LineLimit("0.log", per_s=1, burst=3))
    out.feed(b"one\ntwo\n")
    err.feed(b"three\nfour\nfive\n")
    for sink in (out, err):
        sink.flush()
        sink.end()
    assert (tmp_path / "logs" / "0.log").read_text() == "one\ntwo\nthree\nfour\nfive\n"
    assert list(err.tail) == ["three", "four", "five"]
    shown = capsys.readouterr()
    assert shown.out == "(rank 0) one\n(rank 0) two\n"
    assert shown.err.startswith("(rank 0) three\n(rank 0) [... too many lines")


@pytest.mark.slow  # nodes that import torch
def test_lines_of_nodes_say_where_they_come_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank and node stand in front of each line; of a rank that prints without end not all is shown, and all kept."""
    nodes = FakeNodes(a=1, b=1)
    engine = ClusterEngine(nodes, entry="engine_peer:serve")
    try:
        driver = Driver(engine)
        driver.start(2, log_directory=tmp_path / "attempt-00001")
        for rank in (0, 1):
            driver.run(rank, lambda channel, facts: print("\n".join(map(str, range(5000))), flush=True))
        driver.clear()
    finally:
        engine.close()
        nodes.close()
    shown = capfd.readouterr().out
    for rank, node in enumerate("ab"):
        kept = (tmp_path / "attempt-00001" / f"rank-{rank}.log").read_text().split()
        assert [line for line in kept if line.isdigit()] == [str(number) for number in range(5000)]
        prefix = re.escape(f"(rank {rank}, node {node}) ")
        numbers = re.findall(rf"^{prefix}(\d+)$", shown, re.MULTILINE)
        assert numbers[:100] == [str(number) for number in range(100)]
        assert len(numbers) < 3000
        assert re.search(rf"^{prefix}\[\.\.\. too many lines.*attempt-00001/rank-{rank}\.log", shown, re.MULTILINE)
