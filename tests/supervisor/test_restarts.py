"""When a script is started again, as a pure function of how its lives have ended."""

from __future__ import annotations

from typing import Any

from holdfast.supervisor.supervisor import Again, Death, End, after


def deaths(*rows: dict[str, Any]) -> list[Death]:
    return [
        Death(number=number, seconds=9.0, **{"cause": "killed by SIGKILL", **row}) for number, row in enumerate(rows)
    ]


def at(step: int, durable: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "durable": {"run": durable}, "trained": True, **more}


def test_there_is_no_limit_while_the_newest_durable_step_advances() -> None:
    """A thousand lives that each get one step further are a thousand restarts, each at once."""
    lives = deaths(*(at(step + 1, step) for step in range(1, 1001)))
    assert {after(lives[: number + 1]) for number in range(1000)} == {Again(0.0)}


def test_three_lives_that_die_at_one_step_end_it() -> None:
    """The third death at the same step ends it, and the step is named; the pauses before were 0 and 1 s."""
    lives = deaths(*[at(23, 20)] * 3)
    assert [after(lives[:1]), after(lives[:2])] == [Again(0.0), Again(1.0)]
    end = after(lives)
    assert isinstance(end, End)
    assert "at step 23" in end.why


def test_a_new_run_at_each_start_is_no_progress() -> None:
    """A script that names its run by the time of day dies at step 5 of each: no fourth life. Getting further counts."""
    lives = deaths(*({"step": 5, "durable": {f"run-{number}": 4}, "trained": True} for number in range(3)))
    assert [after(lives[:1]), after(lives[:2])] == [Again(0.0), Again(1.0)]
    assert isinstance(after(lives), End)
    further = deaths(*({"step": 5 + n, "durable": {f"run-{n}": 4 + n}, "trained": True} for n in range(5)))
    assert after(further) == Again(0.0)


def test_lives_that_die_at_different_steps_go_on_with_longer_pauses_for_ten_lives() -> None:
    """Without progress the pauses grow to 30 s, and the tenth death says that saves are too far apart."""
    lives = deaths(*(at(20 + number % 4, 20) for number in range(10)))
    found = [after(lives[: number + 1]) for number in range(10)]
    assert found[:5] == [Again(0.0), Again(1.0), Again(5.0), Again(30.0), Again(30.0)]
    assert isinstance(found[-1], End)
    assert "rescue=" in found[-1].why


def test_one_error_before_the_first_step_three_times_ends_it() -> None:
    """Numbers in the message (a time, an address) do not make it another error."""
    rows = [{"cause": "exit status 1", "error": f"OSError: no data at {number} 0x{number}f"} for number in range(3)]
    end = after(deaths(*rows))
    assert isinstance(end, End)
    assert "OSError: no data" in end.why
    assert "is not known" in end.why
    rows[1]["error"] = "ValueError: another one"
    assert after(deaths(*rows)) == Again(5.0)


def test_progress_begins_the_count_anew() -> None:
    """Two deaths at a step, one new durable step, two more deaths there: no end, and a short pause again."""
    lives = deaths(at(23, 20), at(23, 20), at(23, 21), at(23, 21))
    assert after(lives[:3]) == Again(0.0)
    assert after(lives) == Again(1.0)


def test_a_long_life_of_a_script_without_a_run_counts_as_progress() -> None:
    """Nothing is known of its steps: a life of ten minutes is no crash at the start."""
    lives = [Death(number=number, seconds=700.0, cause="killed by SIGKILL") for number in range(5)]
    assert after(lives) == Again(0.0)


def test_a_life_that_its_guard_took_back_is_no_death() -> None:
    """Any number of them at the same step go on at once; deaths before and after are not counted together."""
    taken_back = at(57, 50, rolled_back=True, cause="rolled back by its guard (exit status 86)")
    killed = at(57, 50)
    assert after(deaths(*[taken_back] * 20)) == Again(0.0)
    assert after(deaths(killed, killed, taken_back, killed)) == Again(0.0)
    assert isinstance(after(deaths(taken_back, killed, killed, killed)), End)


def test_a_life_that_its_guard_gave_up_is_the_last_one() -> None:
    """The reason stands above, in its error."""
    assert isinstance(after(deaths(at(57, 50, given_up=True))), End)
