"""Every damaged bit of a checkpoint is found, its tensor named, and an older checkpoint is taken instead."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from pathlib import Path

import pytest
import torch
from catalog_kit import index_of

import holdfast as hf
from holdfast.errors import CheckpointError, CorruptCheckpointError
from holdfast.format.commit import read_manifest
from holdfast.format.index import Index
from holdfast.format.names import save_id_of
from holdfast.storage import LocalStorage
from holdfast.testing import FaultyOps, FaultyStorage, assert_state_equal


def make_state(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 100)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": ["text", 1.5, {"a": (1, 2)}]}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of a few hundred KiB."""
    home = tmp_path_factory.mktemp("rot") / "good"
    hf.save(home, make_state())
    assert len(list(home.iterdir())) >= 5
    return home


def damage(home, path, offset, mask):
    target = home / path
    data = bytearray(target.read_bytes())
    data[offset] ^= mask
    target.write_bytes(data)


def tensors_at(good, path, offset):
    """Names of the tensors whose bytes share the 64 KiB chunk with this one; none outside of tensor files."""
    storage = LocalStorage(good)
    manifest = read_manifest(storage, "")
    found = []
    for entry in manifest.with_role("index"):
        index = Index.from_bytes(storage.read(entry.path), where=entry.path, save_id=save_id_of(entry.path))
        for tensor in index.tensors.values():
            for piece in tensor.pieces:
                chunk = offset // 65536 * 65536
                if piece.file == path and piece.offset < chunk + 65536 and piece.offset + piece.nbytes > chunk:
                    found.append((tensor.name, piece.offset <= offset < piece.offset + piece.nbytes))
    return found


def check_found(home, good, what, path, offset=None):
    """`verify` and `load` both see it; a tensor is named where there is one."""
    result = hf.Checkpoint(home).verify()
    assert not result.ok, f"verify did not see {what}"
    with pytest.raises(CheckpointError) as caught:
        hf.load(home)
    assert isinstance(caught.value, CorruptCheckpointError), f"{what}: {caught.value!r}"
    live = make_state(seed=1)
    with pytest.raises(CorruptCheckpointError):
        hf.load(home, into=live)
    if offset is None:
        return
    near = tensors_at(good, path, offset)
    exact = [name for name, inside in near if inside]
    if exact:
        # Of many small tensors in one chunk verify shows a few and counts the rest.
        told = [problem for problem in result.problems if any(name in problem for name in exact) or " more" in problem]
        assert told, (what, exact, result.problems)
        assert caught.value.tensor in [name for name, _ in near], (what, caught.value)
        assert str(caught.value.tensor) in str(caught.value)


def flip(good, tmp_path, count, seed):
    chance = random.Random(seed)
    home = tmp_path / "copy"
    shutil.copytree(good, home)
    # A file at a time first, so that small files are hit as often as big ones.
    files = sorted(path.relative_to(good).as_posix() for path in good.rglob("*") if path.is_file())
    hit = set()
    for _ in range(count):
        path = chance.choice(files)
        offset, mask = chance.randrange((good / path).stat().st_size), 1 << chance.randrange(8)
        damage(home, path, offset, mask)
        check_found(home, good, f"bit {mask:#04x} of byte {offset} of {path}", path, offset)
        damage(home, path, offset, mask)
        hit.add(path)
    assert hf.Checkpoint(home).verify().ok, "undone again"
    assert_state_equal(hf.load(home)["note"], make_state()["note"])
    assert len(hit) == len(files)


def test_flips(good, tmp_path):
    """Sixty single bits at random places in manifest, index, state, digests and tensors: all are found."""
    flip(good, tmp_path, 60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_more_flips(good, tmp_path, seed):
    """Five times a hundred."""
    flip(good, tmp_path, 100, seed)


def test_truncation_and_growth(good, tmp_path):
    """Each file cut by one byte, cut to nothing, removed, or with a byte more: found."""
    for path in sorted(one.name for one in good.iterdir()):
        size = (good / path).stat().st_size
        for what in ("short", "empty", "gone", "long"):
            home = tmp_path / f"{path}-{what}"
            shutil.copytree(good, home)
            if what == "gone":
                (home / path).unlink()
            elif what == "long":
                with (home / path).open("ab") as out:
                    out.write(b"\0")
            else:
                with (home / path).open("r+b") as out:
                    out.truncate(size - 1 if what == "short" else 0)
            result = hf.Checkpoint(home).verify()
            assert not result.ok, (path, what)
            if what != "long":  # bytes behind the end change nothing that is loaded
                with pytest.raises(CheckpointError):
                    hf.load(home)
            shutil.rmtree(home)


def test_swapped_files(good, tmp_path):
    """Two tensor files exchanged, or one from another checkpoint of the same layout: found."""
    other = tmp_path / "other"
    hf.save(other, make_state(seed=5))
    mine = {save_free(one.name): one.name for one in good.iterdir()}
    theirs = {save_free(one.name): one.name for one in other.iterdir()}
    assert mine.keys() == theirs.keys()
    for kind, name in mine.items():
        if kind == "manifest.json":
            continue
        home = tmp_path / f"swap-{kind}"
        shutil.copytree(good, home)
        shutil.copy(other / theirs[kind], home / name)
        if (other / theirs[kind]).read_bytes() == (good / name).read_bytes():
            continue
        check_found(home, good, f"foreign {kind}", name)
    home = tmp_path / "exchange"
    shutil.copytree(good, home)
    one, two = sorted(path for path in home.glob("*.safetensors"))[:2]
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    check_found(home, good, "exchanged files", one.name)


def save_free(name):
    save = save_id_of(name)
    return name if save is None else name.replace(save, "")


@pytest.mark.parametrize("kind", ["manifest", "index", "state", "digests", "tensors"])
def test_an_older_one_is_taken(tmp_path, kind):
    """The newest checkpoint damaged: auto takes the older one, says so, quarantines the bad one, leaves its files."""

    def start(state):
        return hf.Checkpointer(FaultyStorage(tmp_path, ops=FaultyOps()), state, every=None)

    with start({"model": torch.nn.Linear(3, 3)}) as ck:
        for _ in range(2):
            ck.step()
            ck.save()
    home = tmp_path / "step_00000002"
    manifest = read_manifest(LocalStorage(home), "")
    name = "manifest.json" if kind == "manifest" else manifest.with_role(kind)[0].path
    damage(home, name, (home / name).stat().st_size // 2, 4)
    before = {path: path.read_bytes() for path in home.iterdir()}
    said = io.StringIO()
    with contextlib.redirect_stderr(said), start({"model": torch.nn.Linear(3, 3)}) as ck:
        assert ck.global_step == 1
        ck.step()
        ck.save()
    assert "step_00000002" in said.getvalue()
    assert "step_00000002" in index_of(tmp_path).quarantined
    assert {path: path.read_bytes() for path in home.iterdir()} == before, "the bad one is left alone"
    with contextlib.redirect_stderr(io.StringIO()), start({"model": torch.nn.Linear(3, 3)}) as ck:
        assert ck.global_step == 2, "the step was saved again, under another name"
        assert Path(str(ck.resumed_from.path)).name != "step_00000002"


def test_none_good_is_an_error(tmp_path):
    """All checkpoints damaged: CorruptCheckpointError that lists each; never a silent start from zero."""
    with hf.Checkpointer(tmp_path, {"x": torch.zeros(3)}, every=None) as ck:
        for _ in range(2):
            ck.step()
            ck.save()
    for home in tmp_path.glob("step_*"):
        damage(home, "manifest.json", 100, 1)
    with pytest.raises(CorruptCheckpointError) as caught, hf.Checkpointer(tmp_path, {"x": torch.zeros(3)}, every=None):
        raise AssertionError("the body must not run")
    assert all(name in str(caught.value) for name in ("step_00000001", "step_00000002"))
