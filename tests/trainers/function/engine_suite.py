"""What every engine must do. A test class per engine subclasses `EngineTests` and says how to make one.

Workers run `engine_peer.serve`, so that the suite needs neither a controller nor a session.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Driver, start_stubborn_children
from process_kit import wait_gone

from holdfast.errors import HoldfastError
from holdfast.trainers.function.engine import Dying, Engine, Exited, GroupSpec, Received, Started, Woken


class EngineTests:
    """Subclass it and override `make_engine`."""

    prefix = r"\(rank 1\) "
    """Of what rank 1 prints, as a pattern."""

    @classmethod
    def make_engine(cls) -> Engine:
        """Return an engine whose workers run ``engine_peer:serve``."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        """One engine for all tests of the class: each starts groups of its own on it."""
        engine = cls.make_engine()
        yield engine
        engine.close()

    @pytest.fixture
    def driver(self, engine: Engine) -> Iterator[Driver]:
        driver = Driver(engine)
        yield driver
        driver.clear()

    def test_messages_go_both_ways(self, driver: Driver) -> None:
        """A message with attachments arrives as it was, and so does the answer."""
        driver.start(2)
        for rank in (0, 1):
            data = os.urandom(100 + rank)
            assert driver.run(rank, lambda channel, facts, data: data[::-1], data) == data[::-1]
        assert [event.exit_code for event in driver.leave([0, 1])] == [0, 0]

    def test_messages_sent_before_the_start_has_happened_arrive(self, driver: Driver) -> None:
        """Nobody has to wait for Started before sending."""
        driver.begin(1)
        driver.ask(0, lambda channel, facts: "early")
        assert driver.value(0) == "early"
        assert isinstance(driver.next(Started), Started)

    def test_workers_know_their_ranks(self, driver: Driver) -> None:
        """The variables of torchrun are set, and the group's own ones for one rank come on top."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_EXTRA")
        driver.start(2, environment={1: {"HF_EXTRA": "x"}})
        found = [
            driver.run(rank, lambda channel, facts: {n: os.environ.get(n) for n in names} | {"pid": os.getpid()})
            for rank in (0, 1)
        ]
        assert [one["RANK"] for one in found] == ["0", "1"]
        assert [one["LOCAL_RANK"] for one in found] == ["0", "1"]
        assert {one["WORLD_SIZE"] for one in found} == {one["LOCAL_WORLD_SIZE"] for one in found} == {"2"}
        assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]
        assert [one["HF_EXTRA"] for one in found] == [None, "x"]
        assert found[0]["pid"] != found[1]["pid"]

    def test_four_workers_are_separate(self, driver: Driver) -> None:
        """Each rank has its own process and answers for itself, in any order."""
        pids = driver.start(4)
        assert len(set(pids.values())) == 4
        for rank in (3, 1, 2, 0):
            driver.ask(rank, lambda channel, facts: (os.environ["RANK"], os.getpid()))
        assert {driver.value(rank) for rank in range(4)} == {(str(rank), pid) for rank, pid in pids.items()}

    def test_big_messages(self, driver: Driver, tmp_path: Path) -> None:
        """80 MB go there and back while the other side is busy; sending does not wait."""
        driver.start(1)
        data, sent = os.urandom(1 << 20) * 80, str(tmp_path / "sent")

        def until_sent(channel: Any, facts: Any) -> bool:
            for _ in range(3000):  # while it waits here it takes nothing
                if os.path.exists(sent):
                    return True
                time.sleep(0.01)
            return False

        driver.ask(0, until_sent)
        driver.ask(0, lambda channel, facts, data: data, data)
        open(sent, "x").close()
        assert driver.value(0) is True
        assert driver.value(0) == data

    def test_all_that_was_sent_comes_before_the_exit(self, driver: Driver) -> None:
        """A worker that sends 2000 messages and dies at once has delivered all of them."""

        def burst(channel: Any, facts: Any) -> None:
            for number in range(2000):
                channel.send({"on": "row", "number": number})
            os._exit(3)

        driver.start(1)
        driver.ask(0, burst)
        assert driver.next(Exited).exit_code == 3
        rows = [event.message.header["number"] for event in driver.seen if isinstance(event, Received)]
        assert rows == list(range(2000))

    def test_a_large_last_message_comes_before_the_exit(self, driver: Driver) -> None:
        """A worker that sends 3 MB and dies, while the driver is busy with something else, has delivered them."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 4 << 20:
                pytest.skip("net.core.wmem_max of this machine: such a message waits for its reader in the worker")

        def burst(channel: Any, facts: Any) -> None:
            channel.send({"on": "row"}, [bytes(3 << 20)])
            os._exit(3 if channel.flush(30) else 4)

        pids = driver.start(1)
        driver.ask(0, burst)
        assert wait_gone(pids[0])
        time.sleep(0.2)  # for its end to be known where the driver looks next, as after a slow callback
        assert driver.next(Exited).exit_code == 3
        (row,) = [event for event in driver.seen if isinstance(event, Received)]
        assert len(row.message.attachments[0]) == 3 << 20

    @pytest.mark.parametrize("status", [0, 1, 85])
    def test_exit_codes(self, driver: Driver, status: int) -> None:
        """The status with which a worker's main returns is told."""
        driver.start(1)
        (event,) = driver.leave([0], status)
        assert (event.exit_code, event.signal) == (status, None)

    def test_os_exit(self, driver: Driver) -> None:
        """os._exit passes all clean-up by; its status is told all the same."""
        driver.start(1)
        driver.ask(0, lambda channel, facts: os._exit(7))
        event = driver.next(Exited)
        assert (event.exit_code, event.signal) == (7, None)

    def test_system_exit(self, driver: Driver) -> None:
        """SystemExit out of a worker's main ends it with its status."""

        def leave(channel: Any, facts: Any) -> None:
            raise SystemExit(9)

        driver.start(1)
        driver.ask(0, leave)
        assert driver.next(Exited).exit_code == 9

    def test_exception(self, driver: Driver) -> None:
        """An exception out of a worker's main ends it with status 1; the traceback is in the detail."""

        def fail(channel: Any, facts: Any) -> None:
            raise LookupError("no such thing")

        driver.start(1)
        driver.ask(0, fail)
        event = driver.next(Exited)
        assert event.exit_code == 1
        assert "LookupError: no such thing" in event.detail

    def test_sigkill(self, driver: Driver) -> None:
        """A worker killed from outside is told with its signal; the others go on."""
        pids = driver.start(2)
        os.kill(pids[1], signal.SIGKILL)
        event = driver.next(Exited)
        assert (event.rank, event.exit_code, event.signal) == (1, None, signal.SIGKILL)
        assert driver.run(0, lambda channel, facts: "alive") == "alive"

    def test_segmentation_fault(self, driver: Driver) -> None:
        """A segmentation fault is told, and the Python stack that led there is in the detail."""

        def crash(channel: Any, facts: Any) -> None:
            import ctypes

            ctypes.string_at(0)

        driver.start(1)
        driver.ask(0, crash)
        event = driver.next(Exited)
        assert event.signal == signal.SIGSEGV
        assert "Segmentation fault" in event.detail
        assert "in crash" in event.detail

    def test_kill_is_immediate_without_grace(self, driver: Driver) -> None:
        """A worker that ignores SIGTERM dies of SIGKILL, with the processes it started."""
        driver.start(1)
        driver.ask(0, start_stubborn_children)
        helpers = driver.value(0)
        driver.ask(0, lambda channel, facts: time.sleep(600))
        driver.engine.kill()
        assert driver.next(Dying).rank == 0
        assert driver.next(Exited).signal == signal.SIGKILL
        assert all(wait_gone(pid) for pid in helpers)

    def test_kill_with_grace_lets_a_worker_finish(self, driver: Driver) -> None:
        """SIGTERM comes first; who ends by it within the grace is not killed."""

        def until_told(channel: Any, facts: Any) -> None:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
            channel.send({"on": "ready"})
            while True:  # one long sleep may begin just after the signal came
                time.sleep(0.05)

        driver.start(1)
        driver.ask(0, until_told)
        driver.next(Received)
        driver.engine.kill(grace_s=30)
        assert driver.next(Exited).exit_code == 42

    def test_kill_after_the_grace(self, driver: Driver) -> None:
        """Who ignores SIGTERM is killed when the grace is over, not before; the other rank is spared."""

        def ignore(channel: Any, facts: Any) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            channel.send({"on": "ready"})
            time.sleep(600)

        driver.start(2)
        driver.ask(1, ignore)
        driver.next(Received, 1)
        begun = time.monotonic()
        driver.engine.kill([1], grace_s=0.5)
        event = driver.next(Exited)
        assert (event.rank, event.signal) == (1, signal.SIGKILL)
        assert time.monotonic() - begun >= 0.5
        assert driver.run(0, lambda channel, facts: 1) == 1

    def test_kill_of_a_stopped_worker(self, driver: Driver) -> None:
        """SIGSTOP does not protect a worker."""
        pids = driver.start(1)
        os.kill(pids[0], signal.SIGSTOP)
        driver.engine.kill()
        assert driver.next(Exited).signal == signal.SIGKILL

    def test_a_worker_that_dies_with_messages_unread(self, driver: Driver) -> None:
        """Killed with more on its way to it than the system holds, while nobody looks: told, and others are started."""
        pids = driver.start(1)
        os.kill(pids[0], signal.SIGSTOP)
        driver.engine.send(0, {"do": "run"}, [bytes(16 << 20)])
        os.kill(pids[0], signal.SIGKILL)
        assert wait_gone(pids[0])
        time.sleep(0.2)  # for the thread that sends to find that nobody is there any more
        assert driver.next(Exited).signal == signal.SIGKILL
        driver.start(2)
        assert driver.run(1, lambda channel, facts: "alive") == "alive"

    def test_kill_right_after_start(self, driver: Driver) -> None:
        """Workers that are killed before they exist yield their Exited all the same."""
        driver.begin(2)
        driver.engine.kill()
        assert {driver.next(Exited).rank for _ in (0, 1)} == {0, 1}

    def test_start_again_after_all_have_exited(self, driver: Driver) -> None:
        """A second group gets new processes and a new port; before the first has exited it is refused."""
        first = driver.start(2)
        port = driver.run(0, lambda channel, facts: os.environ["MASTER_PORT"])
        with pytest.raises(HoldfastError, match=r"ranks \[0, 1\]"):
            driver.engine.start(GroupSpec(num_workers=1))
        driver.engine.kill()
        assert len([driver.next(Exited) for _ in (0, 1)]) == 2
        second = driver.start(3)
        assert not set(first.values()) & set(second.values())
        assert driver.run(2, lambda channel, facts: os.environ["MASTER_PORT"]) != port

    def test_messages_to_the_dead_are_dropped(self, driver: Driver) -> None:
        """Sending to a worker that has ended, or to a rank that never was, raises nothing."""
        driver.start(1)
        driver.leave([0])
        driver.engine.send(0, {"do": "leave", "status": 0})
        driver.engine.send(5, {"do": "leave", "status": 0})
        driver.engine.kill([0, 5])
        assert driver.engine.events(0.05) == []

    def test_wake_from_another_thread(self, driver: Driver) -> None:
        """`events` returns soon after a wake, though it waits without a time-out; many wakes may make one event."""
        driver.settle()
        timer = threading.Timer(0.1, lambda: [driver.engine.wake() for _ in range(1000)])
        timer.start()
        assert (events := driver.engine.events(None)) == [Woken()], events
        timer.join()
        driver.engine.wake()
        while driver.engine.events(0):
            pass

    def test_wake_after_close(self) -> None:
        """Futures that end late may still call it."""
        engine = self.make_engine()
        engine.close()
        engine.close()
        engine.wake()

    def test_time_out(self, driver: Driver) -> None:
        """`events` gives an empty list after its time-out, not before."""
        driver.settle()
        begun = time.monotonic()
        assert (events := driver.engine.events(0.2)) == [], events
        assert time.monotonic() - begun >= 0.2
        assert driver.engine.events(0) == []

    def test_output_is_shown_with_the_rank_and_kept(
        self, driver: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Lines of stdout and stderr come out whole with the rank in front, and unchanged in the rank's file."""

        def talk(channel: Any, facts: Any) -> None:
            import sys

            print("hello,", end=" ")
            print("world")
            print("trouble\nmore", file=sys.stderr)
            os.system("echo from a subprocess")
            print("10%\r20%\r30%")
            print("äöü", end="")

        folder = tmp_path / "logs" / "attempt-00001"
        driver.start(2, log_directory=folder)
        driver.run(1, talk)
        driver.leave([0, 1])
        shown = capfd.readouterr()
        for line in ("hello, world", "from a subprocess", "30%", "äöü"):
            assert re.search(rf"^{self.prefix}{line}$", shown.out, re.MULTILINE)
        assert re.search(rf"^{self.prefix}trouble\n{self.prefix}more$", shown.err, re.MULTILINE)
        assert b"hello, world\n" in (folder / "rank-1.log").read_bytes()
        assert b"10%\r20%\r30%\n" in (folder / "rank-1.log").read_bytes()
        assert (folder / "rank-0.log").read_bytes() == b""

    def test_much_output_does_not_hold_a_worker_for_ever(
        self, driver: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """8 MB of output come through completely."""
        driver.start(1, log_directory=tmp_path)
        driver.run(0, lambda channel, facts: any(print("y" * 79) for _ in range(100_000)))
        driver.leave([0])
        capfd.readouterr()
        assert (tmp_path / "rank-0.log").stat().st_size == 100_000 * 80

    def test_close_ends_everything(self) -> None:
        """No worker survives `close`, whatever it does."""
        engine = self.make_engine()
        driver = Driver(engine)
        pids = driver.start(2)
        helpers = driver.run(0, start_stubborn_children)
        driver.ask(1, lambda channel, facts: signal.signal(signal.SIGTERM, signal.SIG_IGN) and time.sleep(600))
        engine.close()
        assert all(wait_gone(pid) for pid in [*pids.values(), *helpers])
