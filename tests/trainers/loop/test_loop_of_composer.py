"""What Composer has saved loads here: weights, and the whole training where it has a place."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer_files import composer_state, full_file
from loop_kit import loader, names, network, plain

import holdfast as hf
from holdfast.core import EMA, Callback


def trained(**more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model after some steps, and what Composer would save of it after 8 batches of 6, 2 of them in epoch 1."""
    torch.manual_seed(4)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
    return model, optimizer, composer_state(model, optimizer, epoch=1, batch=8, in_epoch=2, batch_size=6, **more)


def resumed(path: Path | None, **options: Any) -> hf.Trainer:
    torch.manual_seed(99)
    model = network()
    return plain(
        options.pop("save_folder", None), model=model, optimizers=torch.optim.AdamW(model.parameters(), lr=0.5),
        load_path=path, **{"max_duration": "2ep", **options},
    )  # fmt: skip


def test_a_full_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, optimizer, progress, seed and generators come back; training goes on where it was."""
    random.seed(3)
    np.random.seed(3)
    model, optimizer, content = trained()
    path = full_file(tmp_path / "ep1-ba8-rank0.pt", content)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(8)
    np.random.seed(8)
    seen: list[Any] = []

    class Look(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            seen.append(int(state.timestamp.batch))

        def batch_end(self, state: Any, logger: Any) -> None:
            seen.append(int(state.timestamp.batch_in_epoch))

    trainer = resumed(path, callbacks=Look())
    assert "NOT restored" not in capsys.readouterr().err
    for name, value in model.state_dict().items():
        assert torch.equal(trainer.state.model.state_dict()[name], value), name
    live = trainer.state.optimizers[0]
    assert live.param_groups[0]["lr"] == 0.02
    for mine, theirs in zip(live.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(live.state[mine][key], value), key
    stamp = trainer.state.timestamp
    assert [int(stamp.count(name)) for name in ("epoch", "batch", "batch_in_epoch", "sample")] == [1, 8, 2, 48]
    assert stamp.total_wct.total_seconds() == 12.5
    assert trainer.state.rank_zero_seed == 17
    trainer._go_on()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    trainer.fit()
    assert seen == [8, 3, 4, 5, 6]
    assert trainer.state.timestamp.epoch == 2


def test_weights_alone(tmp_path: Path) -> None:
    """The weights of a full file, and of one that holds nothing else."""
    model, _, content = trained()
    full = full_file(tmp_path / "full.pt", content)
    state = {name: content["state"][name] for name in ("model", "metadata", "integrations")}
    weights = full_file(tmp_path / "weights.pt", {"state": state})
    for path, options in ((full, {"load_weights_only": True}), (weights, {})):
        trainer = resumed(path, **options)
        assert int(trainer.state.timestamp.batch) == 0
        assert torch.equal(trainer.state.model.state_dict()["4.weight"], model.state_dict()["4.weight"])


def test_metrics_and_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchmetrics, schedulers and EMA: in the file the model has the average, and the algorithm has the weights."""
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    metric.update(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 0]))
    metric.persistent(mode=True)
    saved = {"state_dict": metric.state_dict(), "_computed": None}
    model, optimizer, _ = trained()
    average = {name: one.detach() + 1 for name, one in model.named_parameters()}
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    kept = {
        "named_parameters_dict": {n: p.detach() for n, p in model.named_parameters()},
        "named_buffers_dict": buffers,
    }
    ema = {"repr": "EMA()", "ema_model": kept, "ema_weights_active": True, "ema_started": True}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _, _, content = trained(
        train_metrics={"acc": saved}, eval_metrics={"eval": {"acc": saved}},
        schedulers={"StepLR": schedule.state_dict()},
        algorithms=[("EMA", ema), ("LabelSmoothing", {"repr": "LabelSmoothing()"})],
        model={**model.state_dict(), **average},
    )  # fmt: skip
    path = full_file(tmp_path / "rich.pt", content)
    torch.manual_seed(99)
    mine = network()
    own = torch.optim.AdamW(mine.parameters())
    trainer = plain(
        None, model=mine, optimizers=own, schedulers=torch.optim.lr_scheduler.StepLR(own, 3, 0.1), load_path=path,
        algorithms=EMA(smoothing=0.9), train_metrics={"acc": metric.clone()}, eval_metrics={"acc": metric.clone()},
        eval_dataloader=loader(6),
    )  # fmt: skip
    assert trainer.state.train_metrics["acc"].compute() == metric.compute()
    assert trainer.state.eval_metrics["eval"]["acc"].compute() == metric.compute()
    for name, one in model.named_parameters():
        assert torch.equal(dict(mine.named_parameters())[name], one), name
        assert torch.equal(trainer.state.algorithms[0].average[name], average[name]), name
    assert trainer.state.schedulers[0].step_size == 1
    assert "NOT restored" not in capsys.readouterr().err.replace("NOT restored  state/eval_metrics/eval/loss", "")


class Trap:
    """Runs when it is unpickled in the ordinary way."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


def test_objects_are_never_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object of a class, as old versions saved: refused by name, or left out where nobody wants it."""
    _, _, content = trained(callbacks={"Odd": {"kept": Trap()}})
    path = full_file(tmp_path / "odd.pt", content)
    with pytest.raises(hf.ConfigError, match=r"state/callbacks/Odd/kept \(builtins.exec\): load_ignore_keys"):
        resumed(path)
    assert int(resumed(path, load_ignore_keys=["state/callbacks/*"]).state.timestamp.batch) == 8
    assert int(resumed(path, load_weights_only=True).state.timestamp.batch) == 0
    changed = resumed(path, load_ignore_keys=lambda found: found["state"].pop("callbacks"))
    assert int(changed.state.timestamp.batch) == 8
    _, _, content = trained(model={"4.weight": Trap()})
    with pytest.raises(hf.ConfigError, match=r"state/model/4.weight"):
        resumed(full_file(tmp_path / "worse.pt", content), load_weights_only=True)


class Version(str):
    """A version of torch that a crafted file makes of something else than text."""

    def __reduce__(self) -> Any:
        return torch.torch_version.TorchVersion, ([[1] * 3] * 3,)


def test_a_version_is_text_alone(tmp_path: Path) -> None:
    """The text of a crafted value could be endless: a version is made of text and of nothing else."""
    _, _, content = trained(run_name=Version("x"))
    with pytest.raises(hf.ConfigError, match="pickled objects"):
        resumed(full_file(tmp_path / "crafted.pt", content))


def test_a_position_in_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An iterable is gone through again to where it was; a data set that knows its position is asked."""

    class Batches:
        def __iter__(self) -> Any:
            for number in range(5):
                yield torch.full((6, 4), float(number)), torch.arange(6) % 3

    firsts: list[float] = []

    class Look(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            firsts.append(state.batch[0][0, 0].item())

    _, _, content = trained()
    path = full_file(tmp_path / "full.pt", content)
    resumed(path, train_dataloader=Batches(), callbacks=Look()).fit()
    assert firsts == [2, 3, 4]

    class Streaming(torch.utils.data.IterableDataset[Any]):
        begin = 0

        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
            return {"at": num_samples}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.begin = state["at"]

        def __iter__(self) -> Any:
            begin, self.begin = self.begin, 0
            for number in range(begin, 30):
                yield torch.full((4,), float(number)), number % 3

    firsts.clear()
    _, _, content = trained(dataset_state={"train": {"at": 12}, "eval": {}})
    path = full_file(tmp_path / "streamed.pt", content)
    data = torch.utils.data.DataLoader(Streaming(), batch_size=6)
    resumed(path, train_dataloader=data, callbacks=Look()).fit()
    assert firsts == [12, 18, 24]


def folder_of_composer(folder: Path, *, newest: int = 8) -> Path:
    """A save folder as Composer leaves it: two checkpoints, and its link to the newest."""
    folder.mkdir()
    model, optimizer, _ = trained()
    for batch in (newest - 2, newest):
        content = composer_state(model, optimizer, epoch=1, batch=batch, in_epoch=batch - 6, batch_size=6)
        full_file(folder / f"ep1-ba{batch}-rank0.pt", content)
    (folder / "latest-rank0.pt").symlink_to(f"ep1-ba{newest}-rank0.pt")
    return folder


COMPOSERS_NAMES = {"save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt", "save_latest_filename": "latest-rank{rank}.pt"}


def test_autoresume_in_a_folder_of_composer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest file of Composer is gone on from; its files stay whatever number is kept, also in the next life."""
    folder = folder_of_composer(tmp_path / "runs")
    options = {**COMPOSERS_NAMES, "autoresume": True, "save_num_checkpoints_to_keep": 1}
    with resumed(None, save_folder=folder, **options) as trainer:
        assert int(trainer.state.timestamp.batch) == 8
        trainer.fit()
    assert "resumed from" in capsys.readouterr().err
    assert names(folder) == ["ep1-ba6-rank0.pt", "ep1-ba8-rank0.pt", "ep2-ba12-rank0.pt"]
    assert os.readlink(folder / "latest-rank0.pt") == "ep2-ba12-rank0.pt"
    with resumed(None, save_folder=folder, max_duration="3ep", **options) as again:
        assert int(again.state.timestamp.batch) == 12
        again.fit()
    assert names(folder) == ["ep1-ba6-rank0.pt", "ep1-ba8-rank0.pt", "ep3-ba18-rank0.pt"]


def test_autoresume_past_a_torn_file_of_composer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A newest file that is cut short is set aside, by name, and the one before it is gone on from."""
    folder = folder_of_composer(tmp_path / "runs")
    os.truncate(folder / "ep1-ba8-rank0.pt", 3000)
    with resumed(None, save_folder=folder, **COMPOSERS_NAMES, autoresume=True) as trainer:
        assert int(trainer.state.timestamp.batch) == 6
    assert "set aside ep1-ba8-rank0.pt" in capsys.readouterr().err


def test_load_path_is_the_link_of_composer(tmp_path: Path) -> None:
    """Composer's link to its newest file loads, into the same folder too."""
    folder = folder_of_composer(tmp_path / "runs")
    with resumed(folder / "latest-rank0.pt", save_folder=folder, **COMPOSERS_NAMES) as trainer:
        assert int(trainer.state.timestamp.batch) == 8
        trainer.fit()
    assert (folder / "ep2-ba12-rank0.pt").exists()
