"""Fit a small network with JAX, be killed, go on with the same bits, and read the weights with torch.

    python examples/jax_tree.py [--folder PATH]

Needs jax. Without a folder one is made and removed.
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

import jax
import jax.numpy as jnp

import holdfast
from holdfast.jax import Pytree

STEPS = 200


def loss_of(params: Any, x: Any) -> Any:
    """Squared error of learning the sum of the squares."""
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return ((hidden @ params["out"] - (x**2).sum(1, keepdims=True)) ** 2).mean()


def train(run: Path, *, kill: int) -> float:
    """Train, or what is left of it; the batches come from a key that is part of the state."""
    first, second, noise = jax.random.split(jax.random.key(0), 3)
    params = {"in": jax.random.normal(first, (4, 32)), "bias": jnp.zeros(32)}
    tree = Pytree({"params": {**params, "out": jax.random.normal(second, (32, 1)) / 8}, "key": noise})
    step = jax.jit(jax.value_and_grad(loss_of))
    loss = float("nan")
    with holdfast.Checkpointer(run, {"train": tree}, every=50, keep=holdfast.Keep(last=2, best=1, metric="loss")) as ck:
        while ck.global_step < STEPS:
            key, use = jax.random.split(tree.value["key"])
            value, slope = step(tree.value["params"], jax.random.normal(use, (64, 4)))
            moved = jax.tree.map(lambda p, g: p - 0.02 * g, tree.value["params"], slope)
            tree.value, loss = {"params": moved, "key": key}, float(value)
            ck.step(loss=loss)
            if ck.global_step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
    return loss


def main() -> None:
    """Train once in peace, and once with a kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(f"loss {train(options.run, kill=options.kill):.4f}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        for name, kill in (("whole", 0), ("killed", 120), ("killed", 0)):
            command = [sys.executable, __file__, "--run", folder / name, "--kill", str(kill)]
            print(f"{name}: exit status {subprocess.run(command, check=False).returncode}", flush=True)
        one, other = (
            holdfast.load(holdfast.Result.from_path(folder / name).checkpoint)["train"] for name in ("whole", "killed")
        )
        if not all((one[name] == other[name]).all() for name in one):
            sys.exit("the weights differ")
        print(f"the same weights, bit by bit; with torch: {one['params/bias'][:3]}")


if __name__ == "__main__":
    main()
