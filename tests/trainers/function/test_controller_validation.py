"""The controller and validations: one at a time, beside the training, never in its way."""

from __future__ import annotations

from scripted import Play, kept

from holdfast.errors import ConfigError, HoldfastError
from holdfast.trainers.function.control.actions import (
    Answer,
    Commit,
    End,
    LateMetrics,
    Protect,
    Say,
    StopValidation,
    Validate,
)
from holdfast.trainers.function.control.plan import FailurePolicy, WaitLimits


def commit(play: Play, index: int, **header: object) -> list[object]:
    """Report and commit one checkpoint that is to be validated; everything that comes out."""
    out: list[object] = []
    play.report(0, index, **{"call": None, "validation": True, **header})
    out += play.out
    commits = play.all(Commit)
    play.out = list(commits)
    out += play.committed()
    return out


def test_a_validation_follows_the_commit() -> None:
    """The checkpoint is protected from before its commit until its metrics have ranked it."""
    play = Play(num_workers=1, validates=True).run()
    play.report(0, 1, validation=True)
    assert play.kinds() == ["StoreRows", "Details", "Protect", "Commit"]
    assert play.only(Protect).names == ("checkpoint_000000",)
    assert play.only(Commit).manifest["extra"] == {"validation": "wanted"}
    play.committed()
    validate = play.only(Validate)
    assert validate.name == "checkpoint_000000"
    play.outcome(validate, {"val": 0.5})
    assert play.out == [
        Protect(names=()),
        LateMetrics(name="checkpoint_000000", metrics={"val": 0.5, "_validated": True}),
    ]
    play.outcome(play.only(LateMetrics), ["checkpoint_000000"])
    assert play.controller.reports.known.kept == {}


def test_one_at_a_time() -> None:
    """The second waits for the first, and its arguments travel with it."""
    play = Play(num_workers=1, validates=True).run()
    first = [action for action in commit(play, 1) if isinstance(action, Validate)]
    wanted = {"fn_kwargs": {"n": 3}, "timeout_s": 5.0}
    assert [action for action in commit(play, 2, validation=wanted) if isinstance(action, Validate)] == []
    play.outcome(first[0], {})
    assert play.only(Validate).arguments == {"n": 3}
    assert play.controller.deadline() == play.now + 5.0


def test_failures_and_timeouts_are_noted_and_said() -> None:
    """They do not touch the training."""
    play = Play(num_workers=1, validates=True, limits=WaitLimits(validation_s=60)).run()
    first = [action for action in commit(play, 1) if isinstance(action, Validate)]
    play.outcome(first[0], error=ValueError("boom\nmore"))
    assert play.only(LateMetrics).metrics == {"_validated": "failed"}
    assert play.only(Say).line == "the validation of checkpoint_000000 failed: ValueError: boom"
    second = [action for action in commit(play, 2) if isinstance(action, Validate)]
    play.tick(after=60)
    assert play.only(StopValidation).name == "checkpoint_000001"
    assert play.tick(after=1) == []
    play.outcome(second[0], error=HoldfastError("killed"))
    assert play.only(LateMetrics).metrics == {"_validated": "timeout"}


def test_the_end_waits_for_validations() -> None:
    """They are part of the run."""
    play = Play(num_workers=1, validates=True).run()
    validate = [action for action in commit(play, 1) if isinstance(action, Validate)]
    play.finish()
    assert play.all(End) == []
    play.outcome(validate[0], {"val": 1.0})
    assert play.only(End)


def test_validations_go_on_while_workers_restart() -> None:
    """A validation has nothing to do with the workers."""
    play = Play(num_workers=1, validates=True, policy=FailurePolicy(max_failures=1)).run()
    validate = [action for action in commit(play, 1) if isinstance(action, Validate)]
    play.exit(0, signal=9)
    play.outcome(validate[0], {"val": 1.0})
    assert play.only(LateMetrics)


def test_an_end_stops_what_runs() -> None:
    """Whoever presses Ctrl-C does not wait for it; the next driver takes it up."""
    play = Play(num_workers=1, validates=True).run()
    commit(play, 1)
    play.stop()
    out = play.exit_all()
    assert StopValidation(name="checkpoint_000000") in out


def test_wanted_ones_are_taken_up_again() -> None:
    """Those that an earlier driver did not come to, after the training was started."""
    play = Play(validates=True).open()
    play.found(kept("a", 1), unvalidated={"a": "wanted", "gone": "wanted"})
    assert play.kinds()[:2] == ["Protect", "Resumed"]
    assert play.only(Protect).names == ("a",)
    assert play.kinds()[-2:] == ["StartGroup", "Validate"]
    assert play.only(Validate).name == "a"


def test_wanted_without_a_function() -> None:
    """The report is refused; a run that was validated before goes on without."""
    play = Play(num_workers=1).open().found(kept("a", 1), unvalidated={"a": "wanted"}).go()
    assert play.all(Validate) == []
    play.report(0, 2, validation=True)
    assert isinstance(play.only(Answer).error, ConfigError)


def test_what_a_validation_costs_others_is_known_before_anybody_is_told() -> None:
    """`get_all_reported_checkpoints` lists none that the new ranking is about to delete."""
    play = Play(num_workers=1, validates=True).run()
    out = commit(play, 1)
    play.ask(0, upto=1, what="all", mode="validated")
    assert play.all(Answer) == []
    play.outcome(next(action for action in out if isinstance(action, Validate)), {"val": 0.5})
    assert play.all(Answer) == []
    play.outcome(play.only(LateMetrics), ["checkpoint_000000"])
    assert play.only(Answer).value == {"checkpoints": []}
