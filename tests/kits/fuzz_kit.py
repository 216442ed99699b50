"""A structure-aware fuzzer of checkpoints: changes the meaning of a file and makes every digest right again.

Each case is a number: the same number makes the same change, on any machine.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import signal
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_kit import invoke

import holdfast as hf
from holdfast.checkpoint import summary
from holdfast.format.contents import ContentsReader
from holdfast.format.digest import bytes_digest, chunk_digests, file_digest
from holdfast.format.manifest import Manifest
from holdfast.run.catalog import Catalog
from holdfast.storage import LocalStorage

__all__ = [
    "ABSURD", "FILES", "absurd", "command", "commands_of", "copy_of", "forget", "fuzz", "limit", "make", "newest",
    "replace", "use",
]  # fmt: skip

FILES = ("manifest", "index", "state", "rank", "metrics", "metadata", "run", "reports")
SECONDS = 20  # a case takes milliseconds; one that runs for so long is a finding


class Counter_:
    """An object of the user with a state of its own."""

    def __init__(self) -> None:
        self.state = {"n": 1, "seen": [1, 2, 3], "t": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def live() -> dict[str, Any]:
    """Something of everything that can be restored."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}])
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "counter": Counter_(),
        "rng": hf.RNG,
        "mine": hf.PerRank({"at": 3, "t": torch.ones(2)}),
        "array": np.arange(4.0),
        "generator": torch.Generator().manual_seed(3),
        "plain": {"a": [1, 2.5, None, "ü"], "t": (1, 2), "s": {1, 2}, "b": b"x", "o": OrderedDict(a=1), (1, 2): 3},
        "queue": deque([1, 2], maxlen=3),
        "tensors": [torch.zeros(2), torch.ones(2, dtype=torch.bfloat16)],
        "step": 7,
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
    }


def make(home: Path) -> Path:
    """Make a run with one checkpoint of everything, reports and late metrics; return the run."""
    run = home / "run"
    with hf.Checkpointer(run, live(), every=1) as ck:
        ck.step(loss=1.0)
        ck.step(loss=0.5)
        ck.report(val=2.0)
    checkpoint = hf.Checkpoint(newest(run))
    checkpoint.set_metadata({"who": "me", "deep": [1, {"a": 2}]})
    storage = LocalStorage(run)
    catalog = Catalog(storage)
    catalog.set_metrics(newest(run).name, {"late": 3.0})
    return run


def newest(run: Path) -> Path:
    """Return the directory of the newest checkpoint."""
    return max(path for path in run.iterdir() if path.name.startswith("step_"))


# -- changes ----------------------------------------------------------------------------------------------------------

_DEEP: Any = 1
for _ in range(150):
    _DEEP = [_DEEP]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, "", "a", "\ud800", "a/b", "../x",
    "/etc/passwd", "x" * 5000, "\x1b[2J", "\0", [], [[]], [1, "a"], {}, {"a": 1}, {"": 1}, [{}], _DEEP,
    {"$": 1}, {"$": None}, {"$": "tensor"}, {"$": "tensor", "n": 3}, {"$": "tensor", "n": "model/0.weight"},
    {"$": "tensor", "n": "model/0.weight", "k": "array", "dt": "|O", "sh": [4, 4]},
    {"$": "tensor", "n": "model/0.weight", "k": "array", "dt": "<f4", "sh": [2**50, 4]},
    {"$": "tensor", "n": "nowhere"}, {"$": "tensors", "at": "model/", "k": 7, "o": True},
    {"$": "tensors", "at": 1, "k": ["0.weight"], "o": True}, {"$": "tensors", "at": "model/", "k": ["0.weight", 3]},
    {"$": "object", "type": 1, "kind": [], "state": {}}, {"$": "object", "type": "X", "kind": "optimizer", "state": 3},
    {"$": "object", "type": "X", "kind": "metric", "state": [1]}, {"$": "per_rank", "key": []},
    {"$": "per_rank", "key": "mine"}, {"$": "rng", "key": 3}, {"$": "rng", "key": "mine"}, {"$": "rng", "key": "gone"},
    {"$": "tuple", "v": 3}, {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[[1], 2]]}, {"$": "set", "v": [[1]]},
    {"$": "namedtuple", "n": "A", "f": ["x"], "v": []}, {"$": "namedtuple", "n": 1, "f": "xy", "v": [1, 2]},
    {"$": "range", "v": [0, 10**11, 1]}, {"$": "range", "v": [0, 1, 0]}, {"$": "deque", "v": [1], "m": -1},
    {"$": "float", "v": "zz"}, {"$": "bytes", "v": "!"}, {"$": "bigint", "v": "0x" + "f" * 5000},
    {"$": "torch", "v": 1}, {"$": "torch", "t": "dtype", "v": "load"}, {"$": "npscalar", "v": ["|O", 1]},
    {"$": "ddict", "f": "eval", "v": []}, {"$": "str", "v": "ff"}, {"$": "slice", "v": [1]}, {"$": "unknown"},
)  # fmt: skip


def paths(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Iterate over all places of a tree."""
    yield at
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from paths(item, (*at, key))
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from paths(item, (*at, number))


def reach(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def mutate(tree: Any, chance: random.Random) -> Any:
    """Change one to three things."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(paths(tree))
        path = chance.choice(places)
        what = chance.randrange(8)
        if not path:
            if chance.random() < 0.05:
                return copy.deepcopy(chance.choice(VALUES))
            continue
        home, last = reach(tree, path[:-1]), path[-1]
        value = home[last]
        if what <= 2:
            home[last] = copy.deepcopy(chance.choice(VALUES))
        elif what == 3:
            home[last] = copy.deepcopy(reach(tree, chance.choice(places)))  # something else of the same tree
        elif what == 4:
            del home[last]
        elif what == 5 and isinstance(home, dict):
            home[chance.choice(("$", "v", "", "\ud800", f"{last}x", "state", "param_groups"))] = home.pop(last)
        elif what == 6 and isinstance(home, list):
            home.insert(chance.randrange(len(home) + 1), copy.deepcopy(value))
        elif type(value) is int:
            home[last] = chance.choice(
                (value + 1, -value, value * 1000, value ^ 1 << chance.randrange(64), value % 7 / 2)
            )
        elif isinstance(value, str) and value:
            spot = chance.randrange(len(value))
            home[last] = value[:spot] + chance.choice(("", "x", "/", "0", "\udcff", "é")) + value[spot + 1 :]
        else:
            home[last] = {"a": value} if chance.random() < 0.5 else [value]
    return tree


# -- files ------------------------------------------------------------------------------------------------------------


def _dump(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def _sign(home: Path, body: Any) -> None:
    if not isinstance(body, dict):
        (home / "manifest.json").write_bytes(_dump(body))
        return
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items() if key != "body_digest"]
    text = ("{\n" + ",\n".join(lines)).encode()
    (home / "manifest.json").write_bytes(text + f',\n"body_digest": "{bytes_digest(text)}"\n}}\n'.encode())


def replace(run: Path, role: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file of the newest checkpoint, by its role, and sign it."""
    home = newest(run)
    body = json.loads((home / "manifest.json").read_bytes())
    entry = next(one for one in body["files"] if one["role"] == role)
    data = _dump(change(json.loads((home / entry["path"]).read_bytes())))
    (home / entry["path"]).write_bytes(data)
    entry["size"], entry["digest"] = len(data), file_digest(chunk_digests(data))
    entry.pop("chunks", None)
    _sign(home, body)


def fuzz(run: Path, what: str, number: int) -> None:
    """Apply the change of a number to one kind of file of a run."""
    chance = random.Random(f"{what} {number}")
    home = newest(run)

    def change(tree: Any) -> Any:
        return mutate(tree, chance)

    if what == "manifest":
        _sign(home, change(json.loads((home / "manifest.json").read_bytes())))
    elif what in ("index", "state", "rank"):
        replace(run, what, change)
    elif what in ("metrics", "metadata"):
        path = home / f".{what}.json"
        path.write_bytes(_dump(change(json.loads(path.read_bytes()))))
    elif what == "run":
        body = json.loads((run / "run.json").read_bytes())
        for digest in ("head_digest", "rows_digest"):  # as an early version wrote it: nothing else is in the way
            body.pop(digest, None)
        body["rows"] = [[*row[:3], json.loads(row[3])] for row in body["rows"]]
        body = change(body)
        if isinstance(body, dict) and isinstance(body.get("rows"), list):
            body["rows"] = [
                [*row[:3], json.dumps(row[3])] if isinstance(row, list) and len(row) > 3 else row
                for row in body["rows"]
            ]
        (run / "run.json").write_bytes(_dump(body))
    else:
        path = sorted((run / "reports").iterdir())[0]
        rows = change([json.loads(line) for line in path.read_bytes().splitlines()])
        path.write_bytes(b"\n".join(_dump(row) for row in rows) if isinstance(rows, list) else _dump(rows))


# -- absurd, and signed ------------------------------------------------------------------------------------------------

SHAPES: tuple[Any, ...] = (
    [2**50], [0, 2**61, 2**61], [2**61, 0, 2**61], [0, 2**40, 2**40], [2**62], [2**63], [2**64], [-1], [1.5], ["4"],
    [[4]], [1] * 70, [], [True], [4, 4, 2**50], [10**400], None, "44", {"4": 4}, 7,
)  # fmt: skip
PIECES: tuple[Any, ...] = (
    [], None, [[]], [[0, 0, 0]], [[0, 0, 2**50]], [[0, 2**61, 64]], [[99, 0, 64]], [[0, 0, 64], [0, 0, 64]],
    [[0, 0, 32, [0, 0], [2, 4]]], [[0, 0, 32, [2, 0], [4, 4]]], [[0, 0, 64, [2**61, 0], [4, 4]]], [[0, 0, 10**400]],
)  # fmt: skip
BIG = {"$": "bigint", "v": "0x" + "f" * 5000}
MANIFEST_FIELDS = (
    "run_id", "checkpoint_id", "parent", "attempt", "step", "epoch", "created", "metrics", "world_size", "writers",
    "versions", "total_bytes", "reused_bytes", "files", "extra", "format_version",
)  # fmt: skip
FILE_FIELDS = ("path", "size", "digest", "role", "writer", "reused_from", "chunks")
_WORDS = (*VALUES, BIG, [BIG], {"a": BIG}, {"loss": BIG}, 10**400, [10**400])

ABSURD: tuple[tuple[str, Any, Any], ...] = (
    *(("shape", row, shape) for row in (0, 3) for shape in SHAPES),
    *(("pieces", row, pieces) for row in (0, 3) for pieces in PIECES),
    *(("dtype", 0, value) for value in ("float4096", "object", "", "int8", 7, None, BIG)),
    *(("field", name, value) for name in MANIFEST_FIELDS for value in _WORDS),
    *(("entry", name, value) for name in FILE_FIELDS for value in _WORDS),
)
"""Signed files that say what cannot be: (kind, place, value)."""


def absurd(run: Path, kind: str, place: Any, value: Any) -> None:
    """Put an absurd value into the newest checkpoint of a run, and make every digest right."""
    if kind in ("shape", "pieces", "dtype"):
        column = {"dtype": 1, "shape": 2, "pieces": 3}[kind]

        def change(index: Any) -> Any:
            index["tensors"][place][column] = copy.deepcopy(value)
            return index

        replace(run, "index", change)
        return
    home = newest(run)
    body = json.loads((home / "manifest.json").read_bytes())
    (body if kind == "field" else body["files"][0])[place] = copy.deepcopy(value)
    _sign(home, body)


# -- use --------------------------------------------------------------------------------------------------------------


class TooSlow(Exception):
    """A case took longer than any may."""


@contextmanager
def limit(seconds: int = SECONDS) -> Iterator[None]:
    """Stop a case that does not end."""

    def stop(*_: object) -> None:
        raise TooSlow(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def commands_of(run: Path, home: Path) -> Iterator[tuple[str, ...]]:
    """Iterate over commands that look at a run and a checkpoint."""
    for more in ((), ("--json",)):
        for name in ("ls", "stats", "verify", "log", "prune"):
            yield (name, str(run), *more)
        for name in ("show", "verify"):
            yield (name, str(home), *more)
        yield ("diff", str(home), str(home), *more)
    yield ("page", str(run), "--json")


def command(*arguments: str) -> str:
    """Run a command; return what it printed on both streams. An error that it does not put into words comes through."""
    result = invoke(*arguments, code=None)
    return result.stdout + result.stderr


def use(run: Path, what: str = "", *, commands: bool = False) -> list[str]:
    """Do all that a user may do with a run and its newest checkpoint; return how each ended.

    With the kind of file that was changed, only what reads such a file; with ``commands`` what is typed, too.

    Anything but success or an error of Holdfast's own comes through.
    """
    home = newest(run)
    name, storage = home.name, LocalStorage(run)
    told = []

    def into_live() -> None:
        state = live()
        weights = {key: value.clone() for key, value in state["model"].state_dict().items()}
        try:
            hf.load(home, into=state, skip=["holdfast"])
        except hf.CheckpointError:
            # Refused before anything was touched.
            assert all(torch.equal(value, weights[key]) for key, value in state["model"].state_dict().items())
            raise

    def shown() -> None:
        manifest = Manifest.from_bytes((home / "manifest.json").read_bytes(), where="manifest.json")
        contents = ContentsReader(storage.child(name), manifest)
        summary.items(summary.tensors(contents))
        tree = summary.state_tree(contents)
        summary.top_names(tree)
        [(one.encode("ascii", "backslashreplace"), text) for one, text in summary.plain_names(tree)]

    def listed() -> None:
        catalog = Catalog(storage)
        catalog.records()
        catalog.latest()
        catalog.best("loss")
        catalog.index.history()
        catalog.index.to_bytes()

    doings: tuple[Callable[[], object], ...] = (
        lambda: hf.load(home),
        into_live,
        lambda: hf.load(home, into={"model": live()["model"]}, only=["model"]),
        lambda: hf.Checkpoint(home).verify(),  # the next ones are about the files beside a checkpoint, too
        lambda: hf.Checkpoint(home).get_metadata(),
        shown,
        listed,
    )
    if what in ("metrics", "metadata", "run", "reports"):
        doings = doings[4:]
    if commands:
        doings += tuple(lambda arguments=arguments: command(*arguments) for arguments in commands_of(run, home))
    for doing in doings:
        with limit():
            try:
                doing()
                told.append("done")
            except hf.HoldfastError as error:
                str(error).encode("utf-8")  # it can be printed
                told.append(type(error).__name__)
            except Exception as error:
                # What an object of the user, or of torch, says of a state that it is given is its own.
                if not any(frame.name == "load_state_dict" for frame in traceback.extract_tb(error.__traceback__)):
                    raise
                told.append("refused by an object")
    return told


def forget(case: Path) -> None:
    """Remove a copy."""
    shutil.rmtree(case)


def copy_of(run: Path, target: Path) -> Path:
    """Copy a run (its files are small)."""
    shutil.copytree(run, target)
    return target
