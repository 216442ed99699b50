"""Nodes without a cluster: each is an agent in a process of its own on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.trainers.function.engines.cluster.nodes import AgentCall, AgentFailed, NodeEvent, PlacesChanged
from holdfast.trainers.function.engines.cluster.places import NodePlace

_AGENT = """
import json, sys
from holdfast.trainers.function.engines.cluster.agent import run_agent
from holdfast.trainers.function.engines.cluster.nodes import AgentCall
run_agent(AgentCall(**json.loads(sys.argv[1])))
"""


class FakeNodes:
    """Implements `holdfast.trainers.function.engines.cluster.nodes.Nodes`.

    Args:
        sizes: places by node.

    Attributes:
        agents: the process of each node's agent.
        launched: nodes in the order in which agents were started.
        preludes: code that an agent runs first, by node.
    """

    host = "127.0.0.1"

    def __init__(self, **sizes: int) -> None:
        self.sizes = dict(sizes)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.launched: list[str] = []
        self._numbers: dict[int, subprocess.Popen[bytes]] = {}
        self._post: Callable[[NodeEvent], Any] = lambda _: None
        self.preludes: dict[str, str] = {}

    def open(self, post: Callable[[NodeEvent], Any]) -> None:
        self._post = post
        self.tell()

    def tell(self, missing: str = "") -> None:
        places = [
            NodePlace(node=node, address="127.0.0.1", number=number)
            for node, size in self.sizes.items()
            for number in range(size)
        ]
        self._post(PlacesChanged(places=places, missing=missing or ("" if places else "no nodes")))

    def launch(self, node: str, call: AgentCall) -> None:
        self.launched.append(node)
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-c", self.preludes.get(node, "") + _AGENT, json.dumps(asdict(call))],
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.agents[node] = self._numbers[call.number] = process

        def watch() -> None:
            process.wait()
            self._post(AgentFailed(number=call.number, why=f"status {process.returncode}"))

        threading.Thread(target=watch, daemon=True).start()

    def doubt(self, node: str) -> None:
        """Look whether a node is still there: these say so themselves."""

    def end(self, number: int) -> None:
        if number in self._numbers:
            self._numbers[number].kill()

    def close(self) -> None:
        for process in self._numbers.values():
            process.kill()
            process.wait()

    def set(self, **sizes: int) -> None:
        """Nodes come and go; those that are not named stay."""
        self.sizes = {node: size for node, size in {**self.sizes, **sizes}.items() if size}
        self.tell()
