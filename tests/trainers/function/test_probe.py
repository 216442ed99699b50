"""The file by which nodes see that they share the run's storage: it is there for as long as a node looks for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from process_kit import wait_until

from holdfast.run.remains import sweep_hidden
from holdfast.storage import LocalStorage
from holdfast.trainers.function.engines import agents
from holdfast.trainers.function.engines.agent import look_at_storage
from holdfast.trainers.function.engines.agents import StorageProbe

IDENT = "0123456789abcdef"


class Link:
    """An agent's connection, as far as a probe uses it."""

    node, number = "n1", 7

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.question: dict[str, Any] = {}

    def tell(self, header: dict[str, Any]) -> None:
        self.question = header
        self.asked.set()


def test_a_marker_that_is_swept_is_put_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that begins while a node looks sweeps the marker; the node sees it all the same, and is not barred.

    Nothing of it is left once the node has answered, and nothing is put after that.
    """
    monkeypatch.setattr(agents, "_PROBE_AGAIN_S", 0.05)
    storage, link = LocalStorage(tmp_path), Link()
    found = StorageProbe(storage, IDENT)
    found.ask(link, pytest.fail)  # type: ignore[arg-type]
    assert link.asked.wait(10)
    marker = link.question["marker"]
    assert sweep_hidden(storage, keep=()) == [f".probe-{IDENT}"]
    assert look_at_storage(storage, marker=marker, node=link.node) == ""
    assert storage.exists(marker)
    found.answered(link)  # type: ignore[arg-type]
    assert wait_until(lambda: not list(tmp_path.iterdir()))
    threading.Event().wait(0.2)  # longer than until the next time
    assert not list(tmp_path.iterdir())
    found.close()


def test_a_storage_that_takes_nothing_is_not_tried(tmp_path: Path) -> None:
    """The run fails by itself then, with the storage's own words."""

    class Refusing(LocalStorage):
        def put(self, path: str, data: Any, **options: Any) -> None:
            raise OSError("read-only")

    untried = threading.Event()
    found = StorageProbe(Refusing(tmp_path), IDENT)
    found.ask(Link(), untried.set)  # type: ignore[arg-type]
    assert untried.wait(10)
    found.close()
