"""Local mode: train_func runs in this process, alone or as one of those that torchrun has started."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from holdfast.errors import TrainingFailedError

from .control.actions import End
from .control.drive import Driver
from .control.messages import say
from .engines.local.inline import InlineEngine
from .launched import Launched
from .worker.group import leave_launched_group
from .worker.main import run_here

__all__ = ["drive_here", "work_here"]


def drive_here(driver: Driver, engine: InlineEngine, function: Callable[..., Any], config: Any) -> Any:
    """Drive the run in a thread, and call the train function here each time it is to start.

    Args:
        driver: of the run; closed at the end.
        engine: it drives.
        function: the train function.
        config: what it gets.

    Returns:
        What the function returned.

    Raises:
        BaseException: why the run has ended, if not well.
    """
    outcome: Future[End] = Future()
    raised: list[BaseException] = []
    returned: list[Any] = [None]

    def drive() -> None:
        try:
            outcome.set_result(driver.run())
        except BaseException as error:  # noqa: BLE001 - a thread edge: raised below
            outcome.set_exception(error)
        engine.close()

    def ended(status: int, error: BaseException | None) -> None:
        raised[:] = [] if error is None else [error]
        engine.ended(status)

    @functools.wraps(function)
    def called(*arguments: Any) -> None:
        try:
            returned[0] = function(*arguments)
        except KeyboardInterrupt:
            driver.stop("SIGINT")  # before the controller hears of a failure, which it would recover from
            raise

    driving = threading.Thread(target=drive, name="holdfast-drive")
    driving.start()
    try:
        while (channel := engine.next_call()) is not None:
            run_here(channel, called, config, ended=ended)
    except BaseException:
        driver.stop("an error")
        raise
    finally:
        driving.join()
        driver.close()
    say(driver.last_words())
    if raised and isinstance(raised[0], KeyboardInterrupt):
        raise raised[0]
    end = outcome.result()
    if end.error is not None:
        raise end.error from (raised[0] if raised else end.error.__cause__)
    return returned[0]


def work_here(launched: Launched, function: Callable[..., Any], config: Mapping[str, Any] | None) -> bytes:
    """Call the train function once, as a worker of the run that rank 0 drives; wait for the end of the run.

    Args:
        launched: we are another rank than 0.
        function: the train function.
        config: what it gets.

    Returns:
        What the function returned on rank 0, packed.

    Raises:
        TrainingFailedError: the function failed here, or the run has failed elsewhere.
    """
    raised: list[BaseException] = []

    def ended(status: int, error: BaseException | None) -> None:
        if error is not None:
            raised.append(error)

    assert launched.worker is not None
    run_here(launched.worker, function, config, ended=ended)
    if raised:
        # Now, not with the run: rank 0 may wait for us in a collective.
        leave_launched_group()
        if isinstance(raised[0], (KeyboardInterrupt, SystemExit)):
            raise raised[0]
        rank = launched.info.rank
        raise TrainingFailedError(
            f"training failed: train_func raised on rank {rank}: {type(raised[0]).__name__}: {raised[0]}",
            failures={rank: raised[0]},
        ) from raised[0]
    return launched.wait_for_end()
