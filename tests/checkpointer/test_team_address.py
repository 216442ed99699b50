"""Where rank 0 listens for the writers of the other ranks: where they can reach it, and nowhere else."""

from __future__ import annotations

import resource
import socket

import pytest

from holdfast.checkpointer import rank_group
from holdfast.errors import ConfigError


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing; an address for documentation
        except OSError:
            pytest.skip("this machine has no network but loopback")
        return str(probe.getsockname()[0])


def test_on_one_machine_only_that_machine_can_connect() -> None:
    """All ranks here: loopback, whatever else there is."""
    listener, addresses = rank_group._listen([], alone=True, backlog=1)
    with listener:
        assert addresses == [("127.0.0.1", listener.getsockname()[1])]


def test_on_several_machines_it_is_the_address_the_others_have_just_used() -> None:
    """One socket on the address by which the other machines know the master; not on all interfaces."""
    own = _own_address()
    listener, addresses = rank_group._listen([["203.0.113.7", own], [own]], alone=False, backlog=2)
    with listener:
        assert listener.getsockname() == addresses[0] == (own, addresses[0][1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", addresses[0][1]), timeout=5)
        socket.create_connection(addresses[0], timeout=5).close()


@pytest.mark.parametrize("elsewhere", [[], [[]], [["203.0.113.7"]], [["127.0.0.1"]]])
def test_if_nobody_knows_it_is_all_interfaces(elsewhere: list[list[str]]) -> None:
    """The others gave no address of ours (another master, a name that means loopback here): still reachable."""
    listener, addresses = rank_group._listen(elsewhere, alone=False, backlog=2)
    with listener:
        assert addresses
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5).close()


def test_more_ranks_than_files_may_be_open_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides for all; the message has both numbers. The soft limit is nobody's concern."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    facts = [{"machine": "a", "holdfast": "1", "world_size": 4033, "master": []}]
    ours = rank_group.RankGroup.__new__(rank_group.RankGroup)
    ours.world_size = 4033
    with pytest.raises(ConfigError, match=r"4033 ranks need 4097 open files .* may have 4096 \(hard limit\)"):
        ours._open(facts)
    ours.world_size = 4032
    ours._open(facts)
    assert ours._listener is not None
    ours._listener.close()
