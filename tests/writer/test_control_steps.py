"""The agreement on a step, as a pure object: any order of events leads all ranks to act at the same steps."""

from __future__ import annotations

import random

import pytest

from holdfast.writer.arena import MAILBOX_BYTES, StepMailbox
from holdfast.writer.ranks.agreement import RankStanding, StepAgreement


class Rank:
    """A trainer with its mailbox and the writer's answers to messages, as `ControlMember` gives them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.mailbox = StepMailbox(memoryview(bytearray(MAILBOX_BYTES)))
        self.mailbox.clear(step=0)
        self.step = 0
        self.acted: list[tuple[int, str]] = []
        self.waits = False

    def train(self) -> dict | None:
        """Do one step, unless it waits for a word; what the trainer tells its writer."""
        if not self.waits:
            self.step += 1
        self.waits = False
        if self.mailbox.calls(self.step):
            if not self.mailbox.armed:
                self.waits = True
                return None
            self.mailbox.act(self.step)
            self.acted.append((self.step, self.mailbox.kind))
            return {"do": "acted", "step": self.step}
        return None

    def hear(self, message: dict) -> dict | None:
        mailbox = self.mailbox
        if message["do"] == "propose":
            mailbox.propose(message["step"], message["kind"])
            if mailbox.done >= message["step"]:
                mailbox.withdraw()
                return {"do": "nack", "step": message["step"], "at": mailbox.done}
            return {"do": "ack", "step": message["step"]}
        if message["do"] == "arm":
            mailbox.arm(message["step"])
        elif message["do"] == "withdraw":
            mailbox.withdraw()
        elif message["do"] == "broken":
            mailbox.break_up()
        return None

    def standing(self) -> RankStanding:
        mailbox = self.mailbox
        target = None if mailbox.target > 1 << 61 else mailbox.target
        return RankStanding(
            done=mailbox.done, acted=mailbox.acted, armed=mailbox.armed, kind=mailbox.kind, target=target
        )


class World:
    """Ranks, a server that may be replaced, and messages that travel in any interleaving (in order on each way)."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = [Rank(number) for number in range(size)]
        self.down: list[list[dict]] = [[] for _ in self.ranks]
        self.up: list[list[dict]] = [[] for _ in self.ranks]
        self.start_server()

    def start_server(self) -> None:
        """A new writer of rank 0: what was on its way is lost; each rank joins again, at some time."""
        self.server = StepAgreement(len(self.ranks))
        self.joined: set[int] = set()
        self.down = [[] for _ in self.ranks]
        self.up = [[{"do": "hello"}] for _ in self.ranks]

    def post(self, messages: list) -> None:
        for rank, message in messages:
            for one in self.ranks if rank is None else [self.ranks[rank]]:
                if one.number in self.joined:
                    self.down[one.number].append(message)

    def deliver_up(self, number: int) -> None:
        message, server = self.up[number].pop(0), self.server
        if message["do"] == "hello":
            self.joined.add(number)
            self.post(server.joined(number, self.ranks[number].standing()))
        elif message["do"] == "ack":
            self.post(server.acknowledged(number, message["step"]))
        elif message["do"] == "nack":
            self.post(server.passed(number, message["step"], message["at"]))
        else:
            self.post(server.acted(number, message["step"]))

    def cut(self, number: int) -> None:
        """A connection breaks and is made again: what was on its way is lost."""
        self.down[number] = []
        self.up[number] = [{"do": "hello"}]

    def turn(self, *, faults: bool) -> None:
        one = self.random.choice(self.ranks)
        kind = self.random.random()
        if kind < 0.4:
            # No rank is more than one step ahead of another: they wait for each other's gradients.
            if one.step <= min(other.step for other in self.ranks) and (told := one.train()) is not None:
                self.up[one.number].append(told)
        elif kind < 0.7 and self.up[one.number]:
            self.deliver_up(one.number)
        elif kind < 0.985 and self.down[one.number]:
            answer = one.hear(self.down[one.number].pop(0))
            if answer is not None:
                self.up[one.number].append(answer)
        elif kind > 0.995 and faults:
            self.cut(one.number)
        elif kind > 0.99 and faults and self.random.random() < 0.2:
            self.start_server()


@pytest.mark.parametrize("faults", [False, True], ids=["calm", "broken connections"])
def test_all_ranks_act_at_the_same_steps(faults: bool) -> None:
    """Whatever the interleaving, with wishes at any time, no rank acts at a step that another one does not act at."""
    total = 0
    for seed in range(60):
        world = World(1 + seed % 4, seed)
        for turn in range(1200):
            if turn % 150 == 20:
                world.post(world.server.want(world.random.choice(["save", "settle", "stop", "keep"])))
            world.turn(faults=faults)
        for _ in range(4000):  # calm: everything on its way arrives
            world.turn(faults=False)
        ended = [rank.acted for rank in world.ranks]
        shortest = min(len(acted) for acted in ended)
        assert all(acted[:shortest] == ended[0][:shortest] for acted in ended), (seed, ended)
        assert max(len(acted) for acted in ended) - shortest <= 1
        assert not any(rank.waits for rank in world.ranks) or shortest, (seed, "somebody waits for ever")
        low = min(rank.step for rank in world.ranks)
        assert low > 100, (seed, [rank.step for rank in world.ranks], "training stands still")
        total += shortest
    assert total > 100


def test_a_step_that_was_passed_is_tried_again_further_away() -> None:
    """The answer of a rank that is ahead moves the proposal beyond it, and all see the new one."""
    steps = StepAgreement(2)
    for rank in range(2):
        assert steps.joined(rank, RankStanding(done=10)) == []
    assert steps.want("save") == [(None, {"do": "propose", "step": 12, "kind": "save"})]
    assert steps.acknowledged(0, 12) == []
    assert steps.passed(1, 12, 13) == [(None, {"do": "propose", "step": 17, "kind": "save"})]
    assert steps.acknowledged(1, 12) == [], "an answer to the old proposal"
    steps.acknowledged(0, 17)
    assert steps.acknowledged(1, 17) == [(None, {"do": "arm", "step": 17})]


def test_a_stop_overtakes_a_save_that_is_not_agreed_yet_and_follows_one_that_is() -> None:
    """The most urgent wish decides; a wish that comes too late gets the next step."""
    steps = StepAgreement(1)
    steps.want("save")
    assert steps.step is None, "nobody has joined"
    assert steps.joined(0, RankStanding(done=0)) == [(None, {"do": "propose", "step": 2, "kind": "save"})]
    assert steps.want("stop") == [(None, {"do": "propose", "step": 3, "kind": "stop"})]
    steps.acknowledged(0, 3)
    assert steps.want("save", 0) == []
    assert steps.acted(0, 3) == [], "a stop saves already"
    steps.want("save")
    steps.acknowledged(0, 5)
    assert steps.want("stop") == []
    assert steps.acted(0, 5) == [(None, {"do": "propose", "step": 7, "kind": "stop"})]


def test_a_snapshot_gives_way_to_everything() -> None:
    """It does what no other wish does, and whoever wants it asks again after the step that came instead."""
    steps = StepAgreement(1)
    steps.joined(0, RankStanding(done=0))
    assert steps.want("keep", 0) == [(None, {"do": "propose", "step": 2, "kind": "keep"})]
    assert steps.want("settle", 0) == [(None, {"do": "propose", "step": 3, "kind": "settle"})]
    assert steps.want("keep", 0) == []
    steps.acknowledged(0, 3)
    assert steps.acted(0, 3) == []
    assert steps.want("keep", 0) == [(None, {"do": "propose", "step": 5, "kind": "keep"})]


def test_a_rank_that_has_acted_wants_the_next_step() -> None:
    """Its word that it has acted overtakes that of a slower rank: the wish must not count as the one being done.

    Lost, it is never said again: training by the clock then neither saves nor ends.
    """
    steps = StepAgreement(2)
    for rank in range(2):
        steps.joined(rank, RankStanding(done=0))
    steps.want("settle", 0)
    for rank in range(2):
        steps.acknowledged(rank, 2)
    assert steps.acted(0, 2) == []
    assert steps.want("settle", 1) == [], "rank 1 comes to it still"
    assert steps._next is None
    assert steps.want("settle", 0) == []
    assert steps.acted(1, 2) == [(None, {"do": "propose", "step": 4, "kind": "settle"})]
    assert steps.want("settle") == [], "not armed: it is news for nobody"
    for rank in range(2):
        steps.acknowledged(rank, 4)
    steps.want("settle")
    steps.acted(0, 4)
    assert steps.acted(1, 4) == [(None, {"do": "propose", "step": 6, "kind": "settle"})]


def test_a_new_server_arms_what_the_old_one_had_armed() -> None:
    """One rank has the word and may have acted on it: the others get it, however late they join."""
    steps = StepAgreement(3)
    assert steps.joined(1, RankStanding(done=4, target=6)) == []
    assert steps.joined(0, RankStanding(done=6, acted=6, target=6, armed=True)) == []
    told = steps.joined(2, RankStanding(done=5, target=6))
    assert told == [(1, {"do": "arm", "step": 6}), (2, {"do": "arm", "step": 6})]
    other = StepAgreement(2)
    other.joined(0, RankStanding(done=4, target=6))
    assert other.joined(1, RankStanding(done=5)) == [(0, {"do": "withdraw"})], "nobody had the word: it is taken back"


def test_an_armed_step_stands() -> None:
    """A late answer to the proposal moves it no more; who joins again after it has acted there has acted."""
    steps = StepAgreement(2)
    for rank in range(2):
        steps.joined(rank, RankStanding(done=0))
    steps.want("save")
    for rank in range(2):
        steps.acknowledged(rank, 2)
    assert steps.passed(0, 2, 3) == []
    assert steps.step == 2
    assert steps.joined(0, RankStanding(done=2, acted=2, target=2, armed=True)) == []
    assert steps.joined(1, RankStanding(done=2, acted=2, target=2, armed=True)) == []
    assert steps.step is None, "all have acted"


def test_after_a_loss_nothing_is_proposed() -> None:
    """An open proposal is taken back, an armed one stands."""
    steps = StepAgreement(1)
    steps.joined(0, RankStanding(done=0))
    steps.want("save")
    assert steps.broken() == [(None, {"do": "withdraw"}), (None, {"do": "broken"})]
    assert steps.want("stop") == []
    assert steps.broken() == []
