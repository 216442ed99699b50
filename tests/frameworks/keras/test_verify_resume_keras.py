"""`holdfast verify-resume` of scripts with Keras on torch: its optimizers are none of torch, and are seen too."""

from __future__ import annotations

import sys

import pytest

from holdfast.testing import ResumeDivergedError, assert_resumes

FIT = """
import json, os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
keras.utils.set_random_seed(0)


class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        os.makedirs("out", exist_ok=True)
        self.model.save("out/new.keras")
        os.replace("out/new.keras", "out/last.keras")
        with open("out/epoch.new", "w") as file:
            json.dump(epoch + 1, file)
        os.replace("out/epoch.new", "out/epoch.json")


begin = 0
if os.path.exists("out/epoch.json"):
    model = keras.models.load_model("out/last.keras")
    begin = json.load(open("out/epoch.json"))
else:
    dense = keras.layers.Dense(8, "relu")
    model = keras.Sequential([keras.layers.Input((4,)), dense, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
model.fit(x, y, batch_size=8, epochs=4, initial_epoch=begin, shuffle=False, callbacks=[Save()], verbose=0)
"""

LOOP = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch

keras.utils.set_random_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss = torch.nn.MSELoss()
epoch = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    epoch = saved["epoch"]
while epoch < 4:
    order = torch.Generator().manual_seed(epoch)
    for inputs, wanted in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=order):
        value = loss(model(inputs, training=True), wanted)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    epoch += 1
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "last.new")
    os.replace("last.new", "last.pt")
"""


@pytest.mark.parametrize("text", [FIT, LOOP], ids=["fit", "loop"])
def test_a_training_that_resumes_is_exact(tmp_path, text):
    """`fit` with an optimizer of Keras, and a loop of one's own with one of torch."""
    (tmp_path / "train.py").write_text(text)
    report = assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1)
    assert report.steps == 32
    assert report.lives[1].began


def test_an_optimizer_that_begins_anew_is_named(tmp_path):
    """Weights alone come back: the momenta and the count of Keras' Adam are missing."""
    again = "    model.compile(keras.optimizers.Adam(0.01), loss='mse')\n    begin = json"
    (tmp_path / "train.py").write_text(FIT.replace("    begin = json", again))
    with pytest.raises(ResumeDivergedError, match="state of Adam is lost"):
        assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1)
