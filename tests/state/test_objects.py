"""Objects with ``state_dict``: schedulers, scalers, averages, metrics, modules with state of their own making."""

from collections import OrderedDict

import pytest
import torch
from state_kit import assert_same, memory_uri, net, train
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import holdfast as hf
from holdfast.state.tree.objects import restore_metric

SCHEDULERS = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=20),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=3),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "multi-step": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5]),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[3]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.1), lr_scheduler.StepLR(opt, 2)]
    ),
    "swa": lambda opt: SWALR(opt, swa_lr=0.05),
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_go_on(name):
    """A restored scheduler and optimizer give the learning rates that the original goes on to give."""

    def make(seed):
        model = net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def rates(state, count):
        found = []
        for _ in range(count):
            state["optimizer"].step()
            state["scheduler"].step()
            found.append(state["optimizer"].param_groups[0]["lr"])
        return found

    state, other = make(0), make(1)
    rates(state, 4)
    place = memory_uri()
    hf.save(place, state)
    hf.load(place, other)
    assert rates(other, 6) == rates(state, 6)


def test_plateau_scheduler_goes_on():
    """ReduceLROnPlateau keeps its best value and its patience."""

    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)

    (optimizer, plateau), (other, again) = make(), make()
    for loss in (3.0, 2.0, 2.5, 2.5):
        plateau.step(loss)
    place = memory_uri()
    hf.save(place, {"optimizer": optimizer, "plateau": plateau})
    hf.load(place, {"optimizer": other, "plateau": again})
    again.step(2.5)
    plateau.step(2.5)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_grad_scaler():
    """An enabled GradScaler keeps its scale and its growth count."""
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=7)
    place = memory_uri()
    hf.save(place, {"scaler": scaler, "off": torch.amp.GradScaler("cpu", enabled=False)})
    again = torch.amp.GradScaler("cpu")
    hf.load(place, {"scaler": again, "off": torch.amp.GradScaler("cpu", enabled=False)})
    assert again.state_dict() == scaler.state_dict()


def test_averaged_model():
    """An AveragedModel keeps its average and its count, whatever names it gives its parts."""
    model = net(0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for seed in range(3):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed)
        average.update_parameters(model)
    place = memory_uri()
    hf.save(place, {"model": model, "ema": average})
    other = net(1)
    again = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    hf.load(place, {"model": other, "ema": again})
    for one in ((model, average), (other, again)):
        train(one[0], torch.optim.SGD(one[0].parameters(), lr=0.1), seed=8)
        one[1].update_parameters(one[0])
    assert_same(again.state_dict(), average.state_dict())
    assert int(again.n_averaged) == 4


class Own:
    """A class of the user's with tensors, plain data and one tensor under two names."""

    def __init__(self):
        self.shadow = torch.zeros(3)
        self.best = None
        self.seen = []

    def state_dict(self):
        return {"shadow": self.shadow, "same": self.shadow, "best": self.best, "seen": self.seen}

    def load_state_dict(self, state):
        assert state["same"].data_ptr() == state["shadow"].data_ptr()
        self.shadow, self.best, self.seen = state["shadow"], state["best"], state["seen"]


def test_own_class():
    """A class with state_dict and load_state_dict gets back what it gave, at any depth, tied tensors tied."""
    own = Own()
    own.shadow, own.best, own.seen = torch.arange(3.0), float("-inf"), [(1, "a")]
    place = memory_uri()
    hf.save(place, {"callbacks": [{"own": own}]})
    again = Own()
    back = hf.load(place, {"callbacks": [{"own": again}]})
    assert back["callbacks"][0]["own"] is again
    assert_same([again.shadow, again.best, again.seen], [own.shadow, own.best, own.seen])


class Average:
    """Keeps tensors and plain data, nested."""

    def __init__(self, start=0.0):
        self.state = {"decay": start, "shadow": {"a": torch.full((2,), start), "b": [torch.full((1,), start), start]}}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("choice", "loaded"),
    [
        ({"skip": "ema/decay"}, "abc"),
        ({"skip": ["ema/shadow/b", "n"]}, "da"),
        ({"skip": "ema/shadow/b/0"}, "dac"),
        ({"skip": "*/a"}, "dbc"),
        ({"only": "ema/decay"}, "d"),
        ({"only": ["ema/shadow/*"], "skip": "ema/shadow/a"}, "bc"),
        ({"only": "old/decay", "rename": {"old": "ema"}}, "d"),
        ({"only": "n"}, ""),
        ({"skip": "ema/shadow"}, "d"),
        ({"only": "*"}, "dabc"),
    ],
)
def test_a_part_of_an_object_is_loaded(choice, loaded):
    """What ``only`` does not name, or ``skip`` does, within an object: it keeps what its own ``state_dict`` gives."""
    name = "old" if "rename" in choice else "ema"
    place, live = memory_uri(), {"ema": Average(7.0), "n": 7}
    hf.save(place, {name: Average(1.0), "n": 1})
    hf.load(place, live, **choice)
    state = live["ema"].state
    values = state["decay"], state["shadow"]["a"][0], *state["shadow"]["b"]
    assert [float(value) for value in values] == [1.0 if key in loaded else 7.0 for key in "dabc"]


def test_a_part_of_a_metric_and_of_a_scheduler_is_loaded():
    """The learning rate that the script gives now counts, and not the stored one; a metric keeps one of its sums."""
    import torchmetrics

    def make(rate, updates):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
        metric = torchmetrics.MeanMetric()
        metric.update(torch.full((updates,), rate))
        return {"scheduler": lr_scheduler.StepLR(optimizer, 2), "mean": metric}

    place, saved, live = memory_uri(), make(0.5, 2), make(0.1, 4)
    saved["scheduler"].last_epoch = 3
    hf.save(place, saved)
    hf.load(place, live, skip=["scheduler/base_lrs", "mean//weight"])
    assert (live["scheduler"].last_epoch, live["scheduler"].base_lrs) == (3, [0.1])
    assert (live["mean"].mean_value, live["mean"].weight) == (0.5 * 2, 4)


def test_what_an_object_cannot_have_in_part_is_refused():
    """Names within an object, parts of a list or of an optimizer that loads its state itself: never without effect."""
    place = memory_uri()
    hf.save(place, {"ema": Average(1.0), "kept": [torch.ones(1), torch.ones(2)]})
    for choice in ({"only": "kept/0"}, {"skip": "kept/1"}):
        with pytest.raises(hf.StateMismatchError, match="kept: only= or skip= takes a part of a list"):
            hf.load(place, {"ema": Average(), "kept": []}, **choice)
    with pytest.raises(hf.StateMismatchError, match="ema/shadow/a: rename gives it another name within a Average"):
        hf.load(place, {"ema": Average(), "kept": []}, rename={"ema/shadow/*": "ema/average/*"})

    def with_optimizer(rate, hook):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        if hook:
            optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "extra": 1})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    hf.save(place, with_optimizer(0.1, hook=False), overwrite=True)
    live = with_optimizer(0.5, hook=True)
    with pytest.raises(hf.StateMismatchError, match=r"optimizer: only= or skip= takes a part of a SGD"):
        hf.load(place, live, skip="optimizer/param_groups")
    hf.load(place, live, skip="optimizer")
    hf.save(place, with_optimizer(0.1, hook=True), overwrite=True)
    hf.load(place, live, skip="optimizer/param_groups")
    assert live["optimizer"].param_groups[0]["lr"] == 0.5


def test_state_dict_saved_in_place_of_an_object():
    """What was saved as ``scheduler.state_dict()`` or ``model.state_dict()`` loads into the objects themselves."""
    model, own = net(0), Own()
    own.best = 3
    place = memory_uri()
    hf.save(place, {"model": model.state_dict(), "own": own.state_dict()})
    other, again = net(1), Own()
    hf.load(place, {"model": other, "own": again})
    assert_same(other.state_dict(), model.state_dict())
    assert again.best == 3


class Shaped:
    """Keeps what its tensors are like in the attribute ``_metadata`` of its ``state_dict``, as a TensorDict does."""

    def __init__(self, **tensors):
        self.tensors, self.batch_size = tensors, torch.Size([3]) if tensors else None

    def state_dict(self):
        inner = OrderedDict(self.tensors)
        inner._metadata = OrderedDict({"": {"batch_size": self.batch_size, "device": None}})
        return {"storage": inner}

    def load_state_dict(self, state):
        self.tensors = dict(state["storage"])
        self.batch_size = state["storage"]._metadata[""]["batch_size"]


@pytest.mark.parametrize("load", [lambda place: hf.load(place, {"buffer": Shaped()}), hf.load], ids=["into", "bare"])
def test_metadata_of_the_state_of_an_object(load):
    """What an object writes beside its entries, in the attribute that torch has for it, comes back there."""
    place = memory_uri()
    hf.save(place, {"buffer": Shaped(x=torch.arange(3.0))})
    loaded = load(place)["buffer"]
    if not isinstance(loaded, Shaped):
        state, loaded = loaded, Shaped()
        loaded.load_state_dict(state)
    assert loaded.batch_size == torch.Size([3])
    assert_same(loaded.tensors, {"x": torch.arange(3.0)})


def test_an_object_and_a_metric_are_not_each_other():
    """What a metric stored is no state for an object with ``load_state_dict``, nor the other way round."""
    torchmetrics = pytest.importorskip("torchmetrics")
    place = memory_uri()
    hf.save(place, {"metric": torchmetrics.MeanMetric(), "own": Own()})
    with pytest.raises(hf.StateMismatchError, match="metric: Own in the state"):
        hf.load(place, {"metric": Own()}, only="metric")
    with pytest.raises(hf.StateMismatchError, match="own: MeanMetric in the state"):
        hf.load(place, {"own": torchmetrics.MeanMetric()}, only="own")


def test_object_loads_into_its_state_dict_in_place():
    """The habit of giving ``model.state_dict()`` to load fills the model's own tensors."""
    model, other = net(0), net(1)
    place = memory_uri()
    hf.save(place, {"model": model})
    hf.load(place, {"model": other.state_dict()})
    assert_same(other.state_dict(), model.state_dict())


def metrics():
    import torchmetrics

    return {
        "mean": torchmetrics.MeanMetric(),
        "list": torchmetrics.CatMetric(),
        "accuracy": torchmetrics.classification.MulticlassAccuracy(3),
        "minmax": torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
        "collection": torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.classification.MulticlassPrecision(3),
                "recall": torchmetrics.classification.MulticlassRecall(3),
                "mse": torchmetrics.MeanSquaredError(),
            }
        ),
    }


def update(state, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(0, 3, (20,), generator=generator) for _ in range(2))
    state["mean"].update(left.float())
    state["list"].update(right.float())
    state["accuracy"].update(left, right)
    state["minmax"].update(left.float())
    state["minmax"].compute()
    state["collection"].update(left, right)


def results(state):
    return {name: metric.compute() for name, metric in state.items()}


@pytest.mark.parametrize("used", [False, True], ids=["into new ones", "into used ones"])
def test_torchmetrics(used):
    """Metrics, wrapped ones and collections (whose state_dict is empty) go on counting where they were."""
    state, other = metrics(), metrics()
    update(state, 1)
    update(state, 2)
    if used:
        update(other, 7)
        results(other)
    place = memory_uri()
    hf.save(place, state)
    hf.load(place, other)
    assert_same(results(other), results(state))
    update(state, 3)
    update(other, 3)
    assert_same(results(other), results(state))


class Extra(nn.Linear):
    """A module with extra state, whose size changes."""

    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize(
    "extra", [{"scale": torch.ones(2), "n": [1, (2,)]}, torch.arange(5, dtype=torch.uint8), "text", None]
)
def test_extra_state(extra):
    """Extra state of a submodule goes through set_extra_state, of whatever type and size it is."""
    model = nn.Sequential(Extra(2, 2), nn.Linear(2, 2))
    model[0].extra = extra
    place = memory_uri()
    hf.save(place, {"model": model})
    other = nn.Sequential(Extra(2, 2), nn.Linear(2, 2))
    other[0].extra = torch.zeros(1, dtype=torch.uint8)
    weight = other[0].weight
    hf.load(place, {"model": other})
    assert_same(other[0].extra, extra)
    assert other[0].weight is weight
    assert torch.equal(weight, model[0].weight)


def test_lazy_module_is_refused_with_advice():
    """A lazy module that has seen no data is refused at save time, by its full path."""
    place = memory_uri()
    with pytest.raises(hf.UnsupportedStateError, match=r"state\['model'\].*'0.weight'\].*run one batch"):
        hf.save(place, {"model": nn.Sequential(nn.LazyLinear(3))})


def test_buffers_that_are_not_persistent_stay_out():
    """A non-persistent buffer is neither stored nor asked for."""
    module = nn.Linear(2, 2)
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("cache", torch.ones(1), persistent=False)
    place = memory_uri()
    hf.save(place, {"model": module})
    assert set(hf.load(place)["model"]) == {"weight", "bias", "kept"}
    hf.load(place, {"model": module})


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
def test_parametrized_modules(wrap):
    """Parametrized weights come back as their parts and give the same output."""
    torch.manual_seed(0)
    module, other = wrap(nn.Linear(3, 3)), wrap(nn.Linear(3, 3))
    place = memory_uri()
    hf.save(place, {"model": module})
    hf.load(place, {"model": other})
    assert_same(other.state_dict(), module.state_dict())
    probe = torch.randn(2, 3)
    assert torch.equal(module.eval()(probe), other.eval()(probe))


def test_module_with_its_own_load_state_dict():
    """A module that overrides load_state_dict, with the bare signature, is loaded through it."""

    class Picky(nn.Linear):
        calls = 0

        def load_state_dict(self, state_dict):
            Picky.calls += 1
            super().load_state_dict(OrderedDict(state_dict))

    module, other = Picky(2, 2), Picky(2, 2)
    place = memory_uri()
    hf.save(place, {"model": module})
    hf.load(place, {"model": other})
    assert Picky.calls == 1
    assert torch.equal(other.weight, module.weight)


def test_hooks_after_a_load_run():
    """What a module registered to happen after load_state_dict happens after a load in place, too."""
    module = net(0)
    seen = []
    module[0].register_load_state_dict_post_hook(lambda one, keys: seen.append((one, keys.missing_keys)))
    place = memory_uri()
    hf.save(place, {"model": module})
    hf.load(place, {"model": module})
    assert seen == [(module[0], [])]


class Packed(nn.Linear):
    """Computes with a copy of its weight."""

    def __init__(self):
        super().__init__(3, 3)
        self.pack(self.weight)

    def pack(self, weight):
        self.packed = weight.detach().clone()

    def forward(self, x):
        return nn.functional.linear(x, self.packed, self.bias)


class PackedByMethod(Packed):
    """Makes the copy in the method that torch calls for each layer."""

    _version = 2

    def _load_from_state_dict(self, given, prefix, versions, *rest):
        if versions.get("version", 1) < 2:
            given[prefix + "weight"] = given[prefix + "weight"] * 2  # what a file of long ago would need
        super()._load_from_state_dict(given, prefix, versions, *rest)
        self.pack(self.weight)


class PackedByHook(Packed):
    """Makes the copy in a hook before the load."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda one, given, prefix, *_: one.pack(given[prefix + "weight"]))


@pytest.mark.parametrize("kind", [PackedByMethod, PackedByHook])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_make_something_of_what_they_load(kind, device):
    """They compute with what was loaded, as after ``load_state_dict``; tensors stay the same objects."""
    state = {"model": nn.Sequential(kind(), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()}
    with torch.device(device):
        other = nn.Sequential(kind(), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    weight, probe = other[0].weight, torch.randn(2, 3)
    place = memory_uri()
    hf.save(place, state)
    hf.load(place, {"model": other})
    assert_same(other.state_dict(), state["model"].state_dict())
    assert torch.equal(other[0].packed, state["model"][0].weight)
    assert torch.equal(other(probe), state["model"](probe))
    assert other[0].weight is weight


class Book(nn.Module):
    """Has a buffer of any size; ``by_hook`` takes the stored size by a hook."""

    def __init__(self, *, by_hook):
        super().__init__()
        self.register_buffer("codes", torch.zeros(0))
        self.weight = nn.Parameter(torch.zeros(1))
        self.by_hook = by_hook
        if by_hook:
            self.register_load_state_dict_pre_hook(lambda one, given, prefix, *_: one.take(given, prefix))

    def take(self, given, prefix):
        self.codes = torch.empty_like(given[prefix + "codes"])

    def _load_from_state_dict(self, given, prefix, *rest):
        if not self.by_hook:
            self.take(given, prefix)
        super()._load_from_state_dict(given, prefix, *rest)


def quantized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(model.train())


def resizing(name):
    """Make a model, and change the shapes in its state."""
    if name == "observers":
        return quantized, lambda model: model(torch.randn(2, 4))
    if name == "lazy":
        return lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), lambda model: model(torch.ones(2, 4))

    def grow(model):
        model[0].codes = torch.arange(3.0)

    return lambda: nn.Sequential(Book(by_hook=name == "hook"), nn.Linear(2, 2)), grow


@pytest.mark.parametrize("name", ["observers", "lazy", "method", "hook"])
@pytest.mark.filterwarnings("ignore:.*(torch.ao|Lazy|reduce_range|observer).*")
def test_modules_that_resize_themselves_when_they_load(name):
    """Observers, lazy layers and code books take the stored shapes, as they do in torch."""
    make, grow = resizing(name)
    model, other = make(), make()
    grow(model)
    place = memory_uri()
    hf.save(place, {"model": model})
    parameters = list(other.parameters())
    hf.load(place, {"model": other})
    assert_same(other.state_dict(), model.state_dict())
    assert all(mine is now for mine, now in zip(parameters, other.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*Lazy.*")
def test_a_lazy_module_without_shapes_is_refused_where_these_are_needed():
    """What its optimizer keeps needs them; an entry that the checkpoint lacks is missing, as any other."""
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    place = memory_uri()
    hf.save(place, {"model": model, "optimizer": optimizer})
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))
    again = torch.optim.SGD(lazy.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(hf.StateMismatchError, match=r"state/model/0.weight: a lazy module .* run one batch") as caught:
        hf.load(place, {"model": lazy, "optimizer": again})
    assert "missing: model/1.weight" in caught.value.problems


def test_a_part_that_loads_by_itself_and_does_not_resize_is_refused_as_any_other():
    """Code for loading that leaves shapes alone: a mismatch that lists everything, before anything is changed."""
    place = memory_uri()
    hf.save(place, {"model": nn.ModuleDict({"a": PackedByMethod(), "b": nn.BatchNorm1d(3), "c": nn.Linear(2, 2)})})
    live = nn.ModuleDict({"a": PackedByMethod(), "b": nn.BatchNorm1d(4), "c": nn.Linear(2, 2)})
    live["a"].weight = nn.Parameter(torch.zeros(5, 3))
    before = live["c"].weight.detach().clone()
    with pytest.raises(hf.StateMismatchError) as caught:
        hf.load(place, {"model": live})
    assert {problem.split(": ")[1] for problem in caught.value.problems} == {
        f"model/{key}" for key in ("a.weight", "b.weight", "b.bias", "b.running_mean", "b.running_var")
    }
    assert torch.equal(live["c"].weight, before)


def test_a_layer_that_loads_by_itself_beside_names_that_nobody_loads():
    """A state_dict that names a tensor twice: torch says that nothing loads the second name, and the load is whole."""

    def made():
        model = nn.Sequential(PackedByMethod(), nn.Linear(3, 2))
        model._register_state_dict_hook(lambda one, found, *_: found.update({"again": found["1.weight"]}))
        return model

    model, other = made(), made()
    place = memory_uri()
    hf.save(place, {"model": model})
    hf.load(place, {"model": other})
    assert_same(other.state_dict(), model.state_dict())
    assert torch.equal(other[0].packed, model[0].weight)


def test_module_on_the_meta_device_is_materialised():
    """A model without memory gets its tensors from the checkpoint."""
    model = net(0)
    with torch.device("meta"):
        other = net(1)
    place = memory_uri()
    hf.save(place, {"model": model})
    hf.load(place, {"model": other})
    assert_same(other.state_dict(), model.state_dict())


def test_a_metric_takes_no_state_that_it_does_not_have():
    """A name that is a method or an attribute of Python is left alone, and listed: a checkpoint may name anything."""
    import torchmetrics

    metric = torchmetrics.MeanMetric()
    hostile = {
        "": {"compute": torch.ones(1), "__class__": torch.ones(1), "_computed": torch.ones(1), "_update_count": 3}
    }
    problems = restore_metric(metric, hostile)
    assert [line.partition("state ")[2] for line in problems] == ["'compute' now", "'__class__' now", "'_computed' now"]
    assert (type(metric), callable(metric.compute), metric._update_count) == (torchmetrics.MeanMetric, True, 3)


def scripted_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(2, 4))])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_comes_back_also_into_a_plain_one(make, tmp_path) -> None:
    """Weights and optimizer state of a scripted or traced module; names are those of the module it was made of."""
    model = make(scripted_net())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    hf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    for other in (make(scripted_net()), scripted_net()):
        into = torch.optim.AdamW(other.parameters())
        hf.load(tmp_path / "one", {"model": other, "optimizer": into})
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)
        first, second = (next(iter(one.state.values()))["exp_avg"] for one in (optimizer, into))
        assert torch.equal(first, second)
