"""A worker's main: the function arrives in any form, runs in its process group, and its end is told."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Driver
from worker_entry import tell

from holdfast.errors import ConfigError, ReportMismatchError, TrainingError
from holdfast.trainers.function.engine import Exited, Received
from holdfast.trainers.function.engines.process_engine import LocalEngine
from holdfast.trainers.function.transit import error_from_wire, pack_call, takes_config
from holdfast.trainers.function.worker.main import Group

pytestmark = pytest.mark.usefixtures("all_forked")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(entry="worker_entry:run")
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: LocalEngine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.clear()


def train(driver: Driver, function: Callable[..., Any], config: Any = None, *, num_workers: int = 1) -> list[list[Any]]:
    """Run a function on a group; for each rank its messages and at last its Exited."""
    driver.start(num_workers)
    for rank in range(num_workers):
        begin = {"do": "begin", "rank": rank, "world_size": num_workers}
        driver.engine.send(rank, begin, [pack_call(function, config)])
    ends = {rank: driver.next(Exited, rank) for rank in range(num_workers)}
    found: list[list[Any]] = [[] for _ in range(num_workers)]
    for event in driver.seen:
        if isinstance(event, Received):
            found[event.rank].append(event.message)
    driver.seen.clear()
    return [[*messages, ends[rank]] for rank, messages in enumerate(found)]


def kinds(messages: list[Any]) -> list[str]:
    return [message.header["on"] for message in messages[:-1]]


def module_level(config: dict[str, Any]) -> None:
    tell(config=config)


def test_a_function_ends(driver: Driver) -> None:
    """running, what it reports, drained, finished, status 0."""
    (messages,) = train(driver, module_level, {"lr": 0.1})
    assert kinds(messages) == ["running", "told", "drained", "finished"]
    assert messages[1].header["config"] == {"lr": 0.1}
    assert messages[-1].exit_code == 0


def test_lambda_and_closure(driver: Driver) -> None:
    """Neither has a name that a worker could import."""
    secret = {"layers": [1, 2]}

    def inner() -> None:
        tell(secret=secret)

    assert train(driver, inner)[0][1].header["secret"] == secret
    assert train(driver, lambda config: tell(got=config))[0][1].header["got"] == {}
    assert train(driver, lambda *given: tell(got=given), {"a": 1})[0][1].header["got"] == [{"a": 1}]


def test_a_module_that_workers_cannot_import(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module that was loaded from a file by hand travels by value."""
    file = tmp_path / "somewhere.py"
    file.write_text("from worker_entry import tell\nVALUE = 5\ndef train():\n    tell(value=VALUE)\n")
    spec = importlib.util.spec_from_file_location("loaded_by_hand", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_by_hand", module)
    spec.loader.exec_module(module)
    assert train(driver, module.train)[0][1].header["value"] == 5


def test_exception(driver: Driver, capfd: pytest.CaptureFixture[str]) -> None:
    """It arrives as itself, with a traceback that begins at the user's function; reports before it are not lost."""

    def failing() -> None:
        raise ZeroDivisionError("by hand")

    (messages,) = train(driver, failing)
    assert kinds(messages) == ["running", "abandoned", "failed"]
    error = error_from_wire(messages[2].header["error"], *messages[2].attachments)
    assert isinstance(error, ZeroDivisionError)
    shown = str(error.__cause__)
    assert "in failing" in shown
    assert "trainers/function/worker/main.py" not in shown
    assert messages[-1].exit_code == 1
    assert "(rank 0) ZeroDivisionError: by hand" in capfd.readouterr().err


def test_exception_that_cannot_be_rebuilt(driver: Driver) -> None:
    """It arrives as TrainingError with its words, and the worker's traceback as cause."""

    class StubbornError(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not me")

    def failing() -> None:
        raise StubbornError("words")

    (messages,) = train(driver, failing)
    error = error_from_wire(messages[2].header["error"], *messages[2].attachments)
    assert isinstance(error, TrainingError)
    assert str(error) == "StubbornError: words"
    assert "in failing" in str(error.__cause__)


@pytest.mark.parametrize("code", [0, None])
def test_clean_exit_is_an_end(driver: Driver, code: int | None) -> None:
    """sys.exit(0) means finished."""
    (messages,) = train(driver, lambda: sys.exit(code))
    assert kinds(messages) == ["running", "drained", "finished"]
    assert messages[-1].exit_code == 0


@pytest.mark.parametrize(("code", "status"), [(85, 85), ("sorry", 1)])
def test_exit_with_a_status(driver: Driver, code: Any, status: int) -> None:
    """Any other status is that of the process, after what was reported is safe; it is no end of training."""
    (messages,) = train(driver, lambda: sys.exit(code))
    assert kinds(messages) == ["running", "drained", "leaving"]
    assert messages[-1].exit_code == status
    assert ("sorry" in messages[-1].detail) == (code == "sorry")


def test_two_workers_reduce(driver: Driver) -> None:
    """The default process group is there on every rank, and gone afterwards."""

    def reduce() -> None:
        import torch
        import torch.distributed as dist

        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        tell(total=total.item(), backend=dist.get_backend(), size=dist.get_world_size())

    for _ in range(2):  # and again, with a new port
        for messages in train(driver, reduce, num_workers=2):
            assert messages[1].header == {"on": "told", "total": 3.0, "backend": "gloo", "size": 2}
            assert messages[-1].exit_code == 0


def test_devices_that_are_not_there(driver: Driver) -> None:
    """use_gpu on a machine without enough devices says so, instead of an error out of NCCL."""
    driver.start(2, use_gpu=True, environment={rank: {"CUDA_VISIBLE_DEVICES": ""} for rank in (0, 1)})
    driver.engine.send(0, {"do": "begin", "rank": 0, "world_size": 2}, [pack_call(print)])
    message = driver.next(Received, 0).message
    while message.header["on"] != "failed":
        message = driver.next(Received, 0).message
    error = error_from_wire(message.header["error"], *message.attachments)
    assert isinstance(error, ConfigError)
    assert "torch sees 0 CUDA devices" in str(error)


SCRIPT = """
import threading, torch
from engine_kit import Driver
from worker_entry import tell
import beside_the_script
from holdfast.trainers.function.engines.process_engine import LocalEngine
from holdfast.trainers.function.engine import Exited, Received
from holdfast.trainers.function.transit import pack_call

class Net(torch.nn.Linear):
    pass

def train_func():
    assert threading.current_thread() is threading.main_thread()
    torch.save(Net(2, 2), "net.pt")  # plain pickle: finds Net by its name in __main__
    tell(value=beside_the_script.VALUE, name=__name__)

engine = LocalEngine(entry="worker_entry:run")
driver = Driver(engine)
driver.start(1)
engine.send(0, {"do": "begin", "rank": 0, "world_size": 1}, [pack_call(train_func)])
print(driver.next(Exited).exit_code, *[e.message.header for e in driver.seen if isinstance(e, Received)])
print(type(torch.load("net.pt", weights_only=False)) is Net)
engine.close()
"""


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """The script is not run again in workers; its functions and classes, and modules beside it, are found there."""
    (tmp_path / "beside_the_script.py").write_text("VALUE = 42\n")
    script = tmp_path / "train script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{HERE.parents[1] / 'src'}{os.pathsep}{HERE}"},
        check=False,
    )
    assert "'value': 42, 'name': '__main__'" in done.stdout, done.stderr
    assert done.stdout.startswith("0 ")
    assert done.stdout.endswith("True\n")


def test_what_cannot_be_pickled_is_named() -> None:
    """The error says which part of train_func or config it is, and what to do."""
    import threading

    lock = threading.Lock()

    def uses_lock() -> None:
        with lock:
            pass

    with pytest.raises(ConfigError, match=r"'lock', used by train_func \(lock\) cannot be sent"):
        pack_call(uses_lock)
    with pytest.raises(ConfigError, match=r"train_loop_config\['data'\]\[1\] \(generator\).*inside train_func"):
        pack_call(print, {"lr": 1, "data": [0, (x for x in "ab")]})


def test_arguments_of_a_train_function() -> None:
    """None or one; more is an error that names them."""
    assert not takes_config(lambda: None)
    assert takes_config(lambda config: None)
    assert takes_config(lambda config=None: None)
    assert takes_config(print)
    with pytest.raises(ConfigError, match="needs the arguments model, config"):
        takes_config(lambda model, config: None)
    with pytest.raises(ConfigError, match="give a function"):
        takes_config(3)  # type: ignore[arg-type]


def test_a_rank_that_returns_early_keeps_the_group_for_the_others(driver: Driver) -> None:
    """Rank 0 holds the store of the group: without it rank 1 could not make another group half a second later."""

    def train_func() -> None:
        import time

        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(0.5)
            mine = dist.new_group([1], use_local_synchronization=True)
            dist.barrier(mine)
            tell(made=True)

    first, second = train(driver, train_func, num_workers=2)
    assert kinds(first) == ["running", "drained", "finished"]
    assert kinds(second) == ["running", "told", "drained", "finished"]
    assert (first[-1].exit_code, second[-1].exit_code) == (0, 0)


def test_nobody_begins_before_all_have_joined() -> None:
    """The last to come lets all go; one that waits in vain says so."""
    import threading

    import torch.distributed as dist

    store = dist.HashStore()
    with pytest.raises(TrainingError, match="not all 3 ranks joined"):
        Group(store, 3).joined(0.1)
    begun: list[int] = []

    def join(rank: int) -> None:
        Group(store, 3).joined(20.0)
        begun.append(rank)

    second = threading.Thread(target=join, args=(1,))
    second.start()
    second.join(0.2)
    assert begun == []
    join(2)
    second.join(20.0)
    assert sorted(begun) == [1, 2]


def test_a_rank_that_does_not_come_to_a_collective_is_named() -> None:
    """Instead of a hang."""
    import torch.distributed as dist

    with pytest.raises(ReportMismatchError, match=r"barrier\(\) number 1 was not called by rank 1, 2 within 0.1 s"):
        Group(dist.HashStore(), 3, 0).meet(b"", 0.1, "barrier")
