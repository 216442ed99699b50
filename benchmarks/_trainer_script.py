"""One case of `benchmarks.trainer`, for Holdfast or Ray Train; told what to do by one JSON argument."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOLD: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}

if TOLD.get("tool") == "ray":
    from ray import train as api
    from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
else:
    import holdfast as api
    from holdfast import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from holdfast.torch import TorchTrainer


def rate(told: dict[str, Any]) -> None:
    """Report metrics as fast as it goes."""
    api.report({"loss": 0.0})
    began, begun = time.time(), time.perf_counter()
    for step in range(told["reports"]):
        api.report({"loss": 1.0 / (step + 1), "step": step})
    note(told, held_per_s=told["reports"] / (time.perf_counter() - begun), began=began)


def directory(told: dict[str, Any]) -> None:
    """Report a big directory: taken over, then copied."""
    values = {}
    for name, extra in (("held_ms", {"checkpoint_upload_mode": api.CheckpointUploadMode.ASYNC}), ("wait_ms", {})):
        folder = tempfile.mkdtemp(dir=told["folder"])
        fill(Path(folder, "model.bin"), told["bytes"])
        begun = time.perf_counter()
        api.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder), **extra)
        values[name] = 1000 * (time.perf_counter() - begun)
    note(told, **values)


def kill(told: dict[str, Any]) -> None:
    """Die once in the middle; note when the first line and the first step after it came."""
    rank = api.get_context().get_world_rank()
    checkpoint = api.get_checkpoint()
    place = Path(told["folder"])
    if checkpoint is None:
        (place / f"first-{rank}").write_text(repr(time.time()))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "x").write_text("1")
            api.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
        time.sleep(1)
        if rank == 1:
            (place / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    (place / f"again-{rank}").write_text(repr(time.time()))


def same(told: dict[str, Any]) -> None:
    """Report the same bytes from every rank."""
    with tempfile.TemporaryDirectory(dir=told["folder"]) as folder:
        fill(Path(folder, "model.bin"), told["bytes"])
        api.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder))


def fill(path: Path, size: int) -> None:
    """Write ``size`` bytes and bring them to the disk, so that nobody waits for somebody else's bytes."""
    block = bytes(range(256)) * 4096
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def note(told: dict[str, Any], **values: float) -> None:
    """Leave figures for the driver."""
    if api.get_context().get_world_rank() == 0:
        Path(told["folder"], "noted.json").write_text(json.dumps(values))


def main() -> None:
    """Run the case and write values.json."""
    place = Path(TOLD["folder"])
    case = TOLD["case"].split("-")[0]
    begun = time.time()
    result = TorchTrainer(
        {"rate": rate, "directory": directory, "kill": kill, "same": same}[case],
        train_loop_config=TOLD,
        scaling_config=ScalingConfig(num_workers=TOLD["workers"]),
        run_config=RunConfig(
            name="run",
            storage_path=str(place / "results"),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    values: dict[str, float] = {}
    if (place / "noted.json").exists():
        values = json.loads((place / "noted.json").read_text())
    if case == "rate":
        # All of them durable: from the first report to the end of fit(), which waits for them.
        values = {"held_per_s": values["held_per_s"], "per_s": TOLD["reports"] / (time.time() - values["began"])}
    elif case == "kill":
        first, again = latest(place, "first"), latest(place, "again")
        values = {"first_line_s": first - begun, "recovery_s": again - float((place / "killed").read_text())}
    elif case == "same":
        stored = sum(one.stat().st_size for one in Path(result.checkpoint.path).rglob("*") if one.is_file())
        values = {"stored": stored / TOLD["bytes"]}
    (place / "values.json").write_text(json.dumps(values))


def latest(place: Path, name: str) -> float:
    """The last of the moments that the ranks noted."""
    return max(float(one.read_text()) for one in place.glob(f"{name}-*"))


if __name__ == "__main__":
    main()
