"""What the cluster engine makes of agents that die, fall silent, or see another disk."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Driver
from nodes_kit import FakeNodes
from process_kit import wait_gone

from holdfast.errors import ConfigError
from holdfast.storage import LocalStorage
from holdfast.trainers.function.engine import Capacity, Exited, Started, Unable
from holdfast.trainers.function.engines.agents import PlacesChanged
from holdfast.trainers.function.engines.process_engine import ClusterEngine

pytestmark = pytest.mark.usefixtures("all_forked")
ENTRY = "engine_peer:serve"
ELSEWHERE = """
import holdfast.trainers.function.engines.agent as agent
from holdfast.storage import LocalStorage
agent.from_description = lambda *_: LocalStorage({!r})
"""
OLDER = "import holdfast._version; holdfast._version.__version__ = '0.0.1'\n"
BARE = """
import importlib.metadata
def version(name, found=importlib.metadata.version):
    if name == 'holdfast':
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
"""


@pytest.fixture
def nodes() -> Iterator[FakeNodes]:
    made = FakeNodes(a=1, b=1)
    yield made
    made.close()


def capacity_of(driver: Driver, number: int) -> None:
    while len(driver.engine._agents.usable()) != number:  # type: ignore[attr-defined]
        driver.engine.events(0.1)


def capacity(driver: Driver, number: int) -> Capacity:
    while (event := driver.next(Capacity)).num_workers != number:
        pass
    return event


def test_an_agent_dies_and_one_falls_silent(nodes: FakeNodes) -> None:
    """The ranks of its node are lost, the others go on; its places count again when there is another agent."""
    engine = ClusterEngine(nodes, entry=ENTRY, silence_s=6)
    try:
        driver = Driver(engine)
        pids = driver.start(2)
        agents = dict(nodes.agents)
        agents["a"].kill()
        lost = driver.next(Exited)
        assert (lost.rank, lost.reason, lost.signal, lost.exit_code) == (0, "node", None, None)
        assert lost.node == "node a (127.0.0.1)"
        assert wait_gone(pids[0])
        assert driver.run(1, lambda channel, facts: os.getpid()) == pids[1]
        assert "node a (127.0.0.1) is lost" in capacity(driver, 1).detail
        capacity(driver, 2)
        assert nodes.agents["b"] is agents["b"]
        driver.clear()
        pids = driver.start(2)
        nodes.agents["b"].send_signal(signal.SIGSTOP)
        lost = driver.next(Exited)
        assert (lost.rank, lost.reason) == (1, "unreachable")
        assert "said nothing for 6 s" in lost.detail
        assert driver.run(0, lambda channel, facts: os.getpid()) == pids[0]
        assert wait_gone(pids[1])
    finally:
        engine.close()


def test_a_node_with_a_disk_of_its_own_is_refused(nodes: FakeNodes, tmp_path: Path) -> None:
    """It is named, with what to do; the one that shares the storage is not, and nothing is left there."""
    (tmp_path / "run").mkdir()
    nodes.preludes["b"] = ELSEWHERE.format(str(tmp_path / "other"))
    error = refused(nodes, LocalStorage(tmp_path / "run"))
    assert "is private to some machines: node b" in str(error)
    assert "file system that all nodes mount" in str(error)
    assert list((tmp_path / "run").rglob("*")) == []


def test_another_version_of_holdfast_is_refused(nodes: FakeNodes) -> None:
    nodes.preludes["a"] = OLDER
    assert "node a" in str(error := refused(nodes, None))
    assert "has Holdfast 0.0.1, the driver " in str(error)


def test_a_node_without_metadata_of_the_package(nodes: FakeNodes) -> None:
    """A package that lies on PYTHONPATH, or that a job brings (py_modules), has no dist-info: nodes train with it."""
    nodes.preludes = dict.fromkeys("ab", BARE)
    nodes.options = ("-u",)  # as on a cluster: nothing is there before its import
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        driver = Driver(engine)
        driver.start(2)
        driver.clear()
    finally:
        engine.close()


def test_why_an_agent_fails_is_said_where_the_run_waits(nodes: FakeNodes) -> None:
    """What the engine tells of missing room holds the error of an agent that does not start."""
    nodes.preludes["b"] = "raise RuntimeError('its disk is on fire')\n"
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        detail = capacity(Driver(engine), 1).detail
        assert "node b (127.0.0.1) is lost (RuntimeError: its disk is on fire)" in detail
    finally:
        engine.close()


def refused(nodes: FakeNodes, storage: Any) -> ConfigError:
    engine = ClusterEngine(nodes, storage=storage, entry=ENTRY)
    try:
        error = Driver(engine).next(Unable).error
        assert isinstance(error, ConfigError)
        return error
    finally:
        engine.close()


def test_a_stranger_is_not_let_in(nodes: FakeNodes) -> None:
    """Who does not know the token is hung up on, and changes nothing."""
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        with socket.create_connection(("127.0.0.1", engine._agents._listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        driver = Driver(engine)
        driver.start(2)
        driver.clear()
    finally:
        engine.close()


UNFIT = {
    "c": (OLDER, "has Holdfast 0.0.1"),
    "d": ("import platform; platform.python_version = lambda: '3.0.0'\n", "has Python 3.0.0"),
    "e": ("import importlib.util; importlib.util.find_spec = lambda _: None\n", "has no torch"),
    "f": ("import not_installed_here\n", "No module named 'not_installed_here'"),
}


@pytest.mark.parametrize("node", UNFIT)
def test_a_node_that_cannot_train_at_the_first_start(node: str) -> None:
    """It is an error that names the node and what is wrong."""
    nodes = FakeNodes(**{node: 1})
    nodes.preludes[node], words = UNFIT[node]
    try:
        error = str(refused(nodes, None))
    finally:
        nodes.close()
    assert f"node {node} (" in error
    assert words in error


def test_nodes_that_come_later_and_cannot_train_are_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    """They end no run, are named, and places are looked for elsewhere; a group that waits for one is not a failure."""
    nodes = FakeNodes(a=1, b=1)
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        driver = Driver(engine)
        driver.start(2)
        driver.clear()
        capacity_of(driver, 2)
        nodes.preludes = {node: prelude for node, (prelude, _) in UNFIT.items()}
        nodes.set(b=0, c=1)
        nodes.agents["b"].kill()
        while "c" not in nodes.launched:
            engine.events(0.1)
        driver.seen.clear()  # the ends of the first group
        driver.begin(2)
        lost = driver.next(Exited, 1)
        # Whether the group had begun to wait for that node when it was refused is a matter of time.
        placed = ("node c (127.0.0.1)", "has Holdfast 0.0.1"), ("", "went away before")
        assert lost.reason == "unplaced"
        assert any(lost.node == where and words in lost.detail for where, words in placed), lost
        driver.clear()
        nodes.set(d=1, e=1, f=1)
        while len(nodes.refused) < len(UNFIT):
            assert not any(isinstance(event, Unable) for event in engine.events(1.0))
        assert sorted(nodes.refused) == sorted(UNFIT)
        assert nodes.launched.count("c") == 1
        for node, (_, words) in UNFIT.items():
            assert any(f"node {node} " in line and words in line for line in caplog.messages)
        nodes.set(g=1)
        driver.start(2)
        driver.clear()
    finally:
        engine.close()
        nodes.close()


def test_an_agent_is_ready_on_a_spare_node(nodes: FakeNodes) -> None:
    """Once workers run it has an interpreter with torch, which the workers of a lost node are forked from."""
    nodes.spares = ("c",)
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        driver = Driver(engine)
        driver.begin(2)
        assert "c" not in nodes.launched
        for _ in range(2):
            driver.next(Started)
        while len(nodes.processes("c")) < 2:
            driver.engine.events(0.1)
        before = nodes.processes("c")
        assert len(nodes.used) == 2
        nodes.kill_node("a")
        nodes.spares = ()
        nodes.set(a=0, c=1)
        driver.clear()
        pids = driver.start(2)
        assert nodes.launched.count("c") == 1
        parent = driver.run(1, lambda channel, facts: os.getppid())
        assert parent in before
        assert pids[1] not in before
        driver.clear()
        assert nodes.used == frozenset()
        nodes.set(c=0)
        while nodes.processes("c"):
            engine.events(0.1)
        assert "c" not in nodes.launched[3:]
    finally:
        engine.close()


def test_what_was_waited_for_does_not_keep_the_driver_busy(nodes: FakeNodes) -> None:
    """A node that is gone, and a group that has its places, are waited for no longer: `events` sleeps."""
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        driver = Driver(engine)
        driver.start(2)
        driver.clear()
        engine._agents._again["gone"] = 0.0
        engine._agents._on_nodes(PlacesChanged(places=engine._agents._places))
        engine.events(0.0)
        used = time.process_time()
        engine.events(1.0)
        assert time.process_time() - used < 0.5
    finally:
        engine.close()
