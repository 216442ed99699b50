"""What grows: requests, waits and seconds against sizes in powers of ten. A slope of 0 is flat, 1 is in proportion.

The rows here are of object stores: an S3 server on this machine behind a proxy that lets each answer take 100 ms, as a
store far away does. *Waits* are the requests made one after another: two that arrive within less than an answer takes
do not wait for each other. A row is a function in `_ROWS`; `growth_local` has those of a local disk.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

import holdfast as hf
from holdfast.format.commit import PartSummary, read_manifest
from holdfast.format.digest import bytes_digest
from holdfast.format.manifest import FileEntry
from holdfast.format.names import MANIFEST_NAME
from holdfast.format.parts import put_part
from holdfast.run.catalog import Catalog
from holdfast.run.record import Sidecar, pack, record_from_manifest
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.storage.together import together
from holdfast.testing import Exchange, Fault, FaultProxy
from holdfast.writer.messages import PartsJob
from holdfast.writer.save import commit_parts

from .bench import Context, Goal, Outcome, remove
from .remote_clients import BUCKET, Server, run_server

__all__ = ["run", "slope"]

_DELAY_S = 0.1


def run(context: Context) -> Outcome:
    """Measure each thing that grows."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        folder = context.folder("server")
        stack.callback(remove, folder)
        server = stack.enter_context(run_server(folder, outcome.notes, quick=True))
        far = Far(context, outcome, server, stack.enter_context(FaultProxy(server.url)))
        for row in _ROWS:
            row(far)
    return outcome


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent by which a value grows with the size."""
    return math.log(max(values[-1], 1e-9) / max(values[0], 1e-9)) / math.log(sizes[-1] / sizes[0])


@dataclass(slots=True)
class Far:
    """A store behind a proxy: what every row here needs."""

    context: Context
    outcome: Outcome
    server: Server
    proxy: FaultProxy

    def storage(self, prefix: str, *, slow: bool = True) -> ObjectStorage:
        """Return a place at the store; not ``slow`` to prepare something there."""
        options = {"access_key_id": self.server.key, "secret_access_key": self.server.secret}
        endpoint = self.proxy.url if slow else self.server.url
        return ObjectStorage(f"s3://{BUCKET}/{prefix}", {"endpoint": endpoint, **options})

    @contextlib.contextmanager
    def counted(self, method: str) -> Iterator[None]:
        """Record what the requests of a block cost."""
        self.proxy.inject(Fault(kind="slow", seconds=_DELAY_S))
        self.proxy.forget()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        found = self.proxy.exchanges
        self.proxy.inject()
        self.outcome.add(method, seconds=seconds, requests=len(found), waits=_waits(found))
        self.context.say(f"{method}: {len(found)} requests, {_waits(found)} waits, {seconds:.1f} s")

    def judge(self, what: str, sizes: Sequence[int], *, requests: float | None, waits: float | None) -> None:
        """Set goals for the largest size, and say how the requests grow up to there."""
        for kind, at_most in (("requests", requests), ("waits", waits)):
            values = [self.outcome.median(what.format(size), kind) for size in sizes]
            grows = slope(sizes, values)
            self.outcome.ratios[f"{what.format(sizes[-1])}: slope of {kind}"] = grows
            self.outcome.goals.append(
                Goal(
                    what=f"{what.format(sizes[-1])}: {kind}",
                    value=values[-1],
                    unit="",
                    at_most=at_most,
                    note=f"slope {grows:.2f} from {sizes[0]}",
                )
            )


def _waits(exchanges: Sequence[Exchange]) -> int:
    count, begun = 0, -math.inf
    for at in sorted(one.arrived for one in exchanges):
        if at >= begun + _DELAY_S:
            count, begun = count + 1, at
    return count


def _state() -> dict[str, object]:
    model = torch.nn.Linear(8, 8)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def _fabricate(storage: ObjectStorage, count: int) -> None:
    """Save one checkpoint, and repeat it."""
    with contextlib.redirect_stderr(io.StringIO()), hf.Checkpointer(storage, _state(), every=None, keep=None) as ck:
        ck.step(loss=1.0)
        ck.save()
    catalog = Catalog(storage)
    first = catalog.records()[0].name
    manifest = read_manifest(storage, first)
    files = [(entry.path, storage.read(f"{first}/{entry.path}")) for entry in manifest.files]

    def one(step: int) -> None:
        name = f"step_{step:08d}"
        another = replace(manifest, step=step, checkpoint_id=f"{step:016x}")
        for path, data in [*files, (MANIFEST_NAME, another.to_bytes())]:
            storage.put(f"{name}/{path}", data)
        catalog.index.rows[name] = pack(record_from_manifest(name, another, Sidecar()))

    together(storage, [partial(one, step) for step in range(2, count + 1)])
    catalog.index.save()


def _checkpoints(far: Far) -> None:
    """Runs of growing size: enter, save, and let nearly all of it be deleted."""
    sizes = (3, 30) if far.context.quick else (10, 100, 1000)
    for count in sizes:
        _fabricate(far.storage(f"run-{count}", slow=False), count)
        storage, errors = far.storage(f"run-{count}"), io.StringIO()
        with contextlib.redirect_stderr(errors):
            with far.counted(f"enter a run of {count} checkpoints"):
                ck = hf.Checkpointer(storage, _state(), every=None, keep=None).__enter__()
            for turn in range(2):
                ck.step(loss=float(turn))
                torch.nn.init.normal_(ck.state["model"].weight)
                with far.counted(f"save into a run of {count} checkpoints"):
                    ck.save()
                    ck.wait()
            ck.__exit__(None, None, None)
            ck = hf.Checkpointer(storage, _state(), every=None, keep=hf.Keep(last=2)).__enter__()
            ck.step(loss=2.0)
            with far.counted(f"save and keep 2 of {count} checkpoints"):
                ck.save()
                ck.wait()
            ck.__exit__(None, None, None)
    far.judge("enter a run of {} checkpoints", sizes, requests=30, waits=13)
    far.judge("save into a run of {} checkpoints", sizes, requests=None, waits=3)
    far.judge("save and keep 2 of {} checkpoints", sizes, requests=40, waits=None)


def _ranks(far: Far) -> None:
    """Checkpoints of a growing number of ranks, each with a file of its own: commit, read the small files, delete."""
    sizes = (2, 20) if far.context.quick else (10, 100)
    for count in sizes:
        storage, save = far.storage(f"ranks-{count}"), "0badc0de-1"

        def part(rank: int, storage: ObjectStorage = storage, save: str = save) -> None:
            path = f"model-{rank:05d}-{save}.safetensors"
            with storage.create(f"one/{path}", 4) as file:
                file.write(memoryview(b"1234"))
            entry = FileEntry(path=path, size=4, digest=bytes_digest(b"1234"), role="model", writer=rank)
            put_part(storage, "one", save, PartSummary(writer=rank, files=(entry,)))

        together(storage, [partial(part, rank) for rank in range(count)])
        job = PartsJob(directory="one", save_id=save, writers=tuple(range(count)), manifest={"checkpoint_id": save})
        with far.counted(f"commit {count} ranks"):
            commit_parts(storage, job, None, again=False)
        with far.counted(f"delete a checkpoint of {count} ranks"):
            hf.Checkpoint.at(storage, "one").delete()
    far.judge("commit {} ranks", sizes, requests=None, waits=12)
    far.judge("delete a checkpoint of {} ranks", sizes, requests=12, waits=8)


_ROWS: tuple[Callable[[Far], None], ...] = (_checkpoints, _ranks)
