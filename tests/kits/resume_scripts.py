"""Small training scripts that resume wrongly, each by a fault that was reported of real software, and right ones.

Each is `BASE`, or a script of `real_scripts`, with some of its pieces replaced. `BASE` saves model, optimizer,
scheduler, generators and its position in the data, and goes on exactly.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # the first step of an optimizer imports it: here once instead of in each life
from real_scripts import REAL

from holdfast.verify.lives import Forked
from holdfast.verify.observer import start

BASE = """
import os, random, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
# made
done = {"epoch": 0, "batch": 0}
order = torch.get_rng_state()
path = "out/last.pt"


def save():
    os.makedirs("out", exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "done": dict(done),
        "rng": torch.get_rng_state(),
        "order": order,
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def load():
    global order
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    done.update(state["done"])
    order = state["order"]
    torch.set_rng_state(state["rng"])


def forward(x):
    return model(x)


if os.path.exists(path):
    load()
while done["epoch"] < 4:
    skip = done["batch"]
    now = torch.get_rng_state()
    if skip:
        torch.set_rng_state(order)
    else:
        order = now
    loader = DataLoader(data, batch_size=8, shuffle=True)
    batches = iter(loader)
    for _ in range(skip):
        next(batches)
    if skip:
        torch.set_rng_state(now)
    for x, y in batches:
        loss = (forward(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        done["batch"] += 1
        # stepped
        if done["batch"] == 3:
            save()
    done["epoch"] += 1
    done["batch"] = 0
    # epoch
    save()
"""


def script(*changes: tuple[str, str], base: str = BASE) -> str:
    """Return a script with pieces replaced; each must be in it once at least."""
    text = base
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


_SKIP = """    skip = done["batch"]
    now = torch.get_rng_state()
    if skip:
        torch.set_rng_state(order)
    else:
        order = now
    loader = DataLoader(data, batch_size=8, shuffle=True)
    batches = iter(loader)
    for _ in range(skip):
        next(batches)
    if skip:
        torch.set_rng_state(now)
"""
_DATA = '    torch.set_rng_state(state["rng"])\n'
_PLAIN = ("nn.Dropout(0.2), ", "")
_SEEDED = """    seeded = torch.Generator().manual_seed(done["epoch"])
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=seeded)
    batches = iter(loader)
    for _ in range(done["batch"]):
        next(batches)
"""
_BY_EPOCH = (_SKIP, _SEEDED)
_OWN_BATCHES = """    batches = ((torch.randn(8, 4), torch.randn(8, 1)) for _ in range(6 - done["batch"]))
"""
_NUMPY_BATCHES = """    batches = []
    for _ in range(6 - done["batch"]):
        chosen = np.random.randint(0, 48, 8)
        batches.append((data.tensors[0][chosen], data.tensors[1][chosen]))
"""
_HIDDEN = """
hidden = torch.zeros(8, 4)


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = model

    def forward(self, x, hidden):
        return self.body(x + 0.1 * hidden)


carrying = Carrying()
"""
_LOADS = "if os.path.exists(path):\n    load()\n"
_WARMS_UP = """import copy
before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
for _ in range(2):
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_AS_BEFORE = """model.load_state_dict(before[0])
optimizer.load_state_dict(before[1])
"""
_CARRY = """def forward(x):
    global hidden
    out = carrying(x, hidden)
    hidden = 0.5 * hidden + x
    return out
"""

WRONG: dict[str, tuple[str, str, str]] = {
    # name: (script, verdict, kind)
    "does not look for its checkpoint": (
        script(("if os.path.exists(path):\n    load()", "")), "starts over", "starts over"),
    "tracker file is never written": (
        script(("if os.path.exists(path):", 'if os.path.exists("out/latest.txt"):')), "starts over", "starts over"),
    "an error is taken for no checkpoint": (
        script(("    load()\nwhile", "    try:\n        state = torch.load(path + '.x')\n    except Exception:\n"
                "        pass\nwhile")), "starts over", "starts over"),
    "optimizer is not saved": (
        script(('        "optimizer": optimizer.state_dict(),\n', ""),
               ('    optimizer.load_state_dict(state["optimizer"])\n', "")), "differs", "optimizer lost"),
    "optimizer is made again after loading": (
        script(("    load()\nwhile", "    load()\n    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
                "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)\nwhile")),
        "differs", "optimizer lost"),
    "second moment is dropped": (
        script(('    optimizer.load_state_dict(state["optimizer"])\n',
                '    optimizer.load_state_dict(state["optimizer"])\n'
                '    for one in optimizer.state.values():\n        one["exp_avg_sq"].zero_()\n')),
        "differs", "optimizer lost"),
    "optimizer state is cast": (
        script(('    optimizer.load_state_dict(state["optimizer"])\n',
                '    optimizer.load_state_dict(state["optimizer"])\n'
                '    for one in optimizer.state.values():\n'
                '        one["exp_avg"] = one["exp_avg"].bfloat16().float()\n')), "differs", "optimizer rounded"),
    "scheduler is not saved": (
        script(('    scheduler.load_state_dict(state["scheduler"])\n',
                '    for group in optimizer.param_groups:\n        group["lr"] = 1e-2\n')),
        "differs", "learning rate"),
    "weights are saved in half precision": (
        script(('"model": model.state_dict()',
                '"model": {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}')),
        "differs", "rounded weights"),
    "head is not restored": (
        script(('model.load_state_dict(state["model"])',
                'model.load_state_dict({k: v for k, v in state["model"].items() if not k.startswith("3")}, '
                'strict=False)')), "differs", "partial weights"),
    "only parameters are saved": (
        script(('model.load_state_dict(state["model"])',
                'model.load_state_dict({k: v for k, v in state["model"].items() if "running" not in k}, '
                'strict=False)')), "differs", "buffers"),
    "averaged copy is not saved, and the loaded module stays": (
        script(("# made", "import copy\nema, kept = copy.deepcopy(model), []"),
               ("# stepped", "for a, b in zip(ema.parameters(), model.parameters()): a.data.lerp_(b.data, 0.1)"),
               ('"model": model.state_dict(),', '"model": model,'), ("weights_only=True", "weights_only=False"),
               ('model.load_state_dict(state["model"])',
                'kept.append(state["model"]); model.load_state_dict(state["model"].state_dict())')),
        "differs", "other modules"),
    "averaged copy is not saved": (
        script(("# made", "ema = torch.optim.swa_utils.AveragedModel(model)"),
               ("# stepped", "ema.update_parameters(model)")), "differs", "other modules"),
    "weight decay begins its schedule anew, beside an averaged copy": (
        script(("# made", "calls, ema = 0, torch.optim.swa_utils.AveragedModel(model)"),
               ("# stepped", "ema.update_parameters(model)"),
               ('"order": order,', '"order": order, "ema": ema.state_dict(),'),
               ('    order = state["order"]\n',
                '    order = state["order"]\n    ema.load_state_dict(state["ema"])\n'),
               ("        optimizer.step()\n", "        calls += 1\n"
                "        optimizer.param_groups[0]['weight_decay'] = 0.01 * calls\n        optimizer.step()\n")),
        "differs", "options"),
    "averaged copy counts its updates anew": (
        script(("# made", "ema = torch.optim.swa_utils.AveragedModel(model)"),
               ("# stepped", "ema.update_parameters(model)"),
               ('"order": order,', '"order": order, "ema": ema.module.state_dict(),'),
               ('    order = state["order"]\n',
                '    order = state["order"]\n    ema.module.load_state_dict(state["ema"])\n')),
        "differs", "other modules"),
    "generators are not saved": (
        script((_DATA, ""), _BY_EPOCH), "differs", "generators"),
    "order of the epoch is drawn anew": (
        script(("        torch.set_rng_state(order)\n    else", "        torch.seed()\n    else")),
        "differs", "other data"),
    "epoch begins again in its middle": (
        script(_BY_EPOCH, ('    for _ in range(done["batch"]):\n        next(batches)\n', ""), _PLAIN),
        "differs", "data again"),
    "generator of the order begins anew": (
        script((_SKIP, '    batches = DataLoader(data, batch_size=8, shuffle=True)\n'), _PLAIN, (_DATA, ""),
               ('        if done["batch"] == 3:\n            save()\n', "")), "differs", "data again"),
    "rest of the epoch is skipped": (
        script(_BY_EPOCH, ('    done.update(state["done"])\n',
                           '    done.update(epoch=state["done"]["epoch"] + (state["done"]["batch"] > 0), batch=0)\n'),
               _PLAIN), "differs", "data left out"),
    "batches drawn ahead are lost": (
        script(_BY_EPOCH, ('        next(batches)\n', '        next(batches)\n    if done["batch"]:\n'
                           '        next(batches)\n'), _PLAIN), "differs", "data left out"),
    "own batches from a generator that begins anew": (
        script((_SKIP, _OWN_BATCHES), (_DATA, ""), _PLAIN), "differs", "data again"),
    "own batches from NumPy": (
        script((_SKIP, _NUMPY_BATCHES), _PLAIN), "differs", "own data"),
    "hidden state is carried": (
        script(("done = {", _HIDDEN + "done = {"),
               ("def forward(x):\n    return model(x)\n", _CARRY), _BY_EPOCH, _PLAIN),
        "differs", "changed inputs"),
    "value is carried": (
        script(_PLAIN, ("done = {", "weight = 1.0\ndone = {"), ("loss = (", "weight *= 0.9\n        loss = weight * ("),
               ), "differs", "carried"),
    "names of checkpoints are sorted as text": (
        script(
            ("path = \"out/last.pt\"", "import glob\npath = max(glob.glob(\"out/step-*.pt\"), default=\"\")"),
            ("torch.save(state, path + \".tmp\")\n    os.replace(path + \".tmp\", path)",
             "torch.save(state, f\"out/step-{6 * done['epoch'] + done['batch']}.pt\")"),
        ), "goes back", "goes back",
    ),
    "a resume of the second life begins at zero": (
        script(_BY_EPOCH, ('    done.update(state["done"])\n',
                           '    done.update(state["done"])\n    if state.get("second"):\n        done["batch"] = 0\n'
                           '    second[:] = [1]\n'),
               ("done = {", "second = []\ndone = {"), ('"order": order,', '"order": order, "second": bool(second),'),
               _PLAIN), "differs", "data again"),
    "ends without training": (
        script(("    load()\nwhile", "    load()\n    done['epoch'] = 4\nwhile")),
        "ends without training", "no training"),
    "steps are counted twice": (
        script(_BY_EPOCH, ("while done[\"epoch\"] < 4:", "n = 0\nwhile n < 4:"),
               ("    done[\"epoch\"] += 1", "    n += 1\n    done[\"epoch\"] += 1"),
               _PLAIN), "differs", "more steps"),
    "cannot load what it saved": (
        script(('"done": dict(done),', '"done": dict(done), "path": __import__("pathlib").PurePosixPath("x"),')),
        "cannot resume", "cannot resume"),
    "layers are frozen in a fresh start alone": (
        script(("# made", "if not os.path.exists('out/last.pt'):\n    model[0].requires_grad_(False)")),
        "differs", "frozen weights"),
    "the optimizer that steps less often is not saved": (
        script(('"maker": maker, "judge": judge, "first": optimizers[0], ', '"maker": maker, "judge": judge, '),
               base=REAL["two networks against each other"]), "differs", "optimizer lost"),
    "noise of a generator of one's own begins anew": (
        script(('    noise.set_state(saved["noise"])\n', ''), base=REAL["two networks against each other"]),
        "differs", "data again"),
    "scale of the loss is not saved": (
        script(('    scaler.load_state_dict(saved["scaler"])\n', ''), base=REAL["mixed precision with a scaled loss"]),
        "differs", "loss scale"),
    "hidden state is not saved": (
        script(('at, hidden = saved["at"], saved["hidden"]', 'at = saved["at"]'),
               base=REAL["hidden state of a recurrent network"]), "differs", "carried"),
    "replay buffer is not saved": (
        script(('    buffer, place, turn = saved["buffer"], saved["place"], saved["turn"]\n',
                '    place, turn = saved["place"], saved["turn"]\n'), base=REAL["replay buffer and target network"]),
        "differs", "own data"),
    "target network is made from the other one": (
        script(('    target.load_state_dict(saved["target"])\n', '    target.load_state_dict(saved["net"])\n'),
               base=REAL["replay buffer and target network"]), "differs", "other modules"),
    "baseline is not saved": (
        script(('episode, baseline = saved["episode"], saved["baseline"]', 'episode = saved["episode"]'),
               base=REAL["policy gradient"]), "differs", "carried"),
    "half-precision weights are the ones that are saved": (
        script(('"master": [one.detach() for one in master]', '"master": [one.detach().bfloat16() for one in master]'),
               base=REAL["half-precision weights beside those that train"]), "differs", "rounded weights"),
    "position of a stream is not saved": (
        script(('Stream(seen)', 'Stream(0)'), base=REAL["stream with a position"]), "differs", "data again"),
    "warms up, and does not look for its checkpoint": (
        script((_LOADS, _WARMS_UP + _AS_BEFORE)), "starts over", "starts over"),
    "warms up, and its weights are saved in half precision": (
        script((_LOADS, _WARMS_UP + _LOADS), ('"model": model.state_dict()',
               '"model": {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}')),
        "differs", "rounded weights"),
    "warms up, and keeps the optimizer state of that": (
        script((_LOADS, _WARMS_UP + _LOADS), ('    optimizer.load_state_dict(state["optimizer"])\n', "")),
        "differs", "optimizer"),
    "is not repeatable": (
        script((_SKIP, '    batches = [(torch.from_numpy(np.random.default_rng().normal(size=(8, 4))).float(), '
                       'torch.ones(8, 1)) for _ in range(6 - done["batch"])]\n')),
        "not repeatable", "not repeatable"),
}  # fmt: skip

HEALTHY: dict[str, str] = {
    "base": BASE,
    "seeded by epoch": script(_BY_EPOCH),
    "no generators and none needed": script(_BY_EPOCH, _PLAIN, (_DATA, "")),
    "SGD with momentum": script(("torch.optim.AdamW(model.parameters(), lr=1e-2)",
                                 "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)")),
    "own batches": script((_SKIP, _OWN_BATCHES)),
    "averaged copy saved": script(
        ("# made", "ema = torch.optim.swa_utils.AveragedModel(model)"),
        ("# stepped", "ema.update_parameters(model)"),
        ('"order": order,', '"order": order, "ema": ema.state_dict(),'),
        ('    order = state["order"]\n', '    order = state["order"]\n    ema.load_state_dict(state["ema"])\n')),
    "evaluates after each epoch": script(
        _BY_EPOCH, ("    # epoch", "    model.eval()\n    with torch.no_grad():\n"
                    "        for x, y in DataLoader(data, 16):\n"
                    "            forward(x)\n    model.train()")),
    "gathers gradients": script(
        _BY_EPOCH,
        ("        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n        scheduler.step()\n",
         "        (loss / 3).backward()\n        if done['batch'] % 3 == 2:\n            optimizer.step()\n"
         "            optimizer.zero_grad()\n            scheduler.step()\n")),
    "unseeded Python random that nothing depends on": script(("done = {", "name = random.random()\ndone = {")),
    "keeps many files": script(("os.replace(path + \".tmp\", path)",
                                "os.replace(path + \".tmp\", path); torch.save(1, f'out/{random.random()}.pt')")),
    "writes the best weights at every step": script(
        ("# stepped", "os.makedirs(\"out\", exist_ok=True)\n        torch.save(\n            "
         "{\"model\": model.state_dict(), \"optimizer\": optimizer.state_dict()}, \"out/best.pt\")")
    ),
    "saves in a thread, some steps late": script(
        ("torch.save(state, path + \".tmp\")\n    os.replace(path + \".tmp\", path)",
         "import copy, threading\n    threading.Timer(0.02, write, [copy.deepcopy(state)]).start()"),
        ("def load", "def write(state):\n    name = f\"{path}.{threading.get_ident()}\"\n    "
         "torch.save(state, name)\n    os.replace(name, path)\n\n\ndef load"),
        ("import os,", "import threading, os,"),
    ),
    "steps with a closure": script(
        ("        loss = (forward(x) - y).pow(2).mean()\n        optimizer.zero_grad()\n        loss.backward()\n"
         "        optimizer.step()\n",
         "        def closure():\n            optimizer.zero_grad()\n"
         "            loss = (forward(x) - y).pow(2).mean()\n"
         "            loss.backward()\n            return loss\n\n        optimizer.step(closure)\n")),
    "two optimizers": script(
        ("optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)",
         "optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)\n"
         "second = torch.optim.SGD(model[3].parameters(), lr=1e-2, momentum=0.9)"),
        ("        optimizer.step()\n", "        optimizer.step()\n        second.step()\n        second.zero_grad()\n"),
        ('"order": order,', '"order": order, "second": second.state_dict(),'),
        ('    order = state["order"]\n', '    order = state["order"]\n    second.load_state_dict(state["second"])\n')),
    "finishes before the kill of its second life": script(("< 4:", "< 2:")),
    "a step without gradients makes the optimizer's state before it is loaded": script(
        ("def load():\n    global order\n",
         "def load():\n    global order\n    for weight in model.parameters():\n"
         "        weight.grad = torch.zeros_like(weight)\n    optimizer.step()\n    optimizer.zero_grad()\n")),
    "warms up before it loads": script((_LOADS, _WARMS_UP + _LOADS)),
    "warms up, and begins as if it had not": script((_LOADS, _WARMS_UP + _AS_BEFORE + _LOADS)),
    "warms up only where there is a checkpoint": script(
        (_LOADS, "if os.path.exists(path):\n    " + (_WARMS_UP + "load()\n").replace("\n", "\n    ").rstrip(" "))),
    "measures with a model of its own before it loads": script(
        (_LOADS, "tried = nn.Linear(4, 1)\nprobe = torch.optim.SGD(tried.parameters(), lr=0.1)\n"
                 "for _ in range(3):\n    tried(torch.ones(8, 4)).sum().backward()\n    probe.step()\n" + _LOADS)),
    **REAL,
}  # fmt: skip


def forked(command: Sequence[str], folder: Path) -> Forked:
    """Run ``python train.py`` in a fork of this process, which has imported torch, as in an interpreter of its own."""

    def body() -> None:
        gc.freeze()  # the observer need not look through what is there: models of other tests are nobody's here
        os.chdir(folder)
        warnings.resetwarnings()  # pytest makes errors of them
        torch.set_num_threads(1)  # the parent's pool of threads did not come along
        start(os.environ["HOLDFAST_VERIFY"])
        sys.argv = list(command[1:])
        sys.path.insert(0, str(folder))
        runpy.run_path(command[1], run_name="__main__")

    return Forked(body)
