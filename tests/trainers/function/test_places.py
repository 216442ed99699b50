"""Where ranks go, how many there are, and what is done when there is no room: decisions without processes."""

from __future__ import annotations

import random

import pytest
from scripted import Play, kept

from holdfast.errors import ConfigError, TrainingError
from holdfast.trainers.function.control.actions import Begin, End, NextAttempt, RunState, Say, StartGroup
from holdfast.trainers.function.control.plan import FailurePolicy, ScalingPolicy, WaitLimits
from holdfast.trainers.function.engine import Capacity, Exited, GroupSpec, Placed, Started, Unable
from holdfast.trainers.function.engines.agents import NodePlace
from holdfast.trainers.function.engines.process_engine import arrange, rank_environment

ROOM = WaitLimits(place_s=60, settle_capacity_s=3)


def places(**nodes: int) -> list[NodePlace]:
    return [NodePlace(node=node, number=number) for node, size in nodes.items() for number in range(size)]


def test_ranks_of_a_node_are_neighbours() -> None:
    """Ranks follow node ids and then accelerators, in whatever order places are told."""
    given = [NodePlace(node=node, gpus=(gpu,), number=n) for n, (node, gpu) in enumerate([("b", "10"), ("a", "1")])]
    given += [NodePlace(node="b", gpus=("9",), number=7), NodePlace(node="a", gpus=("0",), number=8)]
    for seed in range(5):
        found = arrange(random.Random(seed).sample(given, 4), 4)
        assert found is not None
        assert [(place.node, place.gpus[0]) for place, _ in found] == [("a", "0"), ("a", "1"), ("b", "9"), ("b", "10")]
        assert [(p.rank, p.local_rank, p.local_size, p.node_rank) for _, p in found] == [
            (0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 2, 1), (3, 1, 2, 1)
        ]  # fmt: skip


def test_too_few_and_too_many_places() -> None:
    """With places to spare the fuller nodes are taken; with too few there is no arrangement."""
    assert arrange(places(a=1, b=1), 3) is None
    found = arrange(places(a=1, b=3), 3)
    assert found is not None
    assert {place.node for place, _ in found} == {"b"}
    extra = [NodePlace(node="a", number=9, extra=True), NodePlace(node="a", number=8, extra=True), *places(b=1, c=1)]
    for count, nodes in ((1, {"b"}), (2, {"b", "c"}), (4, {"a", "b", "c"})):
        found = arrange(extra, count)
        assert found is not None
        assert {place.node for place, _ in found} == nodes


def test_variables_of_a_rank() -> None:
    """What torchrun would set; the group's own variables for the rank come on top, devices only if they are wanted."""
    (_, one), (_, two) = arrange(places(a=1, b=1), 2) or []
    spec = GroupSpec(num_workers=2, environment={1: {"X": "1"}}, use_gpu=True)
    told = rank_environment(spec, two, master=("10.0.0.1", 29), gpus=["3"])
    assert told == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29", "CUDA_VISIBLE_DEVICES": "3", "X": "1",
    }  # fmt: skip
    told = rank_environment(GroupSpec(num_workers=2), one, master=("127.0.0.1", 29), gpus=["3"])
    assert (told["CUDA_VISIBLE_DEVICES"], told["GLOO_SOCKET_IFNAME"]) == ("", "lo")


@pytest.mark.parametrize(
    ("room", "unchanged_s", "size"), [(0, 9, None), (1, 9, None), (2, 0, None), (2, 3, 2), (4, 0, 4), (9, 0, 4)]
)
def test_size_of_a_group(room: int, unchanged_s: float, size: int | None) -> None:
    """All that fit, up to the most; fewer only when that has settled."""
    assert ScalingPolicy(least=2, most=4, settle_s=3).size(room, unchanged_s) == size


def test_nothing_starts_before_there_is_room() -> None:
    """It says what it waits for, once, and again when that changes."""
    play = Play(finds_places=True, limits=ROOM).open().found()
    assert play.all(StartGroup) == []
    play.feed(Capacity(num_workers=1, detail="there is room for 1"))
    assert play.out == []
    play.tick(after=2)
    assert play.only(Say).line == "waiting for room for 2 workers, for 58 s at most: there is room for 1"
    assert play.tick(after=1) == []
    assert play.controller.deadline() == play.now + 57
    play.feed(Capacity(num_workers=0, detail="there is room for 0"))
    assert "room for 0" in play.only(Say).line
    play.feed(Capacity(num_workers=2))
    assert play.only(StartGroup) == StartGroup(attempt=1, num_workers=2)


def test_the_wait_for_room_is_bounded() -> None:
    """The error names need and capacity."""
    play = Play(finds_places=True, limits=ROOM).open().found()
    play.feed(Capacity(num_workers=1, detail="each needs GPU 1; the cluster has GPU 1"))
    play.tick(after=60)
    end = play.only(End)
    assert end.state is RunState.ERRORED
    assert isinstance(end.error, TrainingError)
    assert "no room for 2 workers within 60 s" in str(end.error)
    assert "the cluster has GPU 1" in str(end.error)


def test_a_lost_node_counts_once_and_the_group_waits_for_another() -> None:
    """Ranks learn their places; all ranks of a node are lost with it, in one failure; the next start needs room."""
    policy = FailurePolicy(max_failures=1)
    play = Play(finds_places=True, limits=ROOM, num_workers=3, policy=policy).open().found()
    play.feed(Capacity(num_workers=3))
    for rank, (node, local) in enumerate([("a", 0), ("b", 0), ("b", 1)]):
        place = {"node": node, "local_rank": local, "local_size": 1 + (node == "b"), "node_rank": int(node == "b")}
        play.feed(Placed(rank=rank, **place))
        play.feed(Started(rank=rank, pid=rank))
        header = play.only(Begin).header
        assert [header[name] for name in ("local_rank", "local_world_size", "node_rank", "apart")] == [
            local, 1 + (node == "b"), int(node == "b"), True
        ]  # fmt: skip
        play.say(rank, on="running")
    play.feed(Capacity(num_workers=1, detail="there is room for 1; node b is lost"))
    for rank in (1, 2):
        play.feed(Exited(rank=rank, exit_code=None, signal=None, detail="gone", node="node b", reason="node"))
    play.exit(0, signal=9)
    assert "rank 1: TrainingError: the worker on node b is lost: gone" in play.only(NextAttempt).reason
    play.next_attempt().found(kept("checkpoint_000001", 2))
    assert play.all(StartGroup) == []
    play.feed(Capacity(num_workers=3))
    assert play.only(StartGroup).num_workers == 3


def test_elastic_goes_on_smaller() -> None:
    """What is left is taken once it has settled; ranks and checkpoints know the new size."""
    play = Play(finds_places=True, limits=ROOM, num_workers=3, min_workers=1, policy=FailurePolicy(max_failures=1))
    play.open().found().feed(Capacity(num_workers=3))
    play.go()
    play.feed(Capacity(num_workers=2))
    play.feed(Exited(rank=2, exit_code=None, signal=None, reason="node"))
    play.exit(0)
    play.exit(1)
    play.next_attempt().found()
    assert play.all(StartGroup) == []
    play.tick(after=3)
    assert play.only(StartGroup).num_workers == 2
    play.feed(Started(rank=0, pid=1))
    assert play.only(Begin).header["world_size"] == 2


def test_places_that_went_away_are_no_failure() -> None:
    """A group whose places were lost before it was started waits for others."""
    play = Play(finds_places=True, limits=ROOM).open().found()
    play.feed(Capacity(num_workers=2))
    play.feed(Capacity(num_workers=1))
    for rank in (0, 1):
        play.feed(Exited(rank=rank, exit_code=None, signal=None, reason="unplaced"))
    play.next_attempt().found()
    play.feed(Capacity(num_workers=2))
    assert play.only(StartGroup).attempt == 2


@pytest.mark.parametrize("running", [False, True])
def test_an_engine_that_cannot_run_this_ends_the_run(running: bool) -> None:
    """What no other start would change is raised as it is."""
    play = Play(finds_places=True, limits=ROOM, policy=FailurePolicy(max_failures=-1)).open().found()
    if running:
        play.feed(Capacity(num_workers=2))
        play.go()
    error = ConfigError("storage_path: private")
    play.feed(Unable(error=error))
    if running:
        play.exit_all()
    assert play.only(End).error is error
