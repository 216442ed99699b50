"""What the tests of the loop trainer on several ranks run on each of them."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "kits"))

from loop_kit import Crash, CrashAt, Points, Seen, accuracy, everything, loader, plain, rich

import holdfast as hf
from holdfast.callbacks import Callback, CheckpointSaver, LoadCheckpoint
from holdfast.core import EMA, Event
from holdfast.loggers import JSONLLogger, RemoteUploaderDownloader


def told(trainer: hf.Trainer, seen: list[Seen]) -> dict[str, Any]:
    """What a training came to, as JSON."""
    sums: dict[str, float] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            sums[path] = value.double().sum().item()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")

    walk(everything(trainer), "")
    state = trainer.state
    return {
        "sums": sums,
        "rows": seen[0].rows if seen else [],
        "random": torch.rand(1).item(),
        "eval": {name: float(one) for name, one in state.eval_metric_values.get("eval", {}).items()},
        "train": {name: float(one) for name, one in state.train_metric_values.items()},
        "samples": int(state.timestamp.sample),
        "batch": int(state.timestamp.batch),
        "saved": [path.rsplit("/", 1)[-1] for path in trainer.saved_checkpoints],
        "rank": state.ranks.rank,
        "num_batches": state.num_batches,
    }


def train(folder: str, *, crash_at: int | None = None, suffix: str = "", **options: Any) -> dict[str, Any]:
    """A training with everything that has state, autoresumed; it may die after a batch."""
    seen: list[Seen] = []
    options = {"save_filename": "ep{epoch}-ba{batch}" + suffix, "save_latest_filename": "latest", **options}
    trainer = rich(folder, crash_at=crash_at, seen=seen, autoresume=True, seed=3, **options)
    crashed = False
    try:
        trainer.fit()
    except (Crash, hf.HoldfastError):  # the first rank to die may be gone before the other comes to it
        if crash_at is None:
            raise
        crashed = True
    found = told(trainer, seen)
    if not crashed:
        trainer.close()
    return {**found, "crashed": crashed}


class KillAt(Callback):
    """Kills ranks where they would begin a batch, after so many in all."""

    def __init__(self, ranks: dict[str, int], how: int = signal.SIGKILL) -> None:
        self.ranks, self.how = ranks, how

    def batch_start(self, state: Any, logger: Any) -> None:
        if self.ranks.get(str(state.ranks.rank)) == int(state.timestamp.batch):
            os.kill(os.getpid(), self.how)


def guarded(
    folder: str, bad: int | None = None, without: int | None = None, kill_at: dict[str, int] | None = None,
    kill_how: int = signal.SIGKILL, weights: str | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train an epoch of 20 batches under a guard: a sample of one of them is nan, or all of its samples are not there.

    Args:
        folder: of the run.
        bad: number of the batch with that sample.
        without: number of the batch that a twin never had.
        kill_at: ranks that are killed after so many batches.
        kill_how: by which signal.
        weights: how often weights alone are saved beside the rest.
        **options: of the trainer.
    """
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(7))
    y = torch.arange(240) % 3
    if bad is not None:
        x[12 * bad + 7] = float("nan")
    if without is not None:
        x, y = (torch.cat([one[: 12 * without], one[12 * without + 12 :]]) for one in (x, y))
    data = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
    callbacks: list[Callback] = [KillAt(kill_at or {}, kill_how)]
    if weights is not None:
        saver = CheckpointSaver(folder, "w{batch}", None, None, save_interval=weights, weights_only=True)
        callbacks.append(saver)
    options = {
        "train_dataloader": data, "max_duration": "1ep", "save_interval": "3ba", "autoresume": True,
        "save_num_checkpoints_to_keep": 1, "guard": hf.Guard(), "seed": 3, "callbacks": callbacks,
        **options,
    }  # fmt: skip
    trainer = plain(folder, **options)
    trainer.fit()
    trainer.close()
    state = trainer.state
    weights = [value for tensor in state.model.state_dict().values() for value in tensor.flatten().tolist()]
    counts = [int(state.timestamp.sample), int(state.timestamp.batch), int(state.timestamp.epoch)]
    return {"weights": weights, "counts": counts, "random": torch.rand(1).item()}


def wide(folder: str, crash_at: int | None = None, *, given: bool = False) -> dict[str, Any]:
    """A training in which the order of additions shows in the last bits; what its parameters came to."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randn(96, 64))
    trainer = plain(
        folder, model=DistributedDataParallel(model) if given else model, train_dataloader=DataLoader(data, 8),
        loss_fn=functional.mse_loss, optimizers=torch.optim.Adam(model.parameters(), lr=0.01), save_interval="1ba",
        autoresume=True, seed=3, callbacks=[] if crash_at is None else [CrashAt(crash_at)],
    )  # fmt: skip
    try:
        trainer.fit()
        trainer.close()
    except (Crash, hf.HoldfastError):  # the first rank to die may be gone before the other comes to it
        if crash_at is None:
            raise
    bits = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return {"digest": hashlib.sha256(bits).hexdigest(), "batch": int(trainer.state.timestamp.batch)}


def loads_by_function(folder: str, suffix: str) -> dict[str, Any]:
    """The generators and metrics a rank goes on with, loaded as they are and through a function."""
    train(folder, suffix=suffix, crash_at=5)
    found = []
    for ignore in (None, lambda found: None):
        path = f"{folder}/ep0-ba2{suffix}"
        trainer = rich(None, load_path=path, load_ignore_keys=ignore, save_metrics=True, seed=3)
        generators = trainer._generators
        assert generators is not None
        found.append([generators["torch"].tolist(), told(trainer, [])["sums"]])
        trainer.close()
    return {"plain": found[0], "by_function": found[1]}


class Die(Callback):
    """Something happens to one rank after a batch."""

    def __init__(self, rank: int, batch: int, how: str) -> None:
        self.rank, self.batch, self.how = rank, batch, how

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.ranks.rank == self.rank and int(state.timestamp.batch) == self.batch:
            if self.how == "raise":
                raise ValueError("something in a callback")
            os.kill(os.getpid(), getattr(signal, self.how))


def dies(folder: str, rank: int, batch: int, how: str, **options: Any) -> dict[str, Any]:
    """A training in which something happens to one rank; what each rank says of it."""
    seen: list[Seen] = []
    options = {"max_duration": "40ba", "save_interval": "3ba", **options}
    trainer = rich(folder, seen=seen, callbacks=[Die(rank, batch, how)], autoresume=True, seed=3, **options)
    try:
        trainer.fit()
    except SystemExit as left:
        return {"left": left.code, "batch": int(trainer.state.timestamp.batch)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return told(trainer, seen)


def by_the_clock(folder: str) -> dict[str, Any]:
    """Saves, evaluations and the end by the clock, with ranks of uneven speed between their steps."""
    pause = 0.001 * (1 + dist.get_rank())  # ranks that are not equally fast

    class Slow(Callback):
        evaluations = 0

        def batch_end(self, state: Any, logger: Any) -> None:
            time.sleep(pause)

        def eval_end(self, state: Any, logger: Any) -> None:
            self.evaluations += 1

    slow = Slow()
    trainer = plain(
        folder, max_duration="2sec", save_interval="0.25sec", eval_interval="0.3sec", callbacks=slow,
        eval_dataloader=loader(9, shuffle=False), save_filename="t{total_wct}-b{batch}", save_overwrite=True,
    )  # fmt: skip
    trainer.fit()
    state = trainer.state
    found = {
        "saved": [path.rsplit("/", 1)[-1] for path in trainer.saved_checkpoints],
        "clock": state.timestamp.total_wct.total_seconds(),
        "batch": int(state.timestamp.batch),
        "evaluations": slow.evaluations,
    }
    trainer.close()
    return found


def many_savers(root: str, again: bool = False, **options: Any) -> dict[str, Any]:
    """Two savers and an upload, loggers, and a checkpoint at any path."""
    lines = f"{root}/lines.jsonl"
    weights = CheckpointSaver(
        f"{root}/weights", "b{batch}.safetensors", save_interval="1ba", weights_only=True, latest_filename="newest",
        num_checkpoints_to_keep=2, remote_file_name=None, overwrite=True,
    )  # fmt: skip
    options = {"autoresume": again, **options}
    trainer = plain(
        f"{root}/full", save_filename="e{epoch}", save_num_checkpoints_to_keep=1, run_name="many",
        callbacks=weights, loggers=[JSONLLogger(lines), RemoteUploaderDownloader(f"{root}/bucket")],
        eval_dataloader=loader(9, shuffle=False), **options,
    )  # fmt: skip
    trainer.fit()
    path = trainer.save_checkpoint(f"{root}/one.pt")
    trainer.save_checkpoint(f"{root}/two")
    trainer.close()
    return {
        "saved": [one[len(root) + 1 :] for one in trainer.saved_checkpoints],
        "path": path[len(root) + 1 :],
        "batch": int(trainer.state.timestamp.batch),
    }


def refused(root: str) -> str:
    """A second training into the same folder, without autoresume."""
    try:
        plain(f"{root}/full", save_filename="e{epoch}", save_num_checkpoints_to_keep=1).fit()
    except hf.CheckpointExistsError as error:
        return str(error)
    return ""


def gathered_metrics() -> dict[str, Any]:
    """A torchmetrics metric, a function and a metric object of nobody's, over an uneven evaluation."""

    class Own:
        """The share of zeros, by itself."""

        def reset(self) -> None:
            self.zeros = self.all = 0

        def update(self, outputs: Any, targets: Any) -> None:
            self.zeros += int((targets == 0).sum())
            self.all += len(targets)

        def compute(self) -> float:
            return self.zeros / self.all if self.all else float("nan")

    import torchmetrics

    metrics = {
        "theirs": torchmetrics.classification.MulticlassAccuracy(3, average="micro"), "function": accuracy, "own": Own()
    }  # fmt: skip
    trainer = plain(eval_dataloader=loader(20, shuffle=False), eval_metrics=metrics)
    values = {name: float(one) for name, one in trainer.eval()["eval"].items()}
    trainer.close()
    return values


class Lines(IterableDataset[Any]):
    """Sentences of uneven length; rank r has every n-th of them."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for number in range(self.counts[rank % len(self.counts)]):
            length = 1 + (number * size + rank) % 3
            yield {"input_ids": torch.full((2, length), number), "labels": torch.zeros(2, dtype=torch.long)}


def tokens(counts: list[int]) -> dict[str, Any] | str:
    """Training on sentences, with counters of tokens."""

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(8, 3)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.table(batch["input_ids"]).mean(1)

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return functional.cross_entropy(outputs, batch["labels"])

    data: Any = DataLoader(Lines(counts), batch_size=None)
    trainer = plain(model=Words(), train_dataloader=data, loss_fn=None, max_duration="1ep")
    try:
        trainer.fit()
    except hf.ConfigError as error:
        return str(error)
    now = trainer.state.timestamp
    trainer.close()
    return {"tokens": int(now.token), "samples": int(now.sample), "batch": int(now.batch)}


def leaves_evaluation(folder: str, rank: int | None, *, at_end: bool = False) -> dict[str, Any]:
    """An evaluation after every batch, or at the end; a signal comes to a rank in that of the second one."""

    class Watch(Callback):
        evaluations = 0

        def eval_batch_start(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 2 and rank is not None:
                time.sleep(0.05)  # two hundred of these are longer than it takes the ranks to agree
            if int(state.timestamp.batch) == 2 and rank == state.ranks.rank:
                os.kill(os.getpid(), signal.SIGTERM)

        def eval_end(self, state: Any, logger: Any) -> None:
            self.evaluations += 1

        def state_dict(self) -> dict[str, Any]:
            return {"evaluations": self.evaluations}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.evaluations = state["evaluations"]

    watch = Watch()
    trainer = plain(
        folder, eval_dataloader=loader(200, batch_size=1, shuffle=False), max_duration="2ba" if at_end else "4ba",
        eval_interval=(lambda state, event: event is Event.FIT_END) if at_end else "1ba",
        callbacks=watch, save_interval="100ba", autoresume=True,
    )  # fmt: skip
    left = None
    try:
        trainer.fit()
    except SystemExit as error:
        left = error.code
    trainer.close()
    state = trainer.state
    return {
        "left": left,
        "stage": state.dataset_state.stage,
        "evaluations": watch.evaluations,
        "batch": int(state.timestamp.batch),
    }


def tells_ranks(config: dict[str, Any]) -> None:
    """A train function of the function trainer that uses the loop trainer."""
    trainer = plain(config["folder"])
    trainer.fit()
    trainer.close()
    hf.report({"world_size": trainer.state.ranks.world_size, "batch": int(trainer.state.timestamp.batch)})


def fails_to_save(folder: str, rank: int, kind: str) -> dict[str, Any]:
    """The copying of one rank's part of the save of batch 4 fails."""
    from holdfast import errors
    from holdfast.state.save.snapshot import Snapshotter

    submit = Snapshotter.submit

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == rank and args[3].manifest["step"] == 4:
            raise getattr(errors, kind)("no room here")
        return submit(self, *args, **options)

    Snapshotter.submit = failing  # type: ignore[method-assign]

    trainer = plain(folder, max_duration="12ba", save_interval="4ba", save_filename="b{batch}")
    error = None
    try:
        trainer.fit()
    except hf.HoldfastError as found:
        error = f"{type(found).__name__}: {found}"
    saved = [path.rsplit("/", 1)[-1] for path in trainer.saved_checkpoints]
    return {"error": error, "saved": saved, "batch": int(trainer.state.timestamp.batch)}


def one_life_after_another(root: str) -> dict[str, Any]:
    """A model wrapped by the user and data split by the user; a second `fit`, fine-tuning, damage, errors."""

    def make(folder: str | None, **options: Any) -> hf.Trainer:
        model = DistributedDataParallel(torch.nn.Linear(4, 3))
        options = {"save_filename": "b{batch}", "save_interval": "1ba", "algorithms": EMA(smoothing=0.5), **options}
        data = DataLoader(Points(), batch_size=6, sampler=DistributedSampler(Points()))
        return plain(folder, model=model, train_dataloader=data, **options)

    def weights(trainer: hf.Trainer) -> dict[str, float]:
        return {name: one.sum().item() for name, one in trainer.state.model.state_dict().items()}

    def refused(**options: Any) -> str:
        try:
            plain(None, **options)
        except hf.HoldfastError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    folder = f"{root}/life"
    trainer = make(folder, max_duration="1ep")
    trainer.fit()
    trainer.fit("1ep")
    trainer.close()
    found: dict[str, Any] = {"batch": int(trainer.state.timestamp.batch), "names": sorted(weights(trainer))}
    tuned = plain(None, load_path=f"{folder}/b6", load_weights_only=True)
    late = plain(None, callbacks=LoadCheckpoint(f"{folder}/b6", load_weights_only=True))
    found["tuned"] = [weights(tuned) == weights(trainer), weights(late) == weights(trainer)]
    if dist.get_rank() == 0:
        last = sorted(Path(folder, "b6").glob("*-00001-*.safetensors"))[-1]
        last.write_bytes(last.read_bytes()[:-3] + b"bad")
    dist.barrier()
    again = make(folder, max_duration="3ep", autoresume=True)
    found["begun"] = int(again.state.timestamp.batch)
    again.fit()
    again.close()
    found["end"] = int(again.state.timestamp.batch)
    found["nothing"] = refused(load_path=f"{root}/nothing")
    found["other"] = refused(load_path=f"{folder}/b5", model=torch.nn.Linear(5, 3))
    return found


def uneven(kind: str) -> str:
    """A training whose ranks have unequal amounts of data; what each of them is told."""
    rank = dist.get_rank()
    own: Any = loader(18 + 12 * rank, shuffle=False)
    if kind == "sampler":  # each rank's own data set, of which the sampler gives it a part
        own = DataLoader(Points(18 + 12 * rank), batch_size=3, sampler=DistributedSampler(Points(18 + 12 * rank)))
    elif kind == "unsized":  # batches of nobody knows how many

        class Batches:
            def __iter__(self) -> Any:
                for first in range(0, 18 + 12 * rank, 6):
                    yield torch.ones(6, 4), torch.arange(first, first + 6) % 3

        own = Batches()
    trainer = plain(None, train_dataloader=own, max_duration="3ep")
    try:
        trainer.fit()
    except hf.ConfigError as error:
        return str(error)
    return f"{int(trainer.state.timestamp.batch)} batches"


def write_models(folder: str, index: str) -> list[float]:
    """A training whose directories are models; it may replace those of an earlier one."""
    files = hf.ModelFiles(files={"config.json": '{"a": 1}'}, indexes={index: "model"})
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    with plain(folder, model=model, save_filename="ba{batch}", save_overwrite=True, model_files=files) as trainer:
        trainer.fit()
    return [parameter.double().sum().item() for _, parameter in sorted(trainer.state.model.state_dict().items())]
