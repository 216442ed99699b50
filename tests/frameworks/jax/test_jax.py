"""Pytrees of JAX arrays in a state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import parallel_cases
import pytest
import torch
from object_kit import moto_bucket

import holdfast as hf
from holdfast.jax import Pytree, load
from holdfast.state.tree.arrays import array_of, tensor_of


class Moments(NamedTuple):
    mean: Any
    square: Any


def tree(scale: float = 1.0) -> dict[str, Any]:
    return {
        "dense": {"kernel": scale * jnp.arange(6.0).reshape(2, 3), "bias": jnp.full((3,), scale, jnp.bfloat16)},
        "opt": Moments(jnp.zeros((2, 3), jnp.float16), (jnp.int32(7 * scale), jnp.array([True, scale > 1]))),
        "float8": jnp.full((5,), scale, jnp.float8_e4m3fn),
        "empty": jnp.zeros((0, 4)),
        "key": jax.random.key(int(scale)),
        "host": np.full(4, scale),
        "rate": 0.1 * scale,
    }


def equal(one: Any, other: Any) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        kind = getattr(a, "dtype", None) == getattr(b, "dtype", None) and type(a) is type(b)
        return kind and np.array_equal(np.asarray(a), np.asarray(b))

    alike = jax.tree.structure(one) == jax.tree.structure(other)
    return alike and all(map(same, jax.tree.leaves(one), jax.tree.leaves(other)))


def test_round_trip(tmp_path: Path) -> None:
    """Arrays of every kind, keys, NumPy arrays and numbers come back with type, dtype and bits."""
    hf.save(tmp_path / "a", {"train": Pytree(tree(2.0)), "step": 3})
    live = Pytree(tree(1.0))
    old = live.value
    assert hf.load(tmp_path / "a", {"train": live})["step"] == 3
    assert equal(live.value, tree(2.0))
    assert equal(old, tree(1.0))  # arrays of JAX never change
    assert equal(load(tmp_path / "a", tree(1.0), item="train"), tree(2.0))
    stored = hf.load(tmp_path / "a")["train"]
    assert stored["dense/bias"].dtype is torch.bfloat16
    assert stored["float8"].dtype is torch.float8_e4m3fn


def test_no_copy() -> None:
    """An array on the CPU is not copied on its way to the writer."""
    array = jnp.arange(1000.0)
    assert tensor_of(array).data_ptr() == array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32", "int64", "complex64", "bool"])
def test_views(dtype: str) -> None:
    """Arrays of NumPy with the dtypes of ml_dtypes become tensors and come back."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    for array in (np.arange(6).reshape(2, 3).astype(kind), np.ones((), kind), np.arange(6).astype(kind)[::2]):
        tensor = tensor_of(array)
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert tensor.shape == array.shape
        assert np.array_equal(array_of(tensor), array)
        assert array_of(tensor).dtype == kind


def test_views_refuse() -> None:
    """A dtype that torch lacks is refused in words."""
    with pytest.raises(hf.UnsupportedStateError, match="int4"):
        tensor_of(np.ones(3, ml_dtypes.int4))


def test_mismatch(tmp_path: Path) -> None:
    """Another tree is refused with every difference, and stays as it was."""
    hf.save(tmp_path / "a", {"train": Pytree({"a": jnp.ones(3), "b": jnp.ones(2)})})
    live = Pytree({"a": jnp.zeros(4), "c": jnp.zeros(1)})
    with pytest.raises(hf.StateMismatchError, match=r"a: \(3,\) stored, \(4,\).*missing: c.*unexpected: b"):
        hf.load(tmp_path / "a", {"train": live})
    assert float(live.value["a"].sum()) == 0


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_every_kind(tmp_path: Path, kind: str) -> None:
    """A key comes back for the generator it was made for; one for another generator is refused, and stays."""
    key = jax.random.split(jax.random.key(5, impl=kind))
    hf.save(tmp_path / "a", {"train": Pytree({"key": key})})
    back = load(tmp_path / "a", {"key": jax.random.split(jax.random.key(0, impl=kind))}, item="train")["key"]
    assert back.dtype == key.dtype
    assert equal(back, key)
    for other in {"rbg", "unsafe_rbg", "threefry2x32"} - {kind}:
        live = Pytree({"key": jax.random.split(jax.random.key(0, impl=other))})
        with pytest.raises(hf.StateMismatchError, match="key: "):
            hf.load(tmp_path / "a", {"train": live})
        assert equal(live.value["key"], jax.random.split(jax.random.key(0, impl=other)))
    data = Pytree({"key": jax.random.key_data(key)})  # as early versions stored keys of every kind
    hf.save(tmp_path / "b", {"train": data})
    assert equal(load(tmp_path / "b", {"key": jnp.copy(key)}, item="train")["key"], key)


def test_likes_of_other_kinds(tmp_path: Path) -> None:
    """Shapes of `jax.eval_shape` get arrays of JAX, NumPy's get NumPy's; a number is no place for an array."""
    hf.save(tmp_path / "a", {"train": Pytree({"a": jnp.ones(3, jnp.bfloat16), "b": np.float32(2)})})
    numpy = load(tmp_path / "a", {"a": np.zeros(3, np.float32), "b": 0.0}, item="train")
    assert (type(numpy["a"]), numpy["a"].dtype, numpy["a"].sum(), numpy["b"]) == (np.ndarray, np.float32, 3, 2)
    abstract = jax.eval_shape(lambda: jnp.zeros(3, jnp.bfloat16))
    made = load(tmp_path / "a", {"a": abstract, "b": np.float32(0)}, item="train")["a"]
    assert isinstance(made, jax.Array)
    assert (made.dtype, float(made.sum())) == (jnp.bfloat16, 3)
    with pytest.raises(hf.StateMismatchError, match=r"a: \(3,\) stored, no array in the pytree"):
        load(tmp_path / "a", {"a": 0, "b": 0.0}, item="train")


def test_weak_types(tmp_path: Path) -> None:
    """A number that yields to the dtype of the other operand does so after a load: bfloat16 stays bfloat16."""

    def make(value: float) -> Any:
        return {
            "scale": jnp.asarray(value),
            "rates": jnp.full((2,), value),
            "count": jnp.asarray(int(value)),
            "strong": jnp.ones(2),
        }

    hf.save(tmp_path / "a", {"train": Pytree(make(3.0))})
    tree = Pytree(make(0.0))
    hf.load(tmp_path / "a", {"train": tree})
    for made in (tree.value, load(tmp_path / "a", jax.eval_shape(lambda: make(0.0)), item="train")):
        assert equal(made, make(3.0))
        assert [made[name].weak_type for name in ("scale", "rates", "count", "strong")] == [True, True, True, False]
        assert (jnp.ones(2, jnp.bfloat16) * made["scale"]).dtype == jnp.bfloat16


def test_a_count_that_became_an_array(tmp_path: Path) -> None:
    """A `TrainState` of Flax begins with `step=0`, which a jitted step makes an array: it comes back as one."""
    step = jax.jit(lambda state: {name: value + 1 for name, value in state.items()})
    after = step({"count": 0, "rate": 0.5})
    hf.save(tmp_path / "a", {"train": Pytree(after)})
    made = load(tmp_path / "a", {"count": 0, "rate": 0.5}, item="train")
    assert equal(made, after)
    assert [one.weak_type for one in made.values()] == [one.weak_type for one in after.values()] == [True, True]
    hf.save(tmp_path / "b", {"train": Pytree({"count": 7, "rate": 0.5})})
    back = load(tmp_path / "b", after, item="train")
    assert equal(back, {"count": jnp.asarray(7), "rate": jnp.asarray(0.5)})


def test_a_cast_that_loses_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Doubles that are loaded where JAX has no 64 bits are named; what loses nothing is not."""
    hf.save(tmp_path / "a", {"train": Pytree({"a": np.ones(3), "b": np.ones(2, np.float32), "k": jax.random.key(0)})})
    like = {"a": jnp.zeros(3), "b": np.zeros(2), "k": jax.random.key(1)}
    assert float(load(tmp_path / "a", like, item="train")["a"].sum()) == 3
    (message,) = caplog.messages
    assert "1 leaves are cast" in message
    assert "a from float64 to float32; if that is not meant" in message


def test_bare_arrays_are_refused(tmp_path: Path) -> None:
    """An array that is not in a Pytree is refused at save time."""
    with pytest.raises(hf.UnsupportedStateError, match=r"state\['x'\]"):
        hf.save(tmp_path / "a", {"x": jnp.ones(3)})


def train(run: str, kill_at: int | None = None) -> Any:
    """Plain SGD on a quadratic, its noise from a key that is part of the state."""
    tree = Pytree({"w": jnp.ones(4), "key": jax.random.key(0)})
    with hf.Checkpointer(run, {"train": tree}, every=2, keep=hf.Keep(last=1, best=1, metric="loss")) as ck:
        while ck.global_step < 9:
            key, use = jax.random.split(tree.value["key"])
            loss, slope = jax.value_and_grad(lambda w, use=use: ((w - jax.random.normal(use, (4,))) ** 2).sum())(
                tree.value["w"]
            )
            tree.value = {"w": tree.value["w"] - 0.1 * slope, "key": key}
            ck.step(loss=float(loss))
            if ck.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return np.asarray(tree.value["w"]).tobytes()


def losses_of(run: str) -> dict[int | None, float]:
    """Steps and losses of the checkpoints that are kept."""
    return {one.step: one.metrics["loss"] for one in hf.Checkpointer(run).checkpoints()}


def test_kill(tmp_path: Path) -> None:
    """Killed and resumed through `Checkpointer`, the weights are the same bits; the best checkpoint stays."""
    run = str(tmp_path / "killed")
    command = [sys.executable, "-c", f"import test_jax; test_jax.train({run!r}, 5)"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    assert subprocess.run(command, env=env, check=False).returncode == -signal.SIGKILL
    assert train(run) == train(str(tmp_path / "alone"))
    alone, kept = losses_of(str(tmp_path / "alone")), losses_of(run)
    assert len(alone) == 2  # the newest and the best
    assert kept == {**alone, 4: kept[4]}  # and the one it was resumed from


def test_two_processes(tmp_path: Path) -> None:
    """Arrays of which two processes have a copy each, in a bucket: a rank is killed, all go on, the same bits."""
    alone = parallel_cases.run(str(tmp_path), "alone")
    assert alone.checkpoint is not None
    with moto_bucket() as uri:
        result = parallel_cases.run(f"{uri}/jax", "killed", kill=3)
        assert len(result.attempts) == 2
        assert list(result.metrics_dataframe["step"]) == [1, 2, 3, 4]
        assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2]  # and the newest, which always stays
        assert result.checkpoint is not None
        found, wanted = (hf.load(one.checkpoint)["train"] for one in (result, alone))
    assert all(torch.equal(found[name], wanted[name]) for name in ("w", "key"))
