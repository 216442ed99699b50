"""What workers of `test_fit_nodes` run, and where they stop so that a test can do something to their node."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast as hf

LIMIT_S = 90.0


def attempt() -> int:
    return int(hf.get_context().get_trial_id().rsplit("-", 1)[1])


def mark(config: dict[str, Any], name: str, text: str = "") -> None:
    """Leave a mark; it is there as a whole or not at all."""
    path = Path(config["folder"], name)
    part = path.with_name(f"{name}.part-{hf.get_context().get_world_rank()}")
    part.write_text(text)
    part.rename(path)


def wait_for(config: dict[str, Any], name: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not Path(config["folder"], name).exists():
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)


def at_fault(config: dict[str, Any], step: int) -> bool:
    return hf.get_context().get_world_rank() == config.get("rank", 1) and attempt() == 1 and step == config["step"]


def steps(config: dict[str, Any]) -> None:
    """Count steps in a state that every step reports; at one of them, a rank of the first attempt does ``how``."""
    import torch

    rank = hf.get_context().get_world_rank()
    state: dict[str, Any] = {"total": torch.zeros(1000), "step": 0}
    state["rest"] = [torch.zeros(20_000) for _ in range(4)]  # a share of it for each rank
    if (checkpoint := hf.get_checkpoint()) is not None and config.get("directories"):
        with checkpoint.as_directory() as folder:
            state["step"] = int(Path(folder, f"rank-{rank}.txt").read_text())
    elif checkpoint is not None:
        state = hf.load(checkpoint)
    mark(config, f"begun-{attempt()}-{rank}", str(state["step"]))
    if attempt() > 1 and config.get("second_waits"):
        wait_for(config, "go-on")
    for step in range(state["step"] + 1, config["steps"] + 1):
        state = {**state, "total": state["total"] + step, "step": step}
        if at_fault(config, step):
            FAULTS[config["how"]](config)
        if config.get("directories"):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, f"rank-{rank}.txt").write_text(str(step))
                hf.report({"step": step}, checkpoint=hf.Checkpoint.from_directory(folder))
        else:
            hf.report({"step": step, "total": state["total"][0].item()}, state=state)


def before_the_seal(config: dict[str, Any]) -> None:
    """The next share of a state waits before it is handed to the writer."""
    _around_submit(config, lambda submit, arguments: _stop(config))


def after_the_part(config: dict[str, Any]) -> None:
    """The next share of a state is stored, and nobody hears of it."""

    def submit(original: Callable[..., None], arguments: dict[str, Any]) -> None:
        original(**{**arguments, "ended": lambda _: mark(config, "stopped")})
        time.sleep(LIMIT_S)

    _around_submit(config, submit)


def cut_off(config: dict[str, Any]) -> None:
    """The next share is written when the workers have been started again elsewhere."""

    def submit(original: Callable[..., None], arguments: dict[str, Any]) -> None:
        mark(config, "stopped")
        wait_for(config, "write")
        original(**{**arguments, "ended": lambda error: mark(config, "written", repr(error))})
        time.sleep(LIMIT_S)

    _around_submit(config, submit)


def in_the_intake(config: dict[str, Any]) -> None:
    """The next directory is handed over, and nobody hears of it."""
    from holdfast.trainers.function.worker import delivery

    original = delivery.take

    def take(*arguments: Any, **options: Any) -> Any:
        original(*arguments, **options)
        _stop(config)

    delivery.take = take


def _around_submit(config: dict[str, Any], instead: Callable[..., None]) -> None:
    from holdfast.trainers.function.worker.delivery import Shares

    original = Shares.submit
    Shares.submit = lambda self, state, go, **told: instead(  # type: ignore[method-assign]
        lambda **given: original(self, **given), {"state": state, "go": go, **told}
    )


def _stop(config: dict[str, Any]) -> None:
    mark(config, "stopped")
    time.sleep(LIMIT_S)


def full_disk(config: dict[str, Any]) -> None:
    """The disk takes nothing more, on this node alone."""
    from holdfast.testing import FaultyStorage
    from holdfast.trainers.function.worker.delivery import Shares

    del config
    original = Shares.__init__

    def begin(self: Shares, storage: Any, *arguments: Any, **options: Any) -> None:
        original(self, FaultyStorage(storage.local_root, fail_on={"pwrite": errno.ENOSPC}), *arguments, **options)

    Shares.__init__ = begin  # type: ignore[method-assign]


FAULTS = {
    "before_the_seal": before_the_seal,
    "after_the_part": after_the_part,
    "cut_off": cut_off,
    "full_disk": full_disk,
    "in_the_intake": in_the_intake,
}


def moves(config: dict[str, Any]) -> None:
    """Take steps until the workers were moved, and a few more; save only when asked to."""
    rank, step = hf.get_context().get_world_rank(), 0
    if (checkpoint := hf.get_checkpoint()) is not None:
        step = hf.load(checkpoint)["step"]
    mark(config, f"begun-{attempt()}-{rank}", str(step))
    last = step + 3
    while attempt() == 1 or step < last:
        if attempt() == 1 and step == config.get("hold_at"):
            mark(config, f"held-{rank}")
            wait_for(config, "go-on")
        time.sleep(0.01)
        step += 1
        if hf.should_save():
            hf.report({"step": step}, state={"step": step})
            mark(config, f"saved-{attempt()}-{rank}", str(step))
        elif attempt() == 1 and step % config.get("save_every", step + 1) == 0:
            hf.report({"step": step}, state={"step": step})
        else:
            hf.report({"step": step})
        if config.get("last") == step:
            break


def needs_a_package(config: dict[str, Any]) -> None:
    """Import what is not installed everywhere."""
    import only_on_some_nodes  # type: ignore[import-not-found]

    del only_on_some_nodes
    steps(config)


def validated(config: dict[str, Any]) -> None:
    """Report two states that are to be validated."""
    for step in (1, 2):
        hf.report({"step": step}, state={"step": step}, validation=True)


def validate(checkpoint: hf.Checkpoint) -> dict[str, Any]:
    """Say what is in a checkpoint, and where it was looked at."""
    step = hf.load(checkpoint)["step"]
    print(f"validates step {step}")
    return {"seen": 10 * step, "node": os.environ.get("NODE_OF_THE_TEST", "none")}


def clock(config: dict[str, Any]) -> None:
    """Say what time it is here."""
    mark(config, f"clock-{hf.get_context().get_world_rank()}", str(time.time()))
    steps(config)
