"""Learn to read handwritten digits with Keras, be killed in the middle of an epoch, go on, and compare.

    python examples/keras_fit.py [--folder PATH]

Needs keras and scikit-learn (the digits come with it). Without a folder one is made and removed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits

import holdfast
from holdfast.keras import HoldfastCallback


class Kill(keras.callbacks.Callback):
    """The power cut, after so many batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count down."""
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run: Path, *, kill: int) -> None:
    """Train four epochs, or what is left of them."""
    keras.utils.set_random_seed(0)
    pictures, labels = load_digits(return_X_y=True)
    layers = [keras.layers.Input((64,)), keras.layers.Dense(48, "relu"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([*layers, keras.layers.Dense(10, "softmax")])
    model.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    keep = holdfast.Keep(last=2, best=1, metric="val_accuracy", mode="max")
    saving = HoldfastCallback(run, every=["1ep", 10], keep=keep)
    model.fit(
        pictures / 16, labels, batch_size=64, epochs=4, validation_split=0.2, verbose=0,
        callbacks=[*([Kill(kill)] if kill else []), saving],
    )  # fmt: skip
    np.savez(run.with_suffix(".npz"), *[keras.ops.convert_to_numpy(one) for one in model.trainable_variables])


def main() -> None:
    """Train once in peace, and once with a kill in each of two lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        train(options.run, kill=options.kill)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        for name, kill in (("whole", 0), ("killed", 35), ("killed", 0)):
            command = [sys.executable, __file__, "--run", folder / name, "--kill", str(kill)]
            done = subprocess.run(command, check=False)
            print(f"{name}: exit status {done.returncode}", flush=True)
        with np.load(folder / "whole.npz") as one, np.load(folder / "killed.npz") as other:
            same = all(np.array_equal(one[key], other[key]) for key in one)
        if not same:
            sys.exit("the weights differ")
        print("the killed training has the same weights, bit by bit")


if __name__ == "__main__":
    main()
