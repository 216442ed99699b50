"""Generators are captured without being moved and put back exactly, and what cannot be put back is named."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.errors import UnsupportedStateError
from holdfast.state.load.match_plan import restore_derived
from holdfast.state.tree import rng


@pytest.fixture(autouse=True)
def _generators_put_back():
    """The tests move the global generators: leave them as they were."""
    before = rng.capture()
    yield
    rng.restore(before)


def draw() -> tuple:
    """Draw from every generator, in the ways that leave different marks in their states."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_restored_generators_repeat_the_same_numbers():
    """After restore every generator draws again what it drew after capture."""
    draw()
    state = rng.capture()
    first = [draw() for _ in range(3)]
    assert rng.restore(state) == []
    assert [draw() for _ in range(3)] == first


def test_second_half_of_a_gauss_pair_is_kept():
    """The Gaussian that `random` and NumPy hold back is part of the state."""
    random.gauss(0, 1)
    np.random.standard_normal()
    state = rng.capture()
    assert state["python"]["gauss_next"] is not None
    assert state["numpy"]["has_gauss"] == 1
    expected = random.gauss(0, 1), np.random.standard_normal()
    random.seed(9)
    np.random.seed(9)
    rng.restore(state)
    assert (random.gauss(0, 1), np.random.standard_normal()) == expected


def test_capture_moves_no_generator():
    """Numbers drawn with and without captures in between are the same."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    plain = [draw() for _ in range(4)]
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    observed = []
    for _ in range(4):
        rng.capture()
        observed.append(draw())
    assert observed == plain


def test_state_is_plain_data_and_uint8_tensors():
    """What is captured travels through the codec, tensors aside, and still restores exactly."""
    from holdfast.format import codec

    random.gauss(0, 1)
    state = rng.capture()
    tensor = state.pop("torch")
    assert tensor.dtype is torch.uint8
    again = codec.decode(codec.loads(codec.dumps(codec.encode(state)), max_bytes=1 << 20, max_depth=50))
    expected = draw()
    assert rng.restore({**again, "torch": tensor}) == []
    assert draw() == expected


def test_another_numpy_bit_generator_round_trips():
    """A global NumPy generator exchanged for another kind is captured and restored as that kind."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        state = rng.capture()
        expected = np.random.random(3).tolist()
        assert rng.restore(state) == []
        assert np.random.random(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_missing_and_damaged_entries_are_named_and_the_rest_is_restored():
    """A state with one entry gone and one malformed restores the others and lists exactly these two."""
    state = rng.capture()
    expected = draw()
    del state["numpy"]
    state["torch"] = state["torch"][:7]
    problems = rng.restore(state)
    assert len(problems) == 2
    assert problems[0].startswith("numpy generator: the checkpoint has no entry")
    assert problems[1].startswith("torch generator: ")
    assert draw()[:2] == expected[:2]


def test_generators_of_devices_that_are_not_here_are_named():
    """States of accelerators this machine lacks are listed, not dropped in silence."""
    state = rng.capture()
    state["devices"] = {"nonesuch": [torch.zeros(16, dtype=torch.uint8)] * 2}
    assert rng.restore(state) == ["nonesuch generators: 2 saved, this machine has no nonesuch device"]


class FakeDevices:
    """Stands in for `torch.cuda` with any number of devices."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        self.states, self.current = states, 0

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, device: int = 0) -> torch.Tensor:
        return self.states[device].clone()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_rng_state(self, state: torch.Tensor, device: int | None = None) -> None:
        self.states[self.current if device is None else device] = state.clone()

    def device(self, number: int):
        self.current = number
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        self.states[self.current] = torch.tensor(list(seed.to_bytes(16, "little")), dtype=torch.uint8)

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = list(states)


def test_every_device_in_use_is_captured_and_restored(monkeypatch):
    """Each device's generator is in the state, in order, and comes back to its own device."""
    fake = FakeDevices([torch.full((16,), number, dtype=torch.uint8) for number in range(3)])
    monkeypatch.setattr(torch, "cuda", fake)
    state = rng.capture()
    fake.states = [torch.zeros(16, dtype=torch.uint8)] * 3
    assert rng.restore(state) == []
    assert [int(tensor[0]) for tensor in fake.states] == [0, 1, 2]
    assert "devices" not in rng.capture(devices=False)


@pytest.mark.parametrize(("saved", "here", "named"), [(3, 1, "1 to 2"), (1, 3, "1 to 2")])
def test_another_number_of_devices_is_said(monkeypatch, saved, here, named):
    """With other device counts the common ones are restored and the others named."""
    monkeypatch.setattr(torch, "cuda", FakeDevices([torch.full((16,), 7, dtype=torch.uint8)] * saved))
    state = rng.capture()
    fake = FakeDevices([torch.zeros(16, dtype=torch.uint8)] * here)
    monkeypatch.setattr(torch, "cuda", fake)
    problems = rng.restore(state)
    assert len(problems) == 1
    assert f"cuda generators {named}" in problems[0]
    assert int(fake.states[0][0]) == 7


def test_a_device_in_use_without_an_entry_is_said(monkeypatch):
    """A checkpoint saved without accelerator says so when it is resumed on one."""
    state = rng.capture()
    monkeypatch.setattr(torch, "cuda", FakeDevices([torch.zeros(16, dtype=torch.uint8)]))
    assert rng.restore(state) == ["cuda generators: the checkpoint has no entry for them"]


def captured_on(monkeypatch, states: list[int]) -> dict:
    monkeypatch.setattr(torch, "cuda", FakeDevices([torch.full((16,), one, dtype=torch.uint8) for one in states]))
    return rng.capture()


def test_devices_of_another_number_of_ranks_get_states_of_their_own(monkeypatch):
    """Every device of every rank is seeded apart from all others."""
    first, second = captured_on(monkeypatch, [1, 0]), captured_on(monkeypatch, [0, 2])
    seen = set()
    for rank in range(3):
        fake = FakeDevices([torch.zeros(16, dtype=torch.uint8)] * 2)
        monkeypatch.setattr(torch, "cuda", fake)
        in_step, problems = restore_derived(first, [second], step=4, rank=rank, world_size=3)
        assert problems == []
        assert "cuda" not in in_step
        seen |= {bytes(state.tolist()) for state in fake.states}
    assert len(seen) == 6


def test_devices_that_were_in_step_stay_in_step(monkeypatch):
    """Rank 0 has drawn on its first device what rank 1 has on its second: all ranks go on from there."""
    first, second = captured_on(monkeypatch, [5, 0]), captured_on(monkeypatch, [0, 5])
    fake = FakeDevices([torch.zeros(16, dtype=torch.uint8)])
    monkeypatch.setattr(torch, "cuda", fake)
    in_step, problems = restore_derived(first, [second], step=4, rank=2, world_size=3)
    assert in_step == ["python", "numpy", "torch", "cuda"]
    assert problems == []
    assert fake.states[0].tolist() == [5] * 16


def test_devices_that_only_rank_zero_used_are_derived(monkeypatch):
    """Another rank without an entry is not in step, and no error."""
    first = captured_on(monkeypatch, [5])
    second = {name: value for name, value in first.items() if name not in ("devices", "numpy")}
    in_step, problems = restore_derived(first, [second], step=4, rank=0, world_size=3)
    assert (in_step, problems) == (["python", "torch"], [])


def test_devices_that_are_not_here_are_named_when_derived():
    """As with any restore."""
    state = {**rng.capture(), "devices": {"nonesuch": [torch.zeros(16, dtype=torch.uint8)]}}
    assert restore_derived(state, [], step=1, rank=0, world_size=2)[1] == [
        "nonesuch generators: this machine has no nonesuch device"
    ]


def test_damaged_entries_are_named_when_derived_and_the_rest_is_set():
    """One line for each, as with any restore; a name out of NumPy that is no bit generator is not called."""
    state = rng.capture()
    state["numpy"] = {**state["numpy"], "bit_generator": "seed"}
    state["devices"] = {"cuda": []}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    in_step, problems = restore_derived(state, [], step=1, rank=1, world_size=2)
    assert in_step == []
    assert problems == ["numpy generator: ValueError: unknown bit generator 'seed'",
                        "cuda generators: IndexError: list index out of range"]  # fmt: skip
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "take", "put"),
    [
        (
            np.random.default_rng,
            lambda one: one.bit_generator.state,
            lambda one, s: setattr(one.bit_generator, "state", s),
        ),
        (np.random.RandomState, lambda one: one.get_state(), lambda one, s: one.set_state(s)),
        (random.Random, lambda one: one.getstate(), lambda one, s: one.setstate(s)),
    ],
)
def test_a_refused_generator_says_what_to_save_and_that_is_exact(make, take, put, tmp_path):
    """The sentence names the attribute or method whose value can be saved and put back."""
    one, other = make(3), make(4)
    with pytest.raises(UnsupportedStateError, match=r"state\(?\)?, and (assign|give) that"):
        hf.save(tmp_path / "refused", {"one": one})
    one.random()
    hf.save(tmp_path / "saved", {"one": take(one)})
    put(other, hf.load(tmp_path / "saved")["one"])
    assert other.random() == one.random()


@pytest.mark.parametrize("name", ["|04", "|O", "<f8,<f8", "M8[s]", 4, "<f" + "8" * 50])
def test_words_of_a_generator_have_a_plain_dtype(name):
    """Anything else would go to the parser of NumPy, which raises what it likes."""
    with pytest.raises(ValueError, match="no dtype of a generator"):
        rng._arrays({"state": {"dtype": name, "data": b"12345678"}})


def test_generators_in_a_state_go_back_with_it(tmp_path):
    """`hf.RNG` as an entry: the same numbers come after a load as after the save."""
    hf.save(tmp_path / "one", {"n": 1, "rng": hf.RNG})
    first = (torch.rand(3), random.random(), np.random.rand())
    hf.load(tmp_path / "one", {"n": 0, "rng": hf.RNG})
    assert torch.equal(torch.rand(3), first[0])
    assert (random.random(), np.random.rand()) == first[1:]
