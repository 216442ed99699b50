"""The Ray engine beside Ray Train, on one cluster of several raylets on this machine: start, recovery, reports.

    HOLDFAST_RAY_PYTHON -m benchmarks.ray_cluster [--tools holdfast,ray] [--cases start,worker,node,rate,directory]

Not part of `make bench`: it needs an interpreter with `ray[train]`, torch and Holdfast. Each case runs on a warm
cluster of a head without CPUs and three nodes of two CPUs, one of them a spare. "directory" reports 256 MiB from each
of two nodes, several times, and takes the median of the slower rank's `report()`. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_STORE = 80 << 20
_LIMIT_S = 300.0
_MIB = 256  # of each rank
_REPORTS = 5
_STEADY_S = 20.0  # a run is disturbed when it has gone on for so long, whichever tool runs it


def train(config: dict[str, Any]) -> None:
    """Note when the first line came; in the first life wait for the fault, in the second note the first step."""
    if config["tool"] == "ray":
        from ray import train as api
        from ray.train import Checkpoint
    else:
        import holdfast as api  # type: ignore[no-redef]
        from holdfast import Checkpoint  # type: ignore[assignment]

    place, rank = Path(config["folder"]), api.get_context().get_world_rank()
    if config["case"] == "directory":
        note(place / f"first-{rank}", pid=os.getpid())
        report_directories(api, Checkpoint, place, rank)
        return
    checkpoint = api.get_checkpoint()
    note(place / f"{'first' if checkpoint is None else 'again'}-{rank}", pid=os.getpid())
    if config["case"] == "rate" or checkpoint is not None:
        begun = time.time()
        for step in range(config["reports"]):
            api.report({"step": step})
        note(place / f"reported-{rank}", begun=begun)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x").write_text("1")
        api.report({"step": 0}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
    api.report({"step": 1})  # the one before is committed
    note(place / f"waiting-{rank}", pid=os.getpid())
    if config["case"] != "start":
        time.sleep(_LIMIT_S)


def report_directories(api: Any, checkpoint_class: Any, place: Path, rank: int) -> None:
    """Report a directory of 256 MiB a few times; each one is written anew before."""
    block = os.urandom(1 << 20)
    for number in range(_REPORTS):
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            for half in range(2):
                with Path(folder, f"shard-{rank}-{half}.bin").open("wb") as file:
                    for _ in range(_MIB // 2):
                        file.write(block)
            begun = time.monotonic()
            api.report({"number": number}, checkpoint=checkpoint_class.from_directory(folder))
            note(place / f"stored-{number}-{rank}", seconds=time.monotonic() - begun)


def note(path: Path, **options: float) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"at": time.time(), **options}))
    part.rename(path)


def noted(place: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in sorted(place.glob(f"{name}-?"))]


def measure(tool: str, case: str, reports: int) -> dict[str, float]:
    """Run one case on a cluster of its own, warmed by one trivial fit()."""
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    root = Path(tempfile.mkdtemp(prefix="ray-bench-"))
    try:
        # Ray Train's controller wants a CPU of its own; both tools get the same cluster.
        nodes = [cluster.add_node(num_cpus=2, object_store_memory=_STORE) for _ in range(3)]
        ray.init(address=cluster.address, log_to_driver=False)
        fit(tool, "start", root / "warm", 0)
        place = root / case
        fault = threading.Thread(target=disturb, args=(case, place, cluster, nodes), daemon=True)
        fault.start()
        begun = time.time()
        fit(tool, case, place, reports)
        ended = time.time()
        values = {"first_line_s": max(one["at"] for one in noted(place, "first")) - begun}
        if case == "directory":
            slower = [max(one["seconds"] for one in noted(place, f"stored-{number}")) for number in range(_REPORTS)]
            values["report_s"], values["longest_s"] = statistics.median(slower), max(slower)
        elif case == "rate":
            values["per_s"] = reports / (ended - min(one["begun"] for one in noted(place, "reported")))
        elif case != "start":
            killed = json.loads((place / "killed").read_text())["at"]
            values["recovery_s"] = max(one["at"] for one in noted(place, "again")) - killed
        return values
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(root, ignore_errors=True)


def fit(tool: str, case: str, place: Path, reports: int) -> None:
    place.mkdir(parents=True)
    config = {"tool": tool, "case": case, "folder": str(place), "reports": reports}
    more: dict[str, Any] = {}
    if tool == "ray":
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    else:
        from holdfast import FailureConfig, RunConfig, ScalingConfig  # type: ignore[assignment]
        from holdfast.torch import TorchTrainer  # type: ignore[assignment]

        more = {"engine": "ray"}
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD", **more),
        run_config=RunConfig(name="run", storage_path=str(place), failure_config=FailureConfig(max_failures=2)),
    ).fit()


def disturb(case: str, place: Path, cluster: Any, nodes: list[Any]) -> None:
    """Kill a worker, or the node of rank 1, once all wait."""
    if case not in ("worker", "node"):
        return
    while len(noted(place, "waiting")) < 2:
        time.sleep(0.05)
    time.sleep(_STEADY_S)
    pid = int(noted(place, "waiting")[1]["pid"])
    note(place / "killed")
    if case == "worker":
        os.kill(pid, signal.SIGKILL)
    else:
        above = lineage(pid)
        node = next(one for one in nodes if one.all_processes["raylet"][0].process.pid in above)
        cluster.remove_node(node, allow_graceful=False)


def lineage(pid: int) -> list[int]:
    """Give the processes that a process descends from."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def main() -> None:
    """Run the cases, both tools one after the other in each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default="holdfast,ray")
    parser.add_argument("--cases", default="start,worker,node,rate,directory")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for case in options.cases.split(","):
        for tool in options.tools.split(","):
            reports = 0 if case != "rate" else 20_000 if tool == "holdfast" else 10
            print(json.dumps({"case": case, "tool": tool, **measure(tool, case, reports)}), flush=True)


if __name__ == "__main__":
    main()
