"""What the cluster engine makes of agents that die, fall silent, or see another disk."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_kit import Driver, wait_gone
from nodes_kit import FakeNodes

from holdfast.errors import ConfigError
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.trainers.function.engine import Capacity, Exited, Unable
from holdfast.trainers.function.engines.cluster.engine import ClusterEngine
from holdfast.trainers.function.engines.cluster.nodes import PlacesChanged
from holdfast.trainers.function.engines.cluster.places import NodePlace

ENTRY = "engine_peer:serve"
ELSEWHERE = """
import holdfast.trainers.function.engines.cluster.agent as agent
from holdfast.storage.local.local_storage import LocalStorage
agent.from_description = lambda *_: LocalStorage({!r})
"""
OLDER = "import holdfast.trainers.function.engines.cluster.agent as agent; agent.version = lambda: '0.0.1'\n"


@pytest.fixture
def nodes() -> Iterator[FakeNodes]:
    made = FakeNodes(a=1, b=1)
    yield made
    made.close()


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
        with socket.create_connection(("127.0.0.1", engine._door.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        driver = Driver(engine)
        driver.start(2)
        driver.clear()
    finally:
        engine.close()


def test_a_node_that_comes_later_and_cannot_train_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version on it ends no run that trains elsewhere; nothing is started there."""
    nodes = FakeNodes(a=1)
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        driver = Driver(engine)
        driver.start(1)
        engine._places = (*engine._places, NodePlace(node="c", number=7))
        link = SimpleNamespace(node="c", number=99, facts=None, close=lambda: None, fileno=lambda: -1)
        monkeypatch.setattr(engine._selector, "unregister", lambda _: None)
        engine._links["c"] = link  # type: ignore[assignment]
        engine._meet(link, {"host": "c", "holdfast": "0.0.1", "python": "3.0.0", "torch": True})  # type: ignore[arg-type]
        assert [place.node for place in engine._usable()] == ["a"]
        assert driver.run(0, lambda channel, facts: 7) == 7
        assert not any(isinstance(event, Unable) for event in engine._ready)
        engine._advance()
        assert "c" not in engine._starting
        driver.clear()
    finally:
        engine.close()
        nodes.close()


def test_what_was_waited_for_does_not_keep_the_driver_busy(nodes: FakeNodes) -> None:
    """A node that is gone, and a group that has its places, are waited for no longer: `events` sleeps."""
    engine = ClusterEngine(nodes, entry=ENTRY)
    try:
        driver = Driver(engine)
        driver.start(2)
        driver.clear()
        engine._again["gone"] = 0.0
        engine._on_nodes(PlacesChanged(places=engine._places))
        engine.events(0.0)
        used = time.process_time()
        engine.events(1.0)
        assert time.process_time() - used < 0.5
    finally:
        engine.close()
