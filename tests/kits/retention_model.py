"""Real lives of a run against a model of what retention keeps, in thirty lines."""

from __future__ import annotations

import math
import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import holdfast as hf

next_name = iter(range(1 << 30)).__next__


class Model:
    """What has to be on the storage: one dict for each checkpoint."""

    def __init__(self, last, best, every):
        self.last, self.best, self.every = last, best, every
        self.there, self.attempt, self.source = [], 0, None

    def start(self):
        self.attempt += 1
        self.source = max(self.there, key=self.order, default=None)
        return self.source["step"] if self.source else 0

    @staticmethod
    def order(one):
        return one["attempt"], one["step"]

    def save(self, step, score):
        self.there.append({"attempt": self.attempt, "step": step, "score": score, "pin": False})
        newest_first = sorted(self.there, key=self.order, reverse=True)
        keep = [newest_first[0], *(one for one in self.there if one["pin"] or one is self.source)]
        if self.last:
            keep += newest_first[: self.last]
        if self.best:
            known = [one for one in newest_first if one["score"] is not None and not math.isnan(one["score"])]
            ranked = sorted(known, key=lambda one: one["score"]) + [one for one in newest_first if one not in known]
            keep += ranked[: self.best]
        if self.every:
            held = {}
            for one in reversed(newest_first):
                multiple, before = one["step"] // self.every, held.get(one["step"] // self.every)
                if multiple and (
                    before is None or (before["attempt"] < one["attempt"] and before["step"] >= one["step"])
                ):
                    keep.append(one)
                    held[multiple] = one
        self.there = [one for one in self.there if any(one is other for other in keep)]

    def expected(self):
        return sorted((one["attempt"], one["step"]) for one in self.there)


class Lives:
    """One run driven through real Checkpointers, and its model."""

    def __init__(self, root, last, best, every):
        keep = hf.Keep(last=last, best=best, metric="score" if best else None, every=every)
        self.root, self.keep, self.model = root, keep, Model(last, best, every)
        self.ck = None

    def start(self):
        self.ck = hf.Checkpointer(self.root, {"x": 1}, every=None, keep=self.keep)
        self.ck.__enter__()
        assert self.ck.global_step == self.model.start()

    def step(self, save, score):
        self.ck.step()
        if save:
            self.ck.save(**({} if score is None else {"score": score}))
            self.model.save(self.ck.global_step, score)

    def pin(self, number):
        if self.model.there:
            one = sorted(self.model.there, key=Model.order)[number % len(self.model.there)]
            self.ck.wait()
            at = next(c for c in self.ck.checkpoints() if self.key(c) == (one["attempt"], one["step"]))
            at.pin()
            one["pin"] = True

    def kill(self):
        """Leave as a killed trainer would: nothing more is saved, the writer finishes and lets go."""
        self.ck.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        self.ck = None

    @staticmethod
    def key(checkpoint):
        return checkpoint.manifest.attempt, checkpoint.manifest.step

    def check(self):
        if self.ck is None:
            return
        self.ck.wait()
        found = sorted(self.key(one) for one in self.ck.checkpoints())
        assert found == self.model.expected()
        if self.model.there:
            assert self.key(self.ck.latest()) == max(self.model.expected()), "the newest is never deleted"


SCORES = [None, math.nan, 0.5, 0.5, 1.0, -2.0, math.inf]


def play(seed, steps=40, home=None):
    """One random history of two runs in one root."""
    chance = random.Random(seed)
    home = home or f"memory://oracle-{next_name()}"
    rules = [(2, None, None), (1, 2, None), (None, 2, 5), (3, 1, 4), (None, None, 3), (1, None, None)]
    runs = [Lives(f"{home}/{name}", *chance.choice(rules)) for name in ("a", "b")]
    for run in runs:
        run.start()
    for _ in range(steps):
        run = chance.choice(runs)
        action = chance.random()
        if action < 0.85:
            run.step(chance.random() < 0.6, chance.choice(SCORES))
        elif action < 0.92:
            run.pin(chance.randrange(100))
        else:
            run.kill()
            run.start()
        run.check()
    for run in runs:
        run.kill()


class Machine(RuleBasedStateMachine):
    """Hypothesis looks for a short history that breaks it."""

    home = "memory://machine"

    @initialize(
        last=st.sampled_from([None, 1, 2]), best=st.sampled_from([None, 1, 2]), every=st.sampled_from([None, 3])
    )
    def begin(self, last, best, every):
        self.lives = Lives(f"{self.home}-{next_name()}", last, best, every)
        self.lives.start()

    @rule(save=st.booleans(), score=st.sampled_from(SCORES))
    def step(self, save, score):
        self.lives.step(save, score)

    @rule(number=st.integers(0, 9))
    def pin(self, number):
        self.lives.pin(number)

    @rule()
    def kill(self):
        self.lives.kill()
        self.lives.start()

    @invariant()
    def as_modelled(self):
        if hasattr(self, "lives"):
            self.lives.check()

    def teardown(self):
        if hasattr(self, "lives") and self.lives.ck is not None:
            self.lives.kill()
