"""What was probably meant is named, and what needs no asking is done."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import holdfast as hf


@pytest.fixture
def run(tmp_path):
    """A run of one checkpoint, with the very state of its Checkpointer."""
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with hf.Checkpointer(tmp_path / "run", state, every=1) as ck:
        ck.step()
    return tmp_path / "run", state


def test_the_state_of_a_run_loads_as_it_is(run):
    """The mapping that a Checkpointer got goes into `load`: the run's own entry is ignored unless asked for by name."""
    home, state = run
    saved = state["model"].weight.detach().clone()
    with torch.no_grad():
        state["model"].weight.zero_()
    hf.load(home / "step_00000001", state)
    assert torch.equal(state["model"].weight, saved)
    assert "holdfast" in hf.load(home)
    with pytest.raises(hf.StateMismatchError, match="holdfast"):
        hf.load(home, {"model": state["model"]}, only=["model", "holdfast"])


def test_a_name_of_the_user_is_never_ignored(tmp_path):
    """Of a checkpoint that no run saved, "holdfast" is an entry like any other."""
    hf.save(tmp_path / "one", {"holdfast": torch.ones(1), "w": torch.ones(1)})
    with pytest.raises(hf.StateMismatchError, match="holdfast"):
        hf.load(tmp_path / "one", {"w": torch.zeros(1)})


def test_a_part_of_a_run(run):
    """`load(run, {"model": m})` names the answer, and the answer works."""
    home, state = run
    with pytest.raises(hf.StateMismatchError, match=r"only='model'") as caught:
        hf.load(home, {"model": state["model"]})
    assert caught.value.problems == ("unexpected: optimizer",)
    hf.load(home, {"model": state["model"]}, only="model")


def test_a_run_that_does_without_an_entry(run):
    """A `Checkpointer` has no `only`: what its error names is an argument that it takes."""
    home, state = run
    with pytest.raises(hf.StateMismatchError, match=r"nothing else: skip='optimizer'\n") as caught:
        hf.Checkpointer(home, {"model": state["model"]}).start()
    assert "only=" not in str(caught.value)
    hf.Checkpointer(home, {"model": state["model"]}, skip="optimizer").start().close()


def test_a_model_of_another_precision(run):
    """`load` names the argument that casts."""
    home, _ = run
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(hf.StateMismatchError, match=r"to cast while loading: dtype=torch\.bfloat16"):
        hf.load(home, {"model": model}, only="model")
    hf.load(home, {"model": model}, only="model", dtype=torch.bfloat16)


def test_a_module_instead_of_a_state(run):
    """What to write is said."""
    home, state = run
    with pytest.raises(hf.ConfigError, match=r"wrap it .* as in \{'model': model\}"):
        hf.load(home, state["model"])


@pytest.mark.parametrize(
    ("resume", "meant"), [(None, "never"), ("latest", "auto"), ("newest", "auto"), (True, "auto"), ("neve", "never")]
)
def test_words_for_resume(tmp_path, resume, meant):
    """Words of other libraries, and misspelt ones; a path stays a path."""
    with pytest.raises(hf.ConfigError, match=f"did you mean {meant!r}"):
        hf.Checkpointer(tmp_path, {}, resume=resume)
    hf.Checkpointer(tmp_path, {}, resume=f"{tmp_path}/latest")
    hf.Checkpointer(tmp_path, {}, resume="backup")


def test_misspelt_arguments(tmp_path):
    """The argument that was meant is named; other errors of the same kind stay what they are."""
    for call, meant in (
        (lambda: hf.Keep(lst=3), "last"),
        (lambda: hf.Checkpointer(tmp_path, {}, evry=3), "every"),
        (lambda: hf.Checkpointer(tmp_path, {}, keeep=None), "keep"),
        (lambda: hf.load(tmp_path, device="cpu"), "map_location"),
        (lambda: hf.save(tmp_path, {}, overwite=True), "overwrite"),
        (lambda: hf.save_async(tmp_path, {}, metric={}), "metrics"),
    ):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument.*: did you mean {meant}=\?"):
            call()
    with pytest.raises(TypeError, match=r"the arguments are last, best, metric, mode, every"):
        hf.Keep(zzzzzz=1)
    assert [*inspect.signature(hf.Keep).parameters] == ["last", "best", "metric", "mode", "every"]

    class Inner(nn.Module):
        def state_dict(self, *_, **__):
            return nn.Linear(1, keeep=1)

    with pytest.raises(TypeError) as caught:
        hf.save(tmp_path / "x", {"m": Inner()})
    assert "did you mean" not in str(caught.value)


def test_an_optimizer_of_no_model(tmp_path, capfd):
    """Its parameters are not saved: the start says so; models in lists and in objects of the user's are found."""
    model = nn.Linear(2, 2)

    class Holder:
        def __init__(self):
            self.net = model

        def state_dict(self):
            return self.net.state_dict()

        def load_state_dict(self, state):
            self.net.load_state_dict(state)

    def optimizer():
        return torch.optim.SGD(model.parameters(), lr=0.1)

    loose = nn.Parameter(torch.ones(1))
    good = [
        {"o": optimizer(), "nested": {"models": [model]}},
        {"o": optimizer(), "holder": Holder()},
        {"o": torch.optim.SGD([loose], lr=0.1), "loose": loose},
    ]
    for number, state in enumerate(good):
        with hf.Checkpointer(tmp_path / str(number), state):
            pass
    assert "of no model" not in capfd.readouterr().err
    with hf.Checkpointer(tmp_path / "bad", {"opt": optimizer(), "model": nn.Linear(2, 2)}):
        pass
    assert "state['opt'] trains 2 parameters of no model in the state" in capfd.readouterr().err


@pytest.mark.parametrize(("given", "taken"), [("4MiB", 4 << 20), ("8 MB", 8_000_000), (4 << 20, 4 << 20), (None, None)])
def test_the_bound_of_memory_as_text(given, taken, tmp_path):
    """``max_staging_bytes`` takes bytes or a size in words."""
    ck = hf.Checkpointer(tmp_path, {"w": torch.ones(1)}, max_staging_bytes=given)
    assert ck.options.max_staging_bytes == taken


@pytest.mark.parametrize("given", ["much", "4 XB", 4.5e6, True, "-4MiB", ""])
def test_a_bound_of_memory_that_is_none(given, tmp_path):
    """What cannot be read as a size is named, with what to write."""
    with pytest.raises(hf.ConfigError, match=r"max_staging_bytes=.*give a whole number of bytes, a text such as"):
        hf.Checkpointer(tmp_path, {"w": torch.ones(1)}, max_staging_bytes=given)
