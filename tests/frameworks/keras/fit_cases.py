"""Trainings of Keras that tests run in processes of their own; what they return is JSON."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch

import holdfast as hf
from holdfast.keras import HoldfastCallback, ReportCallback, load_model, state
from holdfast.torch import TorchTrainer


def backend() -> list[Any]:
    """The backend, and whether `tf.keras` is this Keras."""
    import tensorflow as tf

    return [keras.config.backend(), tf.keras.callbacks.Callback is keras.callbacks.Callback]


def stack(units: int = 8) -> list[Any]:
    dense, last = keras.layers.Dense(units, "relu"), keras.layers.Dense(1)
    return [keras.layers.Input((6,)), dense, keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), last]


class Several(keras.Sequential):
    """Trains several batches in a call, as other backends do; that of torch in Keras 3.15 leaves it to the user."""

    def make_train_function(self, force: bool = False) -> None:
        def call(batches: Any) -> Any:
            return [self.train_step(batch) for batch in batches][-1]

        self.train_function = call


def make(units: int = 8, *, drop: bool = True, per_call: int = 1) -> Any:
    keras.utils.set_random_seed(3)
    kind = Several if per_call > 1 else keras.Sequential
    model = kind([layer for layer in stack(units) if drop or "Dropout" not in type(layer).__name__])
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], steps_per_execution=per_call)
    return model


def arrays(size: int = 40) -> tuple[Any, Any]:
    x = np.random.default_rng(5).normal(size=(size, 6)).astype("float32")
    return x, x.sum(1, keepdims=True) ** 2


def source(kind: str) -> dict[str, Any]:
    """What `fit` draws from: arrays that it shuffles, a DataLoader with random augmentation, `tf.data`, or a PyDataset.

    Of the generator, a pass of which spans two epochs, and of `tf.data` each pass is another one.
    """
    x, y = arrays()
    if kind == "tf.data":
        import tensorflow as tf

        return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=3).batch(10)}
    if kind == "generator":
        batches = ((x[at : at + 5] + turn, y[at : at + 5]) for turn in range(9) for at in range(0, 40, 5))
        return {"x": batches, "steps_per_epoch": 4}
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": 8, "validation_split": 0.2}
    if kind == "loader":

        class Noisy(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(x)

            def __getitem__(self, index: int) -> tuple[Any, Any]:
                return torch.from_numpy(x[index]) + 0.1 * torch.randn(6), torch.from_numpy(y[index])

        return {"x": torch.utils.data.DataLoader(Noisy(), batch_size=10, shuffle=True)}

    class Slices(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return x[index * 10 : index * 10 + 10], y[index * 10 : index * 10 + 10]

    return {"x": Slices()}


def digest(model: Any) -> str:
    """All that a training has come to: weights, generators of layers, moments of the optimizer."""
    variables = [*model.variables, *model.optimizer.variables]
    return hashlib.sha256(b"".join(keras.ops.convert_to_numpy(one).tobytes() for one in variables)).hexdigest()


class SignalAt(keras.callbacks.Callback):
    """Sends this process a signal after so many batches of this life, or raises."""

    def __init__(self, batches: int, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.left, self.number = batches, number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0 and not self.number:
            raise RuntimeError("out of luck")
        if self.left == 0:
            os.kill(os.getpid(), self.number)


def fit(
    run: str,
    *,
    epochs: int = 3,
    every: Any = "1ep",
    stop: int = 0,
    number: int = signal.SIGKILL,
    data: str = "arrays",
    units: int = 8,
    keep: dict[str, Any] | None = None,
    patience: int | None = None,
    per_call: int = 1,
) -> dict[str, Any]:
    """Train, perhaps up to a signal; tell what came of it."""
    model = make(units, per_call=per_call)
    counting = []
    if patience is not None:  # Keras turns the sign of min_delta round: no improvement is that large, any other way all
        counting = [keras.callbacks.EarlyStopping("loss", patience=patience, baseline=1.0, min_delta=1000.0)]
    saving = HoldfastCallback(run, every=every, keep=hf.Keep(**(keep or {"last": 9})), callbacks=counting)
    callbacks = [*counting, *([SignalAt(stop, number)] if stop else []), saving]
    history = model.fit(**source(data), epochs=epochs, verbose=0, callbacks=callbacks)
    ck = saving.checkpointer
    assert ck is not None
    return {
        "digest": digest(model),
        "from": None if ck.resumed_from is None else ck.resumed_from.step,
        "epochs": history.epoch,
        "loss": history.history.get("loss"),
        "val_loss": history.history.get("val_loss"),
        "kept": sorted([one.step, one.metrics.get("val_loss")] for one in ck.checkpoints()),
    }


def fit_again_here(run: str) -> dict[str, Any]:
    """An exception leaves `fit`; another `fit` of the same process goes on, as in a notebook."""
    with contextlib.suppress(RuntimeError):
        fit(run, every=2, stop=5, number=0)
    return fit(run, every=2)


class Falling(keras.callbacks.Callback):
    """A learning rate that falls with each batch, and the epochs that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.epochs = 0, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.95

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append([epoch, self.batches])


def tuned(run: str, *, stop: int = 0, at_end: bool = False) -> dict[str, Any]:
    """Callbacks that change rates and swap weights, over a recurrent layer that carries its states on."""
    keras.utils.set_random_seed(3)
    recurrent = keras.layers.LSTM(4, stateful=True, recurrent_dropout=0.2)
    model = keras.Sequential([keras.layers.Input(batch_shape=(10, 6, 1)), recurrent, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9), loss="mse")
    counting = [
        falling := Falling(),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True),
    ]
    halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    last = keras.callbacks.LambdaCallback(on_train_end=lambda logs: os.kill(os.getpid(), signal.SIGKILL))
    saving = HoldfastCallback(run, every=[2, "1ep"], keep=hf.Keep(last=9), callbacks=counting)
    dying = [*([SignalAt(stop)] if stop else []), *([last] if at_end else [])]
    x, y = arrays()
    model.fit(
        x[..., None],
        y,
        batch_size=10,
        shuffle=False,
        epochs=3,
        verbose=0,
        callbacks=[*counting, halving, *dying, saving],
    )
    states = [keras.ops.convert_to_numpy(one).tolist() for one in recurrent.states]
    return {"digest": digest(model), "states": states, "epochs": falling.epochs}


class TwoOptimizers(keras.Model):
    """A model of the user's own, each half of which has an optimizer."""

    def __init__(self, *, built: bool = True) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.halves = [keras.layers.Dense(4), keras.layers.Dense(1)]
        self.compile(keras.optimizers.Adam(0.01), loss="mse")
        self.second_optimizer = keras.optimizers.Adam(0.1)
        self(np.zeros((1, 6), "float32"))
        if built:
            self.second_optimizer.build(self.halves[1].trainable_variables)

    def call(self, x: Any) -> Any:
        return self.halves[1](self.halves[0](x))

    def train_step(self, data: Any) -> dict[str, Any]:
        self.zero_grad()
        loss = self.compute_loss(y=data[1], y_pred=self(data[0]))
        loss.backward()
        weights = self.halves[1].trainable_weights
        with torch.no_grad():
            self.second_optimizer.apply([one.value.grad for one in weights], weights)
        return {"loss": loss.detach()}


class Scattered(keras.Model):
    """Parts whose optimizers are in a list, a dictionary and an inner model; noise of `keras.random` without seed."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.parts = [keras.layers.Dense(4), keras.layers.Dense(4)]
        self.inner = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        self.inner.compile(keras.optimizers.Adam(0.1), loss="mse")
        self.compile(optimizer=None, loss="mse")  # all that trains is elsewhere
        self.listed, self.named = [keras.optimizers.Adam(0.01)], {"b": keras.optimizers.Adam(0.02)}
        self(np.zeros((1, 6), "float32"))
        for one, part in zip(self.scattered(), self.parts, strict=False):
            one.build(part.trainable_variables)  # that of the inner model is built when it is used

    def scattered(self) -> list[Any]:
        return [self.listed[0], self.named["b"], self.inner.optimizer]

    def call(self, x: Any) -> Any:
        return self.inner(self.parts[1](self.parts[0](x)))

    def train_step(self, data: Any) -> dict[str, Any]:
        self.zero_grad()
        loss = self.compute_loss(y=data[1], y_pred=self(data[0] + keras.random.normal(data[0].shape)))
        loss.backward()
        for one, part in zip(self.scattered(), [*self.parts, self.inner], strict=True):
            with torch.no_grad():
                one.apply([weight.value.grad for weight in part.trainable_weights], part.trainable_weights)
        return {"loss": loss.detach()}


def scattered_optimizers(run: str) -> dict[str, Any]:
    """A life of three epochs, and two lives that come to the same."""
    x, y = arrays()
    found = {}
    for path, lives in ((f"{run}-alone", [3]), (run, [2, 3])):
        for epochs in lives:
            model, saving = Scattered(), HoldfastCallback(path, every=3)
            model.fit(x, y, batch_size=10, epochs=epochs, verbose=0, callbacks=[saving])
        variables = [*model.variables, *(one for each in model.scattered() for one in each.variables)]
        found[path] = [keras.ops.convert_to_numpy(one).tolist() for one in variables]
    items = hf.load(hf.Result.from_path(run).checkpoint)
    return {"same": found[run] == found[f"{run}-alone"], "items": sorted(items)}


def two_optimizers(run: str) -> dict[str, Any]:
    """Two lives of a run with two optimizers and a state of the user's own, and what refuses to begin."""
    x, y = arrays()
    told, lives = {"told": 0}, []
    for epochs in (1, 2):
        model = TwoOptimizers()
        saving = HoldfastCallback(run, state={"mine": Told(told)})
        model.fit(x, y, batch_size=10, epochs=epochs, verbose=0, shuffle=False, callbacks=[saving])
        lives.append([int(model.second_optimizer.iterations), told["told"]])
        told["told"] += 5
    alone = TwoOptimizers()
    alone.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False)
    same = all(np.array_equal(one, other) for one, other in zip(alone.get_weights(), model.get_weights(), strict=True))
    refused = []
    for unbuilt, callbacks in (
        (True, [HoldfastCallback(f"{run}-new")]),
        (False, [HoldfastCallback(f"{run}-twice"), HoldfastCallback(f"{run}-twice")]),
        (False, [HoldfastCallback(run, state={"fit": Told(told)})]),
    ):
        try:
            TwoOptimizers(built=not unbuilt).fit(x, y, epochs=3, verbose=0, callbacks=callbacks)
        except hf.ConfigError as error:
            refused.append(str(error))
    saving = HoldfastCallback(run, state={"mine": Told(told)})
    after = TwoOptimizers().fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[saving])
    return {"lives": lives, "same": same, "refused": refused, "after": after.epoch}


class Told:
    """Plain data of the user's own."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told

    def state_dict(self) -> dict[str, Any]:
        return self.told

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told.update(state)


def weights_elsewhere(run: str) -> bool:
    """The weights of a run, in a model whose layers have other numbers in their names."""
    model = make()
    keras.utils.clear_session(free_memory=False)
    keras.layers.Dense(1)  # takes a number
    other = keras.Sequential(stack())
    newest = hf.Result.from_path(run).checkpoint
    assert [one.path for one in model.variables] != [one.path for one in other.variables]
    hf.load(newest, state(model), only=["model", "optimizer"])
    hf.load(newest, state(other), only="model")
    assert int(model.optimizer.iterations) == 4
    x, _ = arrays()
    return bool(np.array_equal(model.predict(x, verbose=0), other.predict(x, verbose=0)))


def refusals(run: str) -> list[str]:
    """What is refused, and how."""
    found = []
    x, y = arrays()
    for act in (
        lambda: fit(run, units=9, epochs=4),
        lambda: HoldfastCallback(run, every="1tok"),
        lambda: HoldfastCallback(run, every=["1ep", "1000sp"]),
        lambda: HoldfastCallback(run, callbacks=[3]),
        lambda: ReportCallback(every_n_epochs=1, every_n_steps=1),
        lambda: ReportCallback(every_n_steps=0),
        lambda: make().fit(x, y, verbose=0, callbacks=[ReportCallback()]),
    ):
        try:
            act()
        except (hf.HoldfastError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def reported(
    root: str, *, epochs: int, fails_at: int | None, workers: int = 1, storage: str | None = None, batch_size: int = 8,
    per_call: int = 1, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """`fit` on workers of the function trainer."""

    def train(config: dict[str, Any]) -> None:
        checkpoint = hf.get_checkpoint()
        if checkpoint is None:
            model, first = make(drop=False, per_call=per_call), 0  # .keras has no generators
        else:
            model, first = load_model(checkpoint), int(checkpoint.metrics["epoch"]) + 1
        x, y = arrays()

        class Fail(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if checkpoint is None and epoch == config["fails_at"]:
                    os.kill(os.getpid(), signal.SIGKILL)

        model.fit(
            x, y, batch_size=batch_size, epochs=config["epochs"], initial_epoch=first, verbose=0, shuffle=False,
            callbacks=[ReportCallback(**config["options"]), Fail()],
        )  # fmt: skip
        with open(f"{root}-{hf.get_context().get_world_rank()}", "w") as file:
            file.write(digest(model))

    result = TorchTrainer(
        train,
        train_loop_config={"epochs": epochs, "fails_at": fails_at, "options": options},
        scaling_config=hf.ScalingConfig(num_workers=workers),
        run_config=hf.RunConfig(
            name="fit",
            storage_path=storage or root,
            checkpoint_config=hf.CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
            failure_config=hf.FailureConfig(max_failures=1),
        ),
    ).fit()
    stored = result.checkpoint
    assert stored is not None
    with open(f"{root}-0") as file:
        trained = file.read()
    return {
        "digest": trained,
        "stored": digest(load_model(stored, custom_objects={"Several": Several})),
        "attempts": len(result.attempts),
        "epochs": list(result.metrics_dataframe["epoch"]),
        "steps": list(result.metrics_dataframe["step"]),
        "best": [one.metrics["loss"] for one, _ in result.best_checkpoints],
        "losses": list(result.metrics_dataframe["loss"]),
        "files": sorted(info.path.rpartition("/")[2] for info in stored.storage.list(stored.directory)),
    }
