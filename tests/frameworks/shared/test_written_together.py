"""What not all ranks have written is removed, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpointer.meeting import Alone
from holdfast.errors import HoldfastError
from holdfast.frameworks.reporting import written_together


class Cut(Alone):
    """A meeting that ends with an error of its own."""

    def __init__(self, topic: str, error: BaseException) -> None:
        self.topic, self.error = topic, error

    def agree(self, topic: str, give: Callable[[], Any], *rest: Any, **options: Any) -> Any:
        if topic == self.topic:
            raise self.error
        return super().agree(topic, give, *rest, **options)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(3), HoldfastError("rank 1 did not come")])
def test_nothing_is_left(tmp_path: Path, end: BaseException) -> None:
    """A rank that does not come, and an interruption while the others are told, leave no directory."""
    for fails in (False, True):
        directory = tmp_path / f"new-{fails}"
        directory.mkdir()
        with pytest.raises(BaseException) as told, written_together(Cut("written", end), str(directory)):
            if fails:
                raise OSError("disk full")
        assert isinstance(told.value, OSError if fails and isinstance(end, HoldfastError) else type(end))
        assert not directory.exists()


def test_what_is_taken_belongs_to_the_taker(tmp_path: Path) -> None:
    """What taking raises is raised, and what was written completely stays with who took it."""

    def take() -> None:
        raise HoldfastError("an earlier one is lost")

    with pytest.raises(HoldfastError, match="earlier"), written_together(Alone(), str(tmp_path), take):
        (tmp_path / "weights.bin").write_text("1234")
    assert (tmp_path / "weights.bin").exists()
