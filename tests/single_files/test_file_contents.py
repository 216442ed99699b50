"""The bytes of a single file that the writer process stores: those of the format, and damage to them is found."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import file_kit as kit
import pytest
import torch

from holdfast.errors import CorruptCheckpointError
from holdfast.state.save.torch_file import TorchFileWriter
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.trainers.loop.parallel import Ranks
from holdfast.trainers.loop.saving.files import FileImage, read_note
from holdfast.trainers.loop.saving.folder import FileLeases

SUFFIXES = [".pt", ".safetensors"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_bytes_are_those_of_the_format(tmp_path: Path, suffix: str) -> None:
    """Many tensors, one larger than what is written at once, odd ends: the file is what any reader expects."""
    model = {f"m{number}": torch.full((number % 5, 3), number, dtype=torch.int16) for number in range(300)}
    model["big"] = torch.arange(18 << 20, dtype=torch.float32)
    model["end"] = torch.arange(13, dtype=torch.uint8)
    image, path = FileImage(), tmp_path / f"a1{suffix}"
    note = {"step": 3, "metrics": {"xxh3:" + "0" * 32: 1.0}, "attempt": 1}
    if suffix == ".pt":
        image.take_torch(model, note)
    else:
        image.take_weights(model, note)
    for storage in (LocalStorage(tmp_path), MemoryStorage(f"files{suffix}")):  # the second in one upload
        claims = FileLeases(storage, Ranks())
        claims.take("a*")
        result = claims.submit("a*", path.name, image).result(60)
        claims.release(patient=True)
        assert result.bytes_total == result.bytes_written == storage.stat(path.name).size
        assert result.seconds.keys() == {"digest", "write", "commit", "total"}
        found = read_note(storage, path.name, verify=True)
        assert found is not None
        assert {name: found[name] for name in note} == note
    image.close()
    data = path.read_bytes()
    assert storage.read(path.name) == data
    if suffix == ".pt":
        told = zipfile.ZipFile(path).read("archive/holdfast.json")
        expected = io.BytesIO()
        TorchFileWriter(model, records={"holdfast.json": told}).write(expected.write)
        assert data == expected.getvalue()
        assert zipfile.ZipFile(path).testzip() is None
        loaded = torch.load(path, weights_only=True)
    else:
        from safetensors.torch import load_file

        loaded = load_file(path)
    assert loaded.keys() == model.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("at", [0.3, 0.999])
def test_damage_is_found_by_the_digest(tmp_path: Path, suffix: str, at: float) -> None:
    """A bit that flips later in what the writer has stored does not pass for what was saved."""
    kit.prepare(str(tmp_path), suffix)
    path = tmp_path / f"a1{suffix}"
    assert kit.loaded(path) == 1
    kit.damage(path, at if suffix == ".safetensors" else 0.3)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        read_note(LocalStorage(tmp_path), path.name, verify=True)
