"""States are compared leaf by leaf, and no leaf is left out."""

from __future__ import annotations

import pytest

from holdfast.testing import assert_state_equal
from holdfast.verify.state import differences, digests


def state(**new: int) -> dict:
    values = {"number": 1, "text": 2, "joined": 3, "below": 4, **new}
    return {
        1: values["number"],
        "1": values["text"],
        "a/b": values["joined"],
        "a": {"b": values["below"]},
    }


@pytest.mark.parametrize("name", ["number", "text", "joined", "below"])
def test_paths_that_are_alike(name):
    """The keys 1 and "1", "a/b" and b in a: a difference of each is found, in itself and alone."""
    assert_state_equal(state(), state())
    assert len(digests(state())) == 4
    ((_, text),) = differences(state(), state(**{name: 9}))
    assert "9" in text
