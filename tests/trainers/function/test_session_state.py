"""`report(state=...)` and dictionaries: parts through a real writer process, committed by a scripted controller."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from session_kit import START_ID, Pair, begin

import holdfast as hf
from holdfast.errors import ConfigError, SessionError, StorageFullError, UnsupportedStateError
from holdfast.storage import LocalStorage
from holdfast.trainers.function.transit import describe_location, unpack_checkpoint
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import PartsJob


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


class Committer:
    """A controller's script that lets ranks store their parts and commits when all of them are durable."""

    def __init__(self, root: Path, world_size: int = 1, *, decide: Any = None) -> None:
        self.storage = LocalStorage(root)
        self.world_size, self.decide = world_size, decide
        self.client = WriterClient.start(self.storage)
        self.lock = threading.Lock()
        self.durable: dict[int, list[Any]] = {}
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.newest: dict[str, Any] | None = None

    def __enter__(self) -> Committer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def go(self, index: int) -> dict[str, Any]:
        return {
            "directory": f"checkpoint_{index:06d}",
            "save_id": f"{START_ID}-{index:x}",
            "manifest": {"run_id": "run", "checkpoint_id": f"id-{index}", "attempt": 1, "step": index,
                         "world_size": self.world_size},
        }  # fmt: skip

    def __call__(self, controller, header):
        with self.lock:
            self.told.append((controller.rank, header))
            if header["on"] == "report":
                found = self.decide(controller, header) if self.decide is not None else None
                controller.answer(header["call"], **(found or {"go": self.go(header["index"])}))
            elif header["on"] == "part" and "error" not in header:
                ready = self.durable.setdefault(header["index"], [])
                ready.append(controller)
                if len(ready) == self.world_size:
                    self._commit(header["index"], ready)
            elif header["on"] == "ask":
                controller.answer(header["call"], checkpoint=self.newest)

    def _commit(self, index, ready):
        go = self.go(index)
        job = PartsJob(**go, writers=tuple(sorted(one.rank for one in ready)), run=False)
        self.client.commit_parts(self.storage, job).result(20)
        self.newest = describe_location(self.storage, go["directory"])
        for controller in ready:
            controller.committed(index)


def pair_of(root, script, rank=0, world_size=1, **fields):
    told = {"memory": fields.pop("memory", None)}
    pair = Pair(begin(root, rank, world_size, **fields), script, **told)
    pair.controller.rank = rank
    return pair


def make_state(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed}


def copy_of(state):
    return {name: value.clone() for name, value in state["model"].state_dict().items()}


def assert_loads(path, weights, epoch):
    into = make_state(99)
    loaded = hf.load(path, into)
    assert loaded["epoch"] == epoch
    for name, value in into["model"].state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert hf.Checkpoint(path).verify().ok


def test_a_state_is_stored_by_all_ranks_together(root):
    """Two ranks report; each stores its part and says so, and the whole state loads again."""
    state = make_state(3)
    weights = copy_of(state)
    with Committer(root, 2) as script, pair_of(root, script, 0, 2) as zero, pair_of(root, script, 1, 2) as one:
        for pair in (zero, one):
            pair.session.report({"loss": 0.5}, state=state)
        for pair in (zero, one):
            pair.session.drain()
        heard = {rank: [header["on"] for who, header in script.told if who == rank] for rank in (0, 1)}
        for rank in (0, 1):
            assert heard[rank][0] == "report"
            assert sorted(heard[rank][1:]) == ["part", "sealed"]
        report = zero.controller.headers("report")[0]
        assert (report["kind"], report["index"], report["metrics"]) == ("state", 1, {"loss": 0.5})
        assert one.controller.headers("report")[0]["metrics"] is None
    assert_loads(root / "checkpoint_000001", weights, 3)
    writers = {entry.writer for entry in hf.Checkpoint(root / "checkpoint_000001").manifest.files}
    assert writers == {0, 1}


def test_the_state_may_change_when_report_returns(root):
    """Training goes on while the writer works; each checkpoint holds its own moment."""
    state = make_state(0)
    moments = []
    with Committer(root) as script, pair_of(root, script) as pair:
        for number in range(4):
            state["epoch"] = number
            moments.append(copy_of(state))
            hf.report({"n": number}, state=state)
            with torch.no_grad():
                for parameter in state["model"].parameters():
                    parameter.add_(1.0)
        pair.session.drain()
    for number, weights in enumerate(moments):
        assert_loads(root / f"checkpoint_{number + 1:06d}", weights, number)


def test_layers_that_train_again_and_buffers_that_nobody_saves_are_named(root, caplog):
    """The second state that a life reports says so, as a `Checkpointer` does after the first step."""

    def live(numbers, *, trains, **fields):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model[0].requires_grad_(trains)
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
        with Committer(root) as script, pair_of(root, script, first_index=numbers[0], **fields) as pair:
            if (checkpoint := hf.get_checkpoint()) is not None:
                checkpoint.load(into=state)
            for number in numbers:
                model(torch.ones(4, 2)).sum().backward()
                state["optimizer"].step()
                model.seen += 1
                hf.report({"n": number}, state=state)
            pair.session.drain()
            return script.newest

    newest = live([1, 2], trains=False)
    assert caplog.text.count("the first step has changed model/seen: registered with persistent=False") == 1
    assert "train now" not in caplog.text
    live([3, 4, 5], trains=True, checkpoint=newest)
    assert caplog.text.count("2 parameters train now and did not when this checkpoint was saved (model/0.weight") == 1
    assert "optimizer state begins anew" in caplog.text


def test_metrics_go_on_while_a_state_is_being_stored(root):
    """A report with a state waits for no commit."""
    held = threading.Event()

    class Slow(Committer):
        def _commit(self, index, ready):
            assert held.wait(20)
            super()._commit(index, ready)

    with Slow(root) as script, pair_of(root, script) as pair:
        hf.report({"n": 1}, state={"a": torch.ones(3)})
        for number in range(2, 50):
            hf.report({"n": number})
        held.set()
        pair.session.drain()
        rows = pair.controller.wait(lambda _: len(pair.controller.rows()) == 49 and pair.controller.rows())
        assert [number for number, _ in rows] == list(range(1, 50))
    assert hf.load(root / "checkpoint_000001")["a"].tolist() == [1, 1, 1]


def test_a_state_that_cannot_be_saved_raises_at_the_call(root):
    """The controller hears of it too: the others' parts are in vain. Afterwards reports go on."""
    with Committer(root) as script, pair_of(root, script) as pair:
        with pytest.raises(UnsupportedStateError, match="generator"):
            hf.report({}, state={"bad": (number for number in range(3))})
        part = pair.controller.wait(lambda _: pair.controller.headers("part"))[0]
        assert part["error"]["type"] == "UnsupportedStateError"
        hf.report({}, state={"fine": 1})
        pair.session.drain()
    assert hf.load(root / "checkpoint_000002") == {"fine": 1}


def test_a_part_that_fails_in_the_background_surfaces(root):
    """The writer finds the place taken by a file: this rank's next call raises it, and the controller is told."""
    (root / "checkpoint_000001").write_text("in the way")
    with Committer(root) as script, pair_of(root, script) as pair:
        hf.report({}, state={"a": torch.ones(3)})
        with pytest.raises(OSError, match="checkpoint_000001"):
            pair.session.drain()
        assert "error" in pair.controller.wait(lambda _: pair.controller.headers("part"))[0]


def test_trouble_of_another_rank_surfaces(root):
    """Its part failed, so the checkpoint will never be."""

    def decide(controller, header):
        controller.trouble(StorageFullError("rank 1: no space"), index=header["index"])

    with Committer(root, 2, decide=decide) as script, pair_of(root, script, 0, 2) as pair:
        hf.report({}, state={"a": 1})
        with pytest.raises(StorageFullError, match="rank 1"):
            pair.session.drain()


def test_a_state_needs_a_storage_that_workers_reach():
    """What lives in the driver's memory is out of reach; nobody has been told of the report then."""
    with Pair(begin(None)) as pair, pytest.raises(ConfigError, match="lives in the memory of the driver"):
        hf.report({}, state={"a": 1})
    assert pair.controller.headers("report") == []


def test_a_report_inside_of_a_report(root):
    """A signal handler that reports a state in the middle of a copy is refused instead of tearing it."""

    class Nosy:
        def state_dict(self):
            if not caught:
                with pytest.raises(SessionError, match="in the middle of another") as found:
                    hf.report({}, state={"b": 2})
                caught.append(found)
            return {"a": 1}

        def load_state_dict(self, _):
            pass

    caught: list[Any] = []
    with Committer(root) as script, pair_of(root, script) as pair:
        hf.report({}, state={"nosy": Nosy()})
        pair.session.drain()
    assert caught


# -- dictionaries ---------------------------------------------------------------------------------------------------


def test_values_are_saved_by_rank_0_and_loaded_everywhere(root):
    """Ray 1.x style: every rank calls, rank 0's values are kept, and loading gives back just what came in."""
    values = {"epoch": 3, "model": {"weights": torch.arange(4.0)}, "name": "a"}
    with Committer(root) as script, pair_of(root, script, 1, 2) as one, pair_of(root, script, 0, 2) as zero:
        one.session.save_checkpoint(epoch=7)
        zero.session.save_checkpoint(**values)
        assert (root / "checkpoint_000001" / "manifest.json").exists()
        for pair in (zero, one):
            loaded = pair.session.load_checkpoint()
            assert loaded["model"]["weights"].tolist() == [0, 1, 2, 3]
            assert (loaded["epoch"], loaded["name"], len(loaded)) == (3, "a", 3)
        assert [header["on"] for who, header in script.told if who == 1] == ["count", "ask"]
        report = zero.controller.headers("report")[0]
        assert (report["kind"], report["index"]) == ("values", 1)
        assert report["metrics"] == {"_timestamp": report["score"]}
        assert report["score"] > 1e9


def test_a_uniform_prefix_of_wrapped_models_is_left_out(root):
    """As `Checkpoint.from_dict` does; what has it only in part keeps it."""
    wrapped = OrderedDict([("module.weight", torch.ones(2)), ("module.bias", torch.zeros(2))])
    mixed = {"module.a": torch.ones(1), "b": torch.ones(1)}
    with Committer(root) as script, pair_of(root, script):
        hf.save_checkpoint(model=wrapped, mixed=mixed)
        loaded = hf.load_checkpoint()
        assert list(loaded["model"]) == ["weight", "bias"]
        assert type(loaded["model"]) is OrderedDict
        assert sorted(loaded["mixed"]) == ["b", "module.a"]


def test_the_score_comes_from_the_values(root):
    """Missing or no number: an error at the call on rank 0; it counts, as it does on the other ranks."""
    strategy = {"num_to_keep": 2, "attribute": "acc", "order": "max"}
    with Committer(root) as script, pair_of(root, script, strategy=strategy) as pair:
        hf.save_checkpoint(acc=torch.tensor(0.5), epoch=1)
        report = pair.controller.headers("report")[0]
        assert report["score"] == 0.5
        assert report["metrics"]["acc"] == 0.5
        with pytest.raises(ValueError, match="got no 'acc'"):
            hf.save_checkpoint(epoch=2)
        with pytest.raises(ValueError, match="has to be a number"):
            hf.save_checkpoint(acc="good")
        assert len(pair.controller.headers("report")) == 1
        assert [one["upto"] for one in pair.controller.wait(lambda _: pair.controller.headers("count")[1:])] == [3]
    with Committer(root) as script, pair_of(root, script, 1, 2, strategy=strategy) as pair:
        pair.session.save_checkpoint(epoch=2)
    config = {"attribute": "acc", "order": "max"}
    with Committer(root) as script, pair_of(root, script, first_index=5, score=config) as pair:
        hf.save_checkpoint(epoch=2)
        assert pair.controller.headers("report")[0]["score"] is None


def test_values_that_are_not_worth_writing(root):
    """They travel to the driver's memory, where recovery finds them; nothing is written."""
    strategy = {"num_to_keep": 0, "attribute": "_timestamp", "order": "max"}

    def decide(*_):
        return {"memory": True}

    with Committer(root, decide=decide) as script, pair_of(root, script, strategy=strategy) as pair:
        hf.save_checkpoint(epoch=3, weights=torch.arange(3.0))
        pair.controller.wait(lambda _: pair.controller.headers("memory"))
        (packed,) = pair.controller.heard[-1].attachments
        pair.session.drain()
    assert list(root.iterdir()) == []
    found = unpack_checkpoint(packed).to_dict()
    assert found["epoch"] == 3
    assert found["weights"].tolist() == [0, 1, 2]
    with pair_of(root, lambda *_: None, memory=packed):
        assert hf.load_checkpoint()["epoch"] == 3
        assert hf.get_checkpoint().keys() == ["epoch", "weights"]


def test_values_in_memory_are_found_while_the_run_goes_on(root):
    """The controller sends them with its answer."""
    sent = {}

    def script(controller, header):
        if header["on"] == "report":
            controller.answer(header["call"], memory=True)
        elif header["on"] == "memory":
            sent["values"] = controller.heard[-1].attachments[0]
        elif header["on"] == "ask":
            told = {"do": "answer", "call": header["call"], "value": {"checkpoint": None, "memory": True}}
            controller.send(told, sent["values"])

    with Pair(begin(root), script):
        hf.save_checkpoint(epoch=3)
        assert hf.load_checkpoint() == {"epoch": 3}


def test_values_that_the_controller_skips(root):
    """Nothing is sent."""
    with Committer(root, decide=lambda *_: {"skip": True}) as script, pair_of(root, script) as pair:
        hf.save_checkpoint(epoch=3)
        pair.session.drain()
        assert pair.controller.headers("memory") == []


def test_values_that_cannot_be_saved(root):
    """The call raises on disk and in memory alike."""
    with Committer(root) as script, pair_of(root, script) as pair:
        with pytest.raises(UnsupportedStateError):
            hf.save_checkpoint(bad=object())
        pair.controller.wait(lambda _: pair.controller.headers("part"))
    with Committer(root, decide=lambda *_: {"memory": True}) as script, pair_of(root, script) as pair:
        with pytest.raises(UnsupportedStateError):
            hf.save_checkpoint(bad=object())
        pair.controller.wait(lambda _: pair.controller.headers("part"))


def test_a_directory_is_no_dictionary(root):
    """The error says how to open it."""
    path = root / "checkpoint_000000"
    path.mkdir()
    (path / "model.pt").write_bytes(b"weights")
    where = describe_location(LocalStorage(root), "checkpoint_000000")
    with pair_of(root, lambda *_: None, checkpoint=where), pytest.raises(ConfigError, match="as_directory"):
        hf.load_checkpoint()
