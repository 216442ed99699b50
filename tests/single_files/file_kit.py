"""What the crash sweep of single files kills, and what it checks afterwards. Runs in children of a fork server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.storage import LocalStorage, Storage
from holdfast.testing import ArmedOps, FaultyStorage
from holdfast.trainers.loop.parallel import Ranks
from holdfast.trainers.loop.saving.files import FileImage, read_note
from holdfast.trainers.loop.saving.folder import FileLeases, SaveFolder

SHAPE = "a*"


def weights(number: int) -> dict[str, torch.Tensor]:
    """Some megabytes that tell which save they are of, and odd ends."""
    return {"w": torch.full((1 << 19,), float(number)), "v": torch.full((7,), number, dtype=torch.uint8)}


def image(number: int, suffix: str) -> FileImage:
    """The file of one save in memory."""
    made = FileImage()
    if suffix == ".pt":
        made.take_torch({"state": {"model": weights(number)}}, {"step": number})
    else:
        made.take_weights(weights(number), {"step": number})
    return made


def store(storage: Storage, number: int, suffix: str, *, ops: ArmedOps | None = None, at: int | None = None) -> None:
    """One life: take the name, store one file, give the name back."""
    claims = FileLeases(storage, Ranks())
    if ops is not None:
        ops.arm(crash_after=at)
    claims.take(SHAPE)
    made = image(number, suffix)
    try:
        claims.submit(SHAPE, f"a1{suffix}", made).result(60)
    finally:
        claims.release(patient=True)
        made.close()


def prepare(root: str, suffix: str) -> None:
    """The first save."""
    store(LocalStorage(root), 1, suffix)


def replace_it(root: str, suffix: str, at: int | None) -> int:
    """Save again under the same name; the process ends before disk operation ``at``. Returns how many there are."""
    ops = ArmedOps()
    store(FaultyStorage(root, ops=ops), 2, suffix, ops=ops, at=at)
    return ops.since


def writer_dies(root: str, suffix: str, at: int, marker: str | None) -> dict[str, Any]:
    """Save again with a writer process that is killed before its operation ``at``: once, or each time."""
    once = {} if marker is None else {"crash_once": marker}
    storage = FaultyStorage(root, crash_at=at, **once)
    try:
        store(storage, 2, suffix)
    except HoldfastError as error:
        return {"error": str(error)}
    return {"error": None}


def look(root: str, suffix: str) -> int:
    """One complete file is there, an old or a new one, and after the next start nothing else."""
    folder = SaveFolder(root)
    folder.open(claim=SHAPE)
    folder.close("looked")
    left = sorted(path.name for path in Path(root).iterdir())
    assert left == [f"a1{suffix}"], left
    return loaded(Path(root) / f"a1{suffix}")


def loaded(path: Path) -> int:
    """Return which save a file holds; its digest and all of its tensors are right."""
    note = read_note(LocalStorage(path.parent), path.name, verify=True)
    assert note is not None
    if path.suffix == ".pt":
        found = torch.load(path, weights_only=True)["state"]["model"]
    else:
        from safetensors.torch import load_file

        found = load_file(path)
    for name, tensor in weights(note["step"]).items():
        assert torch.equal(found[name], tensor), name
    return int(note["step"])


def damage(path: Path, at: float) -> None:
    """Flip a bit at a share of the file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)
