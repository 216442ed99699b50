"""Optimizer state: by parameter name, without casts, in any order."""

import pytest
import torch
from state_kit import assert_same, bits, memory_uri, net, train
from torch import nn

import holdfast as hf

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd without momentum": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": torch.optim.Adam,
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True, maximize=True),
    "adamw tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}


def same_future(model, optimizer, other, again):
    """Both take more steps and end with the same bits."""
    train(model, optimizer, seed=9)
    train(other, again, seed=9)
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name):
    """Whatever the optimizer, a loaded one takes the same steps as the one that went on."""
    model = net(0)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    other = net(1)
    again = OPTIMIZERS[name](other.parameters())
    hf.load(place, {"model": other, "optimizer": again})
    assert_same(again.state_dict(), optimizer.state_dict())
    same_future(model, optimizer, other, again)


def test_load_replaces_state_of_a_used_optimizer():
    """An optimizer that has stepped already forgets that: state it has and the checkpoint has not goes away."""
    model = net(0)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": fresh})
    other = net(1)
    used = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    train(other, used)
    hf.load(place, {"model": other, "optimizer": used})
    assert not any(used.state.values())
    assert used.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_load_within_inference_mode_gives_state_that_trains(has_hook):
    """As in a script that resumes before it leaves the mode: torch refuses a step with tensors that are made in it."""
    model, other = net(0), net(1)
    optimizer, again = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    if has_hook:
        for one in (optimizer, again):
            one.register_state_dict_post_hook(lambda *_: None)
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    with torch.inference_mode():
        hf.load(place, {"model": other, "optimizer": again})
    same_future(model, optimizer, other, again)


def test_lbfgs_keeps_its_history():
    """LBFGS, which keeps lists of tensors for one parameter, goes on as if nothing had happened."""
    goal = torch.tensor([1.0, -2.0, 3.0])

    def steps(param, optimizer, count):
        def closure():
            optimizer.zero_grad()
            loss = ((param - goal) ** 4).sum()
            loss.backward()
            return loss

        for _ in range(count):
            optimizer.step(closure)

    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.LBFGS([param], lr=0.3, max_iter=3)
    steps(param, optimizer, 2)
    place = memory_uri()
    hf.save(place, {"w": param, "optimizer": optimizer})
    other = nn.Parameter(torch.ones(3))
    again = torch.optim.LBFGS([other], lr=0.1, max_iter=3)
    hf.load(place, {"w": other, "optimizer": again})
    assert len(again.state[other]["old_dirs"]) == len(optimizer.state[param]["old_dirs"]) > 0
    steps(param, optimizer, 3)
    steps(other, again, 3)
    assert bits(other) == bits(param)


def test_order_and_groups_of_parameters_may_change():
    """State follows its parameter by name when the order and the groups differ."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    other = net(1)
    params = list(other.parameters())[::-1]
    again = torch.optim.AdamW([{"params": params[:2], "lr": 1.0}, {"params": params[2:]}])
    hf.load(place, {"model": other, "optimizer": again})
    assert [group["lr"] for group in again.param_groups] == [0.02, 0.02]
    same_future(model, optimizer, other, again)


def test_merged_groups_that_disagree_keep_the_live_value():
    """One live group made of two saved ones with different learning rates keeps its own."""
    model = net(0)
    params = list(model.parameters())
    place = memory_uri()
    optimizer = torch.optim.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}], momentum=0.9)
    hf.save(place, {"model": model, "optimizer": optimizer})
    again = torch.optim.SGD(params, lr=0.7, momentum=0.5)
    hf.load(place, {"model": model, "optimizer": again})
    assert (again.param_groups[0]["lr"], again.param_groups[0]["momentum"]) == (0.7, 0.9)


def test_frozen_parameters_may_leave_the_optimizer():
    """A parameter that is no longer optimized is no mismatch; the others keep their state."""
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    other = net(1)
    other[0].requires_grad_(False)
    again = torch.optim.Adam([param for param in other.parameters() if param.requires_grad])
    hf.load(place, {"model": other, "optimizer": again})
    assert torch.equal(again.state[other[2].weight]["exp_avg"], optimizer.state[model[2].weight]["exp_avg"])


def test_new_parameters_need_leave():
    """A parameter the checkpoint does not have is a mismatch, unless allow_missing covers it."""
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    other = net(1)
    other.append(nn.Linear(2, 1))
    again = torch.optim.Adam(other.parameters())
    with pytest.raises(hf.StateMismatchError) as caught:
        hf.load(place, {"model": other, "optimizer": again})
    assert sorted(caught.value.problems) == [
        "missing: model/3.bias",
        "missing: model/3.weight",
        "missing: optimizer/state/model/3.bias",
        "missing: optimizer/state/model/3.weight",
    ]
    hf.load(place, {"model": other, "optimizer": again}, allow_missing=["model/3.*"])
    assert torch.equal(again.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert not again.state.get(other[3].weight)


def test_float32_state_of_bfloat16_parameters_is_not_cast():
    """State keeps its own dtype and bits, where torch's load_state_dict would cast it to the parameter's."""
    model = net(0).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        noise = torch.randn(param.shape)
        optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": noise, "exp_avg_sq": noise.square()}
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    other = net(1).bfloat16()
    again = torch.optim.AdamW(other.parameters())
    hf.load(place, {"model": other, "optimizer": again})
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert again.state[new]["exp_avg"].dtype == torch.float32
        assert bits(again.state[new]["exp_avg"]) == bits(optimizer.state[old]["exp_avg"])


def test_state_tensors_are_filled_in_place():
    """An optimizer that has its state already keeps the tensors (CUDA graphs and fused kernels hold pointers)."""
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    kept = {id(state["exp_avg"]) for state in optimizer.state.values()}
    train(model, optimizer)
    hf.load(place, {"model": model, "optimizer": optimizer})
    assert {id(state["exp_avg"]) for state in optimizer.state.values()} == kept


def test_two_optimizers_over_two_models():
    """A GAN: each optimizer finds its own parameters, whatever the order of the state."""

    def make(seed):
        generator, critic = net(seed), net(seed + 10)
        return {
            "opt_g": torch.optim.Adam(generator.parameters(), lr=0.1),
            "models": [generator, critic],
            "opt_d": torch.optim.SGD(critic.parameters(), lr=0.2, momentum=0.9),
        }

    state, other = make(0), make(1)
    for number, name in enumerate(("opt_g", "opt_d")):
        train(state["models"][number], state[name])
    place = memory_uri()
    hf.save(place, state)
    hf.load(place, other)
    for number, name in enumerate(("opt_g", "opt_d")):
        same_future(state["models"][number], state[name], other["models"][number], other[name])


def test_two_optimizers_over_one_model():
    """Two optimizers that share a model keep apart."""
    model, other = net(0), net(1)
    pair = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]
    again = [torch.optim.Adam(other[0].parameters()), torch.optim.SGD(other[2].parameters(), lr=0.5, momentum=0.1)]
    train(model, *pair)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizers": pair})
    hf.load(place, {"model": other, "optimizers": again})
    train(model, *pair)
    train(other, *again)
    assert_same(other[2].state_dict(), model[2].state_dict())


def test_parameters_of_no_module_are_matched_by_position():
    """Without a module in the state, parameters keep their place in the optimizer."""
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    place = memory_uri()
    hf.save(place, {"optimizer": optimizer})
    others = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    again = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    hf.load(place, {"optimizer": again})
    assert again.state[others[1]]["momentum_buffer"].tolist() == [2, 2, 2]


def test_another_kind_of_optimizer_is_a_mismatch():
    """Adam state does not go into SGD: the message says how to start the optimizer afresh."""
    model = net(0)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    with pytest.raises(hf.StateMismatchError, match=r"skip=\['optimizer'\]"):
        hf.load(place, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    hf.load(place, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, skip=["optimizer"])


def test_selection_reaches_into_the_state():
    """`only` and `skip` may name parts of the optimizer: groups without state, one parameter, no state."""
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})

    def loaded(**arguments):
        other = net(0)
        again = torch.optim.Adam(other.parameters(), lr=0.1)
        train(other, again, steps=1, seed=5)
        before = {name: again.state[param]["exp_avg"].clone() for name, param in other.named_parameters()}
        hf.load(place, {"model": other, "optimizer": again}, **arguments)
        changed = {
            name
            for name, param in other.named_parameters()
            if not torch.equal(again.state[param]["exp_avg"], before[name])
        }
        return again.param_groups[0]["lr"], changed

    everything = {name for name, _ in model.named_parameters()}
    assert loaded(only=["optimizer/param_groups"]) == (0.5, set())
    assert loaded(skip=["optimizer/state/*"]) == (0.5, set())
    assert loaded(skip=["optimizer/state"]) == (0.5, set())
    assert loaded(only=["optimizer/state/model/0.weight"]) == (0.1, {"0.weight"})
    assert loaded(only=["optimizer/state/model/2.*"]) == (0.1, {"2.weight", "2.bias"})
    assert loaded(skip=["optimizer/param_groups"]) == (0.1, everything)
    assert loaded(skip=["optimizer/state/*/exp_avg"]) == (0.5, set())


@pytest.mark.parametrize(("saved", "live"), [(0.3, torch.tensor(0.1)), (torch.tensor(0.3), 0.1)])
def test_how_a_learning_rate_is_held_stays_the_live_choice(saved, live):
    """The value of lr is restored; whether it is a tensor is the live optimizer's choice."""
    model = net(0)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=saved)})
    again = torch.optim.AdamW(model.parameters(), lr=live)
    held = again.param_groups[0]["lr"]
    hf.load(place, {"model": model, "optimizer": again})
    got = again.param_groups[0]["lr"]
    assert float(got) == pytest.approx(0.3)
    assert (got is held) == isinstance(live, torch.Tensor)
    assert isinstance(got, torch.Tensor) == isinstance(live, torch.Tensor)


def test_named_parameters_keep_their_own_names():
    """The ``param_names`` that torch keeps in a group are the live ones after a load into other groups."""
    model = net(0)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": torch.optim.Adam(model.named_parameters())})
    rows = list(model.named_parameters())
    again = torch.optim.Adam([{"params": rows[:2]}, {"params": rows[2:]}])
    hf.load(place, {"model": model, "optimizer": again})
    assert again.param_groups[0]["param_names"] == [name for name, _ in rows[:2]]


def test_state_dict_of_an_optimizer_loads_into_the_optimizer():
    """What was saved as ``optimizer.state_dict()`` goes into a live optimizer, by position, without casts."""
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = net(1)
    again = torch.optim.Adam(other.parameters())
    hf.load(place, {"model": other, "optimizer": again})
    same_future(model, optimizer, other, again)


@pytest.mark.parametrize(
    "place_in",
    [lambda a, b: {"gan/d": a, "gan": {"d": b}}, lambda a, b: {"m": {0: a, "0": b}}],
    ids=["slash", "number and text"],
)
def test_two_parameters_that_would_have_one_name_are_refused(place_in):
    """The state of one of them would take the place of that of the other: at a save, and at a load of such a state."""

    def state(optimized):
        pair = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
        optimizer = torch.optim.SGD([part.weight for part in pair[:optimized]], lr=0.1, momentum=0.9)
        return {**place_in(*pair), "optimizer": optimizer}

    place = memory_uri()
    with pytest.raises(hf.UnsupportedStateError, match=r"state\['optimizer'\]: two parameters are called '.*/weight'"):
        hf.save(place, state(2))
    assert "optimizer" not in hf.save(place, state(2), unsupported="drop").keys()  # noqa: SIM118 - no mapping
    hf.save(place, state(1), overwrite=True)
    with pytest.raises(hf.StateMismatchError, match="two parameters are called"):
        hf.load(place, state(2))
    hf.load(place, state(1))


def momentum_of(model, order):
    """Make an optimizer that knows names, with parameters in ``order``; each momentum is the number in the model."""
    named = list(model.named_parameters())
    optimizer = torch.optim.SGD([named[number] for number in order], lr=0.1, momentum=0.9)
    for number, (_, param) in enumerate(named):
        param.grad = torch.full_like(param, float(number))
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("form", ["state_dict", "optimizer", "with its module"])
@pytest.mark.parametrize("live_module", [True, False])
@pytest.mark.parametrize("hooked", ["", "saved", "live"])
def test_names_that_torch_keeps_count_more_than_positions(form, live_module, hooked):
    """Without the module in the state, ``param_names`` on both sides say which parameter is which."""
    model = net(0)
    count = len(list(model.parameters()))
    optimizer = momentum_of(model, range(count))
    if hooked == "saved":
        optimizer.register_state_dict_post_hook(lambda *_: None)
    place = memory_uri()
    hf.save(
        place,
        {
            "model": model if form == "with its module" else model.state_dict(),
            "optimizer": optimizer.state_dict() if form == "state_dict" else optimizer,
        },
    )
    other = net(1)
    again = torch.optim.SGD(list(other.named_parameters())[::-1], lr=0.5, momentum=0.9)
    if hooked == "live":
        again.register_load_state_dict_pre_hook(by_names)
    hf.load(place, {"model": other if live_module else other.state_dict(), "optimizer": again})
    found = [again.state[param]["momentum_buffer"].flatten()[0].item() for param in other.parameters()]
    assert found == list(range(count))
    assert again.param_groups[0]["lr"] == 0.1
    assert again.param_groups[0]["param_names"][-1] == "0.weight"


def by_names(optimizer, state_dict):
    """Change a dict to the order of the live optimizer: the recipe of torch's documentation."""
    (saved,), (group,) = state_dict["param_groups"], optimizer.param_groups
    at = dict(zip(saved["param_names"], saved["params"], strict=True))
    states = {number: state_dict["state"][at[name]] for number, name in enumerate(group["param_names"])}
    names = {"params": list(range(len(at))), "param_names": group["param_names"]}
    return {"state": states, "param_groups": [{**saved, **names}]}


def test_names_that_torch_keeps_show_what_is_new():
    """A parameter with a new name is missing, whatever its position."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    place = memory_uri()
    hf.save(place, {"optimizer": momentum_of(model, range(3))})
    hf.save(place + "-dict", {"optimizer": momentum_of(model, range(3)).state_dict()})
    other = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "bcd"})
    for where in (place, place + "-dict"):
        again = torch.optim.SGD(other.named_parameters(), lr=0.5, momentum=0.9)
        with pytest.raises(hf.StateMismatchError) as caught:
            hf.load(where, {"optimizer": again})
        assert caught.value.problems == ("missing: optimizer/state/param.2", "unexpected: optimizer/state/a.weight")


def test_hooks_of_an_optimizer_see_what_is_saved_and_loaded():
    """What a hook adds to the state_dict is saved, and hooks for loading are called."""
    model = net(0)
    optimizer = momentum_of(model, range(len(list(model.parameters()))))
    optimizer.register_state_dict_post_hook(lambda _, found: {**found, "mine": 5})
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    seen = []
    again = torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
    again.register_load_state_dict_pre_hook(lambda _, found: seen.append(found["mine"]))
    hf.load(place, {"model": model, "optimizer": again})
    assert seen == [5]
    assert_same(again.state_dict()["state"], optimizer.state_dict()["state"])


def test_positions_do_not_fit_another_number_of_parameters():
    """Nobody knows which of them moved: a mismatch that names the optimizer, and no guess."""
    place = memory_uri()
    hf.save(place, {"optimizer": torch.optim.Adam(net(0)[0].parameters()).state_dict()})
    with pytest.raises(hf.StateMismatchError, match="optimizer: Adam in the state, dict in the checkpoint"):
        hf.load(place, {"optimizer": torch.optim.Adam(net(0).parameters())})


def test_state_dict_in_place_of_the_optimizer_is_explained():
    """Loading into ``optimizer.state_dict()`` would restore nothing: refused, with what to give instead."""
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    place = memory_uri()
    hf.save(place, {"optimizer": optimizer})
    with pytest.raises(hf.StateMismatchError, match="give the optimizer itself"):
        hf.load(place, {"optimizer": optimizer.state_dict()})


def test_a_state_of_another_dtype_is_made_anew(tmp_path):
    """float32 state in the checkpoint over live bfloat16 state of the same shape: the stored bits, not a cast."""

    def made(dtype):
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        weight.grad = torch.full((3,), 0.3, dtype=torch.bfloat16)
        optimizer.step()
        optimizer.state[weight]["exp_avg"] = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
        module = torch.nn.Module()
        module.weight = weight
        return {"model": module, "optimizer": optimizer}

    hf.save(tmp_path / "ck", made(torch.float32))
    live = made(torch.bfloat16)
    hf.load(tmp_path / "ck", into=live)
    (state,) = live["optimizer"].state.values()
    assert state["exp_avg"].dtype == torch.float32
    assert state["exp_avg"].tolist() == torch.tensor([0.1, 0.2, 0.3]).tolist()


class Counting(torch.optim.SGD):
    """Counts its steps, and keeps other things, under keys that are no parameters, as MADGRAD does."""

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", 0) + 1
        if self.state["k"] == 1:
            self.state.update({"mean": torch.zeros(2), "scale": torch.ones(())})
            self.state["block", 1] = {"rows": [torch.zeros(3)], "left": 0}
        self.state["mean"] += 1
        self.state["block", 1]["rows"][0] += 2
        self.state["scale"] *= 0.5
        return super().step(closure)


def counting(seed=0, steps=0):
    """Return a network and its optimizer after some steps."""
    model = net(seed)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, steps=steps)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("steps", [0, 1])
def test_state_under_keys_that_are_no_parameters(steps):
    """It comes back in a new optimizer as in a used one, whose tensors are filled in place, and training goes on."""
    state, other = counting(steps=3), counting(seed=1, steps=steps)
    before = other["optimizer"].state.get("mean")
    place = memory_uri()
    hf.save(place, state)
    hf.load(place, other)
    assert_same(other["optimizer"].state_dict(), state["optimizer"].state_dict())
    assert (other["optimizer"].state["k"], other["optimizer"].state["mean"].tolist()) == (3, [3, 3])
    assert other["optimizer"].state["mean"] is before or not steps
    same_future(*state.values(), *other.values())
    assert_same(other["optimizer"].state_dict(), state["optimizer"].state_dict())


def test_other_state_can_be_left_out_and_taken_alone():
    """It is `other_state` of the optimizer for `only` and `skip`."""
    place = memory_uri()
    hf.save(place, counting(steps=3))
    for options, k, mean in (
        ({"skip": "optimizer/other_state/k"}, 1, 3),
        ({"skip": "optimizer/other_state"}, 1, 1),
        ({"only": "optimizer/other_state"}, 3, 3),
        ({"only": "optimizer/other_state/mean"}, 1, 3),
    ):
        other = counting(seed=1, steps=1)
        momentum = [kept["momentum_buffer"] for key, kept in other["optimizer"].state.items() if torch.is_tensor(key)]
        before = [one.clone() for one in momentum]
        hf.load(place, other, **options)
        assert (other["optimizer"].state["k"], other["optimizer"].state["mean"][0].item()) == (k, mean), options
        assert all(map(torch.equal, momentum, before)) == ("only" in options)


def test_a_checkpoint_without_other_state_says_that_it_has_none(tmp_path, capsys):
    """As early versions saved it: the live value stays, and the start of a run tells that it is not the saved one."""
    state = counting(steps=3)
    for key in ("k", "mean", "scale", ("block", 1)):
        del state["optimizer"].state[key]
    with hf.Checkpointer(tmp_path / "run", state) as ck:
        ck.step()
    other = counting(seed=1, steps=1)
    with hf.Checkpointer(tmp_path / "run", other) as ck:
        assert ck.global_step == 1
    assert other["optimizer"].state["k"] == 1
    assert "optimizer/other_state/k: not in the checkpoint" in capsys.readouterr().err


def test_other_state_of_a_state_dict_loads_into_the_optimizer():
    """What torch's own ``state_dict`` has under keys that are no parameters goes into the live optimizer, too."""
    state, other = counting(steps=3), counting(seed=1)
    place = memory_uri()
    hf.save(place, {name: one.state_dict() for name, one in state.items()})
    hf.load(place, other)
    assert_same(other["optimizer"].state_dict(), state["optimizer"].state_dict())
    saved = state["optimizer"].state_dict()
    hf.save(place, {"optimizer": {**saved, "state": {**saved["state"], 99: {}}}}, overwrite=True)
    with pytest.raises(hf.StateMismatchError, match="dict in the checkpoint"):
        hf.load(place, {"optimizer": other["optimizer"]})


def test_other_state_that_cannot_be_saved_is_refused():
    """A module as a key: the save names it, where it was left out without a word."""
    state = counting(steps=1)
    state["optimizer"].state[state["model"][0]] = {"factor": torch.ones(2)}
    with pytest.raises(hf.UnsupportedStateError, match=r"optimizer.*other_state.*Linear as a dict key"):
        hf.save(memory_uri(), state)


@pytest.mark.parametrize(("name", "rename"), [("model", None), ("net", {"model/*": "net/*"})])
def test_state_of_a_parameter_that_has_another_shape_now(name, rename):
    """A new head: its old moments would end the first step with torch's size error, so they are refused or left out."""

    def made(width):
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, width))
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = made(2)
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    other, again = made(7)
    state, head = {name: other, "optimizer": again}, [f"{name}/1.*", "model/1.*"]
    with pytest.raises(hf.StateMismatchError) as caught:
        hf.load(place, state, skip=head, rename=rename)
    assert caught.value.problems == tuple(
        f"wrong: optimizer/state/{name}/1.{which}: its parameter has shape {now} in the state, {was} in the checkpoint"
        for which, now, was in (("bias", (7,), (2,)), ("weight", (7, 4), (2, 4)))
    )
    assert not again.state
    for options in ({"strict": False}, {"skip": [*head, f"optimizer/state/{name}/1.*"]}):
        other, again = made(7)
        hf.load(place, {name: other, "optimizer": again}, rename=rename, **options)
        assert torch.equal(again.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
        assert not again.state.get(other[1].weight)
        train(other, again)
