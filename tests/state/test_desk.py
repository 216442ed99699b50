"""What a rank shows to the others of its machine: readable after its death, and never mistaken for another's."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.state.load.shared_read_buffer import PeerReadBuffer, SharedReadBuffer


def test_a_rank_that_dies_is_noticed(tmp_path):
    """The desk of a process that was killed says so, and what it has published stays readable."""
    script = (
        "import sys, time; from holdfast.state.load.shared_read_buffer import SharedReadBuffer as Desk; import json;"
        "desk = Desk(memoryview(bytearray(b'\\1' * 8)), 1 << 16); desk.slots[:3] = b'abc'; desk.publish(1);"
        "print(json.dumps(desk.told()), flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ})
    try:
        peer = PeerReadBuffer(json.loads(child.stdout.readline()))
        assert (bytes(peer.wanted), peer.published, peer.gone, peer.has_opened) == (b"\1" * 8, 1, False, False)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert peer.gone
    assert bytes(peer.slots[:3]) == b"abc"
    with pytest.raises(TypeError):
        peer.slots[0] = 1  # for reading only
    peer.close()


def test_two_threads_ask_for_the_same_rank():
    """A rank reads with two threads, and both look whether a neighbour still lives."""
    desk = SharedReadBuffer(memoryview(bytearray(8)), 4096)
    peer = PeerReadBuffer(desk.told())
    begin = threading.Barrier(4)

    def ask() -> bool:
        begin.wait(60)
        return any(peer.gone for _ in range(20_000))

    with ThreadPoolExecutor(4) as threads:
        assert not any(one.result(60) for one in [threads.submit(ask) for _ in range(4)])
    peer.close()
    assert peer.gone
    desk.close()


def test_another_process_in_the_place_of_a_rank_is_refused():
    """A descriptor that is another one by now is not taken for the desk of a rank."""
    one, other = (SharedReadBuffer(memoryview(bytearray(8)), 4096) for _ in range(2))
    with pytest.raises(ValueError, match="not the desk"):
        PeerReadBuffer({**one.told(), "fd": other.told()["fd"]})
    told = other.told()
    other.close()
    with pytest.raises((OSError, ValueError)):
        PeerReadBuffer(told)
    one.close()
