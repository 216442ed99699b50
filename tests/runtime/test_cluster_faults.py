"""What the cluster engine makes of agents that die, fall silent, or see another disk."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Driver, wait_gone
from nodes_kit import FakeNodes

from holdfast.errors import ConfigError
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.trainers.function.engine import Capacity, Exited, Unable
from holdfast.trainers.function.engines.cluster.engine import ClusterEngine

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
