"""Times, timestamps and what they decide: pure values."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_kit import run

import holdfast as hf
from holdfast._ranks import RankInfo
from holdfast.trainers.loop.saving.finder import NameTemplate, is_later, run_variables
from holdfast.trainers.loop.time import Time, Timestamp, TimeUnit, parse_every


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, "ep"),
        ("1iter", 1, "iter"),
        ("500ba", 500, "ba"),
        ("1000sp", 1000, "sp"),
        ("1e6tok", 10**6, "tok"),
        ("0.1dur", 0.1, "dur"),
        ("90sec", 90, "sec"),
        ("4_000ba", 4000, "ba"),
        ("3e4BA", 30000, "ba"),
        (" 2 EP ", 2, "ep"),
        ("1.0ep", 1, "ep"),
        ("-3ba", -3, "ba"),
        ("1h20m40s", 4840, "sec"),
        ("36h", 129600, "sec"),
        ("90m", 5400, "sec"),
        ("90s", 90, "sec"),
        ("15min", 900, "sec"),
        ("2H", 7200, "sec"),
        ("1m30s", 90, "sec"),
        ("0.5sec", 0.5, "sec"),
    ],
)
def test_time_strings(text: str, value: float, unit: str) -> None:
    """Every form of the grammar gives its value and unit, in any case, and reads back what it prints."""
    time = Time(text)
    assert (time.value, time.unit) == (value, TimeUnit(unit))
    assert time == Time(value, unit) == Time.from_timestring(text) == Time(time.to_timestring())


@pytest.mark.parametrize(
    "text", ["", "ep", "10", "10 apples", "1.5ep", "ten ep", "1h20", "10ep5ba", "nanep", "0x3ba", "inf sec"]
)
def test_bad_time_strings(text: str) -> None:
    """A string that is no time is refused with the text itself, and the grammar unless only the value is wrong."""
    with pytest.raises(hf.ConfigError) as caught:
        Time(text)
    message = str(caught.value)
    assert "1h20m40s" in message or "fractions" in message


def test_arithmetic() -> None:
    """Operations stay within the unit; numbers take it over; shares scale; other units are refused."""
    assert Time("10ep") + 2 == "12ep"
    assert 2 + Time("10ep") == Time("12ep")
    assert Time("10ep") - "4ep" == 6
    assert 12 - Time("10ep") == Time("2ep")
    assert Time("10ba") * 0.25 == Time("2ba")
    assert Time("0.5dur") * Time("10ep") == Time("5ep") == Time("10ep") * Time("0.5dur")
    assert Time("10ep") / 2 == Time("5ep")
    assert Time("1ep") / Time("4ep") == Time("0.25dur")
    assert Time("7ba") // Time("2ba") == 3
    assert Time("7ba") % 4 == Time("3ba")
    assert (int(Time("7ba")), float(Time("7ba")), bool(Time("0ba")), range(9)[Time("7ba")]) == (7, 7.0, False, 7)
    assert f"{Time('7ba'):03d}" == "007"
    with pytest.raises(hf.ConfigError, match="different units"):
        Time("1ep") + Time("1ba")
    with pytest.raises(hf.ConfigError, match="different units"):
        _ = Time("1ep") < "3ba"


def test_comparison() -> None:
    """Times compare with numbers, strings and each other; equality across units is just False."""
    assert Time("10ep") > 9
    assert Time("10ep") >= "10ep"
    assert Time("10ep") < Time("11ep")
    assert Time("10ep") == 10
    assert Time("10ep") != Time("10ba")
    assert Time("10ep") != "ten"
    assert Time("90s") == timedelta(seconds=90)
    assert len({Time("10ep"), Time(10, "ep"), Time("10ba")}) == 2
    assert pickle.loads(pickle.dumps(Time("10ep"))) == Time("10ep")
    with pytest.raises(AttributeError):
        Time("10ep").value = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Time(3),
        lambda: Time("3ep", "ep"),
        lambda: Time(3, "apples"),
        lambda: Time(True, "ep"),
        lambda: Time(float("nan"), "sec"),
        lambda: Time.from_input(3),
        lambda: Time.from_input(None),
    ],
)  # type: ignore[arg-type]
def test_bad_construction(make: object) -> None:
    """What is no time is refused."""
    with pytest.raises(hf.ConfigError):
        make()  # type: ignore[operator]


def test_timestamp() -> None:
    """Batches add up, an epoch starts its own counters again, and plain data brings everything back."""
    one = Timestamp().to_next_batch(32, 640, timedelta(seconds=2)).to_next_batch(16, 320, timedelta(seconds=1))
    assert (one.epoch, one.batch, one.batch_in_epoch, one.sample, one.token) == (0, 2, 2, 48, 960)
    assert isinstance(one.batch, Time)
    assert (one.total_wct, one.epoch_wct, one.batch_wct) == (
        timedelta(seconds=3),
        timedelta(seconds=3),
        timedelta(seconds=1),
    )
    two = one.to_next_epoch()
    assert (two.epoch, two.batch, two.batch_in_epoch, two.sample_in_epoch, two.epoch_wct) == (1, 2, 0, 0, timedelta())
    assert Timestamp.from_state_dict({**two.state_dict(), "later": 1}) == two
    assert pickle.loads(pickle.dumps(two)) == two
    assert two >= "1ep"
    assert two < "3ba"
    assert two.get("sec") == 3
    assert two.copy(batch="9ba").batch == 9
    with pytest.raises(hf.ConfigError):
        Timestamp(apples=1)
    with pytest.raises(hf.ConfigError):
        two.get("dur")


@pytest.mark.parametrize(
    ("interval", "duration", "num_batches", "sizes", "expected"),
    [
        ("1ep", "2ep", 5, [4], ["ep1-ba5", "ep2-ba10"]),
        (1, "2ep", 5, [4], ["ep1-ba5", "ep2-ba10"]),
        (Time("2ep"), "5ep", 2, [4], ["ep2-ba4", "ep4-ba8", "ep5-ba10"]),
        ("3ep", "2ep", 5, [4], ["ep2-ba10"]),
        ("3ba", "2ep", 5, [4], ["ep0-ba3", "ep1-ba6", "ep1-ba9", "ep2-ba10"]),
        ("5ba", "2ep", 5, [4], ["ep0-ba5", "ep1-ba10"]),
        ("4ba", "10ba", 5, [4], ["ep0-ba4", "ep1-ba8", "ep1-ba10"]),
        ("1ep", "7ba", 5, [4], ["ep1-ba5", "ep1-ba7"]),
        ("100ba", "7ba", 5, [4], ["ep1-ba7"]),
        ("10sp", "24sp", 4, [4], ["ep0-ba3", "ep1-ba5", "ep1-ba6"]),
        ("6sp", "2ep", 3, [4, 4, 2], ["ep0-ba2", "ep1-ba4", "ep1-ba5", "ep2-ba6"]),
        ("1sp", "3ba", 3, [4], ["ep0-ba1", "ep0-ba2", "ep0-ba3"]),
        ("100tok", "2ep", 3, [4], ["ep0-ba3", "ep1-ba5", "ep2-ba6"]),
        ("0.1dur", "2ep", 5, [4], [f"ep{n // 6}-ba{n}" for n in range(1, 10)] + ["ep1-ba10"]),
        ("0.3dur", "2ep", 5, [4], ["ep0-ba3", "ep1-ba6", "ep1-ba9", "ep2-ba10"]),
        ("0.5dur", "3ep", 5, [4], ["ep1-ba8", "ep2-ba15"]),
        ("0.25dur", "40sp", 5, [4], ["ep0-ba3", "ep0-ba5", "ep1-ba8", "ep1-ba10"]),
        ("1dur", "2ep", 5, [4], ["ep1-ba10"]),
        ("2s", "5ba", 5, [4], ["ep0-ba2", "ep0-ba4", "ep0-ba5"]),
        (timedelta(seconds=4), "5ba", 5, [4], ["ep0-ba4", "ep0-ba5"]),
    ],
)
def test_expected_saves(
    interval: object, duration: str, num_batches: int, sizes: list[int], expected: list[str]
) -> None:
    """Saves happen where a multiple is crossed, once per batch, and at the end."""
    assert run(interval, duration, num_batches=num_batches, sizes=sizes) == expected


def test_unsized_loader() -> None:
    """A loader without a length saves by anything but a share of epochs, which is refused."""
    assert run("4ba", "6ba", num_batches=100, sizes=[4], sized=False) == ["ep0-ba4", "ep0-ba6"]
    assert run("0.5dur", "6ba", num_batches=100, sizes=[4], sized=False) == ["ep0-ba3", "ep0-ba6"]
    with pytest.raises(hf.ConfigError, match="does not know its length"):
        run("0.5dur", "6ep", num_batches=3, sizes=[4], sized=False)


@pytest.mark.parametrize("interval", [0, -1, "0ba", "-2ep", "1.5dur", "0dur", "2iter", "now", None, True, "1.5ep"])
def test_bad_intervals(interval: object) -> None:
    """An interval that could never be due is refused, naming the argument."""
    with pytest.raises(hf.ConfigError, match="save_interval"):
        parse_every(interval, "save_interval")


@given(st.integers(1, 30), st.integers(1, 20), st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_samples_are_crossed_exactly(size: int, num_batches: int, epochs: int, sizes: list[int]) -> None:
    """Between two saves there is always a multiple, and no multiple is passed without a save at that batch."""
    saves = run(f"{size}sp", f"{epochs}ep", num_batches=num_batches, sizes=sizes)
    counts = [sizes[number % len(sizes)] for _ in range(epochs) for number in range(num_batches)]
    total, expected = 0, set()
    for number, count in enumerate(counts, start=1):
        if (total + count) // size != total // size:
            expected.add(number)
        total += count
    assert {int(name.split("ba")[1]) for name in saves} == expected | {len(counts)}


VARIABLES = run_variables("my-run", RankInfo())


def test_names() -> None:
    """Every variable is filled in, format specs are honoured, and the name gives its counters back."""
    now = Timestamp(epoch=2, batch=41, batch_in_epoch=1, sample=164, token=9, total_wct=1.5)
    assert (
        NameTemplate("ep{epoch}-ba{batch}-rank{rank}", what="save_filename").format(VARIABLES, now) == "ep2-ba41-rank0"
    )
    template = NameTemplate("{run_name}/ep{epoch:04d}/b{batch_in_epoch}-{token}-{total_wct}.pt", what="save_filename")
    name = template.format(VARIABLES, now)
    assert name == "my-run/ep0002/b1-9-1.5.pt"
    match = template.pattern(VARIABLES).fullmatch(name)
    assert match is not None
    assert match.groupdict() == {"epoch": "0002", "batch_in_epoch": "1", "token": "9", "total_wct": "1.5"}
    assert template.pattern(VARIABLES).fullmatch("other/ep0002/b1-9-1.5.pt") is None


@pytest.mark.parametrize("text", ["ep{apples}", "ep{epoch", "ep{0}", "{}", "ep{epoch.real}"])
def test_bad_names(text: str) -> None:
    """An unknown variable and unmatched braces are refused, naming the argument."""
    with pytest.raises(hf.ConfigError, match="save_filename"):
        NameTemplate(text, what="save_filename")
    with pytest.raises(hf.ConfigError, match="save_folder"):
        NameTemplate("{epoch}", what="save_folder", times=False)


@pytest.mark.parametrize(
    ("template", "name", "later"),
    [
        ("ep{epoch}-ba{batch}", "ep2-ba41", False),
        ("ep{epoch}-ba{batch}", "ep2-ba42", True),
        ("ep{epoch}", "ep3", True),
        ("ep{epoch}", "ep2", False),
        ("ep{epoch}-{batch_in_epoch}", "ep2-1", False),
        ("ep{epoch}-{batch_in_epoch}", "ep2-2", True),
        ("ep{epoch}-{batch_in_epoch}", "ep1-9", False),
        ("last", "last", None),
        ("b{batch_in_epoch}", "b7", None),
    ],
)
def test_later_names(template: str, name: str, later: bool | None) -> None:
    """A name lies later than now when one of its totals does, or within the same epoch its count there."""
    now = Timestamp(epoch=2, batch=41, batch_in_epoch=1)
    match = NameTemplate(template, what="save_filename").pattern(VARIABLES).fullmatch(name)
    assert match is not None
    assert is_later(match, now) is later
