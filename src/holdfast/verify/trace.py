"""What a life is told and what it records, and how the rows of several lives compare.

All are files of JSON. A process is given a `LifePlan`; the `Witness` of a `Checkpointer` answers with rows at the
boundaries of steps, the observer of any script with a row before each step of an optimizer (`Record`). What compares
rows are pure functions, which define "equal". The likely causes of a difference are rules, which new experience
extends: each looks at the first difference and says, if it fits, the usual cause and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast._units import listed

BESIDE = "not in the state"
"""First part of the paths of items for modules that train beside a state; compared where both lives have them."""

Row = dict[str, Any]
"""A line of a trace: event ("start", "boundary", "report"), run, step, nth, items, batches, metrics, and its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a run.

    Attributes:
        step: the step.
        event: "boundary" (the step is over) or "report" (right after `ck.report`).
        nth: how often that event came at this step before, in the same life; the boundary of an epoch's last step comes
            again at the end of the epoch.
        run: key of the run (`Witness`), None for any.
    """

    step: int
    event: str = "boundary"
    nth: int = 0
    run: str | None = None

    def is_at(self, row: Row) -> bool:
        """Tell whether a row was written at this moment."""
        own = (row["step"], row["event"], row["nth"])
        return own == (self.step, self.event, self.nth) and self.run in (None, row["run"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LifePlan:
    """The plan of a life.

    Attributes:
        trace: directory of the traces, a file for each life and rank.
        life: number of this life.
        signal: path of a named pipe, to which a process writes that it has come to ``stop`` and waits.
        home: directory that takes the runs of the script; None leaves path and options alone.
        root: directory that the life got as the place of its runs: they are named by their paths in it.
        initial: directory for the state that the first life begins with, so that the other lives begin with the same.
        save: steps to save, at their boundaries; with ``home`` only these, and those that the script saves itself.
        stop: where to stop, for good.
        every: record the state after every so many steps.
        observe: record the steps of torch's optimizers too (`observer`).
        witness: a Checkpointer of the script is watched; else it saves as ever, and the observer alone records.
        whole: sum weights and state whole at each observed step, whatever it costs.
        seed: of the generators that every fresh process seeds by chance; None leaves them alone.
        kill_at: number of the observed step before which to stop, for good; counted in each process from 0.
        gentle: the process goes on once the file ``signal`` + ".go" is there, which follows a SIGTERM.
    """

    trace: str
    life: int
    signal: str
    home: str | None = None
    root: str | None = None
    initial: str | None = None
    save: tuple[Moment, ...] = ()
    stop: Moment | None = None
    every: int = 1
    observe: bool = False
    witness: bool = True
    whole: bool = False
    seed: int | None = None
    kill_at: int | None = None
    gentle: bool = False

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> LifePlan:
        """Read a plan from a file."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        stop = fields.pop("stop")
        save = tuple(Moment(**moment) for moment in fields.pop("save"))
        return cls(**fields, save=save, stop=None if stop is None else Moment(**stop))

    def rows(self, life: int | None = None) -> list[Row]:
        """Read the rows recorded by the processes of a life (default: this one), each rank's rows in their order."""
        rows = []
        for path in sorted(Path(self.trace).glob(f"life-{self.life if life is None else life}.*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):  # a process may be killed while it writes the last line
                    rows.append(json.loads(line))
        return rows

    def records(self) -> Records:
        """Read what the observer recorded; of several processes of a rank the one that made most steps counts."""
        found = Records()
        for path in sorted(Path(self.trace).glob(f"life-{self.life}.rank-*.steps")):
            record = _read(path)
            if record.rank not in found or len(record.steps) > len(found[record.rank].steps):
                found[record.rank] = record
        return found


@dataclass(slots=True, kw_only=True)
class Counter:
    """Counts how often an event came at a step."""

    _seen: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def next(self, run: str, event: str, step: int) -> int:
        """Return how often it came before."""
        key = (run, event, step)
        number = self._seen.get(key, 0)
        self._seen[key] = number + 1
        return number


# ---- of the observer


Step = dict[str, Any]
"""A row of the observer, written before a step of an optimizer (`observer.Observer`)."""


@dataclass(slots=True)
class Record:
    """What one process recorded.

    Attributes:
        rank: of the process.
        steps: a row for each step of an optimizer, in order.
        optimizers: what is known of each optimizer, by its number.
        loaders: what is known of each loader, by its number.
        end: the row that was written when the process ended by itself.
        error: why the observation ended early, empty if it did not.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    optimizers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    loaders: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    error: str = ""


class Records(dict[int, Record]):
    """The records of a life by rank; a rank of which nothing is known has made no step."""

    def __missing__(self, rank: int) -> Record:
        return Record(rank=rank)


def _read(path: Path) -> Record:
    record = Record(rank=int(path.name.partition("rank-")[2].partition(".")[0]))
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue  # the process was killed while it wrote
        row = json.loads(line)
        match row.get("event"):
            case None:
                record.steps.append(row)
            case "optimizer":
                record.optimizers[row["o"]] = row
            case "loader":
                record.loaders[row["loader"]] = row
            case "end":
                record.end = row
            case "error":
                record.error = row["text"]
    return record


def saved_after(record: Record, changes: Iterable[int]) -> list[int]:
    """Return after how many steps files were written, ascending, without the start and the end.

    Args:
        record: the life.
        changes: of each, how many steps had been begun.
    """
    return sorted({count for count in changes if 0 < count < len(record.steps)})


def saves_after(written: Iterable[tuple[str, int, int]], step: int) -> int:
    """Return how many saves a life has finished that hold more steps than ``step``, as far as that is certain.

    Each kind of large file counts for itself, and the one with the fewest decides: the best weights may be written
    often, and what a life goes on from seldom.

    Args:
        written: the files that the life finished: name without numbers, steps begun, bytes.
        step: counted as the life counts.
    """
    rows = [row for row in written if row[1] > 0]
    largest = max((size for _, _, size in rows), default=0)
    moments: dict[str, set[int]] = {}
    for name, begun, size in rows:
        if 2 * size >= largest:
            moments.setdefault(name, set()).add(begun)
    return min((sum(moment > step for moment in of_kind) for of_kind in moments.values()), default=0)


def stages(steps: Sequence[Step]) -> list[int]:
    """Return the numbers of the steps that are the first ones of an epoch, but for the very first."""
    return [number for number in range(1, len(steps)) if steps[number]["ep"] != steps[number - 1]["ep"]]


# ---- how the rows of lives compare


Item = tuple[str, str, str]
"""Path of an item, its digest in the uninterrupted run, and in the other run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of two lives.

    Attributes:
        kind: "at resume" (the restored state is not the saved state), "not resumed", "after", "length", "metrics",
            "path" (the lives have runs at different places).
        step: the step.
        items: the items that differ there.
        life: number of the life of the killed run, from 0.
        resumed: step this life went on from, None for a fresh start.
        rank: of the process that recorded it.
        event: of the row.
        batches: the batches of this step are others, too.
        objects: top-level names of the state whose values load a state dict; the others are plain data.
        text: more about it, for messages.
    """

    kind: str
    step: int
    items: Sequence[Item] = ()
    life: int = 0
    resumed: int | None = None
    rank: int = 0
    event: str = "boundary"
    batches: bool = False
    objects: Sequence[str] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """The differences of two uninterrupted lives.

    Attributes:
        first: their first difference that counts; None if only plain values and metrics differ, such as times.
        items: paths of plain values that differ.
        metrics: names of metrics that differ.
    """

    first: Difference | None = None
    items: frozenset[str] = frozenset()
    metrics: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Table:
    """Rows by rank, run, step and event."""

    rows: dict[tuple[int, str, int, str], list[Row]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> _Table:
        made = cls()
        made.add(rows)
        return made

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.setdefault((row["rank"], row["run"], row["step"], row["event"]), []).append(row)

    def like(self, row: Row) -> list[Row]:
        return self.rows.get((row["rank"], row["run"], row["step"], row["event"]), [])

    def at_step(self, row: Row, step: int) -> list[Row]:
        events = ("boundary", "report", "start")
        return [seen for event in events for seen in self.rows.get((row["rank"], row["run"], step, event), [])]


def is_plain(digest: str) -> bool:
    """Tell whether an item is a plain value, which a script may well take from a clock, not a tensor or generator."""
    kind, _, rest = digest.partition(" ")
    return not ("[" in kind or kind in ("numpy", "_Whole") or rest.startswith("["))


def unsteady(rows: Sequence[Row], others: Sequence[Row]) -> Unsteady:
    """Compare two uninterrupted lives."""
    items: set[str] = set()
    metrics: set[str] = set()
    table = _Table.of(others)
    first: Difference | None = None
    for row in rows:
        twins = [twin for twin in table.like(row) if twin["nth"] == row["nth"]]
        if not twins:
            first = first or Difference(kind="length", step=row["step"], rank=row["rank"], event=row["event"])
            continue
        twin = twins[0]
        metrics |= {name for name, _, _ in _unequal(row["metrics"], twin["metrics"])}
        unequal = _unequal(row["items"], twin["items"])
        plain = {path for path, left, right in unequal if is_plain(left) and is_plain(right)}
        items |= plain
        counts = [item for item in unequal if item[0] not in plain or item[0].startswith("holdfast/")]
        drawn = row["batches"] != twin["batches"]
        if first is None and (counts or drawn):
            first = Difference(
                kind="after", step=row["step"], items=counts or [("batch", "one batch", "another")], rank=row["rank"],
                event=row["event"], batches=drawn,
            )  # fmt: skip
    return Unsteady(first=first, items=frozenset(items), metrics=frozenset(metrics))


def first_difference(
    reference: Sequence[Row],
    lives: Sequence[Sequence[Row]],
    *,
    saved: Sequence[int | None] = (),
    ignore: Unsteady | None = None,
    every: int = 1,
) -> tuple[Difference | None, int]:
    """Compare the lives of a run that was killed with an uninterrupted one.

    The state that a life got at a resume is compared with the state of the earlier lives at that step, so it is judged
    even where training itself cannot be repeated.

    Args:
        reference: rows of the uninterrupted life.
        lives: rows of each life of the other run.
        saved: for each life the step that was saved before it, None if the script decides that.
        ignore: items and metrics in which two uninterrupted lives differ.
        every: only multiples of this were recorded.

    Returns:
        The first difference, None if there is none; and the number of rows compared.
    """
    ignore = ignore or Unsteady()
    twin, own = _Table.of(reference), _Table()
    compared = 0
    for number, rows in enumerate(lives):
        resumed: dict[int, int | None] = {}
        for row in rows:
            place = {"life": number, "rank": row["rank"], "event": row["event"]}
            if row["event"] == "start":
                resumed[row["rank"]] = row["resumed"]
                difference = _at_start(row, own if number else twin, reference, number, saved, ignore)
            else:
                difference = _after(row, twin, ignore, every)
            if difference is not None:
                return replace(difference, **place, resumed=resumed.get(row["rank"])), compared
            compared += 1
        own.add(rows)
    return _length(reference, lives[-1] if lives else (), every), compared


def _at_start(
    row: Row, before: _Table, reference: Sequence[Row], number: int, saved: Sequence[int | None], ignore: Unsteady
) -> Difference | None:
    """Judge the state a life begins with."""
    known = sorted({other["run"] for other in reference})
    if row["run"] not in known:
        return Difference(kind="path", step=row["step"], text=f"{row['run']}, not {', '.join(known)}")
    expected = saved[number] if number < len(saved) else None
    if expected is not None and row["resumed"] is None:
        return Difference(kind="not resumed", step=row["step"], text=f"step {expected} was saved")
    step = row["step"] if row["resumed"] is None else row["resumed"]
    candidates = before.at_step(row, step)
    wrong = _closest(row, candidates, ignore)
    return Difference(kind="at resume", step=step, items=wrong, objects=row["objects"]) if wrong else None


def _after(row: Row, twin: _Table, ignore: Unsteady, every: int) -> Difference | None:
    """Judge a row of the middle of a life."""
    candidates = twin.like(row)
    if not candidates:
        if row["step"] % every or any(twin.at_step(row, row["step"])):
            return None  # a step that is not recorded; an epoch's end that is passed again
        return Difference(
            kind="length", step=row["step"], text=f"the resumed run made step {row['step']}, the other did not"
        )
    wrong = _closest(row, candidates, ignore)
    # Compared with each candidate: a batch that is drawn ahead of its step is drawn again by the next life.
    batches = all(other["batches"] != row["batches"] for other in candidates)
    text = row.get("mismatch", "")
    if wrong or text:
        return Difference(kind="after", step=row["step"], items=wrong, batches=batches or bool(text), text=text)
    metrics = min((_metrics(other, row, ignore) for other in candidates), key=len)
    if metrics:
        return Difference(kind="metrics", step=row["step"], items=metrics, batches=batches)
    return None


def _metrics(other: Row, row: Row, ignore: Unsteady) -> list[Item]:
    if not row["metrics"] and row["event"] == "boundary":
        return []  # the second boundary of a step, reached without the step itself
    return [(f"metrics/{n}", a, b) for n, a, b in _unequal(other["metrics"], row["metrics"]) if n not in ignore.metrics]


def _closest(row: Row, candidates: Sequence[Row], ignore: Unsteady) -> list[Item]:
    """Return how a row differs from its closest candidate."""
    unequal = [_unequal(other["items"], row["items"]) for other in candidates]
    return min(([item for item in items if item[0] not in ignore.items] for items in unequal), key=len, default=[])


def _unequal(left: Mapping[str, str], right: Mapping[str, str]) -> list[Item]:
    # Modules beside the state are looked for from time to time, and made when the script likes.
    paths = [path for path in {**left, **right} if not path.startswith(BESIDE) or (path in left and path in right)]
    pairs = [(path, left.get(path, "nothing"), right.get(path, "nothing")) for path in paths]
    return [(path, a, b) for path, a, b in pairs if a != b]


def _length(reference: Sequence[Row], rows: Sequence[Row], every: int) -> Difference | None:
    """Compare where both ended."""
    last = reference[-1]["step"] if reference else 0
    end = rows[-1]["step"] if rows else 0
    if end - end % every == last - last % every:
        return None
    return Difference(
        kind="length", step=end, text=f"the uninterrupted run made {last} steps, the resumed one ended at {end}"
    )


# ---- causes


def likely_causes(found: Difference, why: str = "", *, noise: Unsteady | None = None) -> list[str]:
    """Return the likely causes of a difference, the likeliest first.

    Args:
        found: the difference.
        why: what is special about the moment that was saved ("after a report", ...).
        noise: the differences of two uninterrupted runs, if they were compared.
    """
    if noise is not None and noise.first is not None and found.kind in ("after", "length", "metrics"):
        return _of_noise(noise.first)
    match found.kind:
        case "path":
            return [
                f"The path of the run changes from life to life ({found.text}): it is made of a time, a process id or "
                "a temporary directory, so no life finds the checkpoints of the life before it. Give Checkpointer the "
                "same path each time"
            ]
        case "not resumed":
            return [
                f"The script began at step {found.step} although {found.text}: resume='never', a fixed "
                "resume=CHECKPOINT, or code that empties the directory of the run at the start. Use resume='auto'"
            ]
        case "length":
            return [
                f"{found.text[:1].upper()}{found.text[1:]}: the loop counts by itself (`for i in range(n)`, "
                "`enumerate`, a patience counter). Count with ck.epochs and ck.global_step, and put other counters "
                "into the state"
            ]
        case "at resume":
            return list(_of_resume(found)) or [_OUTSIDE]
        case "metrics":
            return [*_of_data(found), _OF_METRIC]
    return [*_of_beside(found), *_of_data(found), *_of_training(found, why), _OUTSIDE]


_OUTSIDE = (
    "Everything that is saved was right at the resume, so something that is NOT in the state takes part in training: "
    "an object missing from the state given to Checkpointer (a second optimizer, an EMA, a scheduler), a buffer with "
    "persistent=False, a random generator of your own, a global, data that do not come from ck.batches, or an "
    "operation that is not deterministic. Put it into the state"
)


def _of_beside(found: Difference) -> Iterator[str]:
    """Yield the cause where a module that is not in the state is another one."""
    names = [path.removeprefix(f"{BESIDE}/") for path, _, _ in found.items if path.startswith(BESIDE)]
    if names:
        yield (
            f"{', '.join(names)}: a module with the weights' shapes of one in the state, which is not in it: an "
            "averaged copy (EMA), a target network. A resume begins it anew from the model. Put it into the state: "
            'Checkpointer(path, {..., "ema": ema})'
        )


def _of_noise(first: Difference) -> list[str]:
    """Return the causes where two uninterrupted lives already differ: the resume is not at fault."""
    if first.kind == "length":
        return [
            "Two uninterrupted runs make different numbers of steps: the loop ends by a clock, or by something random. "
            "Verify a run of a fixed number of steps (--steps)"
        ]
    if first.batches:
        return [
            "Two uninterrupted runs begin alike and train on different data: a split, a shuffle or an augmentation "
            "draws from a generator that nothing seeds, before the Checkpointer or past ck.batches. Each life of the "
            "script draws anew there, so a resume goes on with other data, too: seed it, "
            "random_split(..., generator=torch.Generator().manual_seed(0))"
        ]
    return [
        "Two uninterrupted runs with the same data already differ: kernels that are not deterministic (on a GPU: "
        "atomic additions, cuDNN's choice of algorithm), or randomness that nothing seeds (os.urandom, a generator "
        "of your own, a set's order). Try torch.use_deterministic_algorithms(True) with "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8, torch.backends.cudnn.benchmark = False and PYTHONHASHSEED=0: without it no "
        "resume can be exact to the bit"
    ]


_OF_METRIC = (
    "The state is equal and a metric is not: it is computed from a variable that is not saved, such as a running "
    "average or a list of losses, which a new life begins anew. Put it into the state"
)


def _of_resume(found: Difference) -> Iterator[str]:
    """Yield the causes where the state is not the saved one right after the resume."""
    paths = [path for path, _, _ in found.items]
    if any(path.startswith("holdfast/progress") for path in paths):
        yield (
            "Step, epoch or data position are not those that were saved. Is something else loading them? If not, this "
            "is a defect of Holdfast: please report it with this output"
        )
    owners = (*found.objects, "holdfast")
    if names := [path for path in paths if path.partition("/")[0] not in owners]:
        yield (
            f"{listed(names)}: a plain value (a number, text, list, tensor) is saved and did not come back into "
            "the state. Keep it in the mapping alone (ck.state['best'] = ...) instead of a variable beside it, and "
            "read it from there after entering, or put it into an object with state_dict and load_state_dict"
        )
    if paths and all(path.startswith("holdfast/rng") for path in paths):
        yield (
            "The random generators are not those that were saved: something draws from them or seeds them after they "
            "were captured (an evaluation, a new iterator of a DataLoader, torch.manual_seed inside the body)"
        )
    if names := sorted({path.partition("/")[0] for path in paths} & set(found.objects)):
        yield (
            f"{', '.join(names)}: was saved and did not come back. Its load_state_dict does not take in what its "
            "state_dict gives, or it was not the object that trains (make models, wrappers, optimizers and schedulers "
            "before `with Checkpointer(...)`), or it was saved in the middle of a step (call ck.save and ck.report "
            "after ck.step)"
        )


def _of_data(found: Difference) -> Iterator[str]:
    """Yield the cause where the batches are others."""
    if found.batches and found.text:
        yield (
            "The loader does not go on from its saved position, as the ledger of the run shows: look at its state_dict "
            "and load_state_dict, use a map-style data set, or a loader without state_dict, which is replayed by count"
        )
    elif found.batches:
        yield (
            "The data of this step are others: an order that is drawn outside of ck.batches (an iterator made by hand, "
            "a shuffle of your own, `enumerate` or `next(iter(loader))` on the loader itself), a sampler or an "
            "iterable with state that is not saved, a batch drawn ahead and lost, or augmentation in persistent "
            "workers. Draw from ck.batches(loader), and give loader or sampler a state_dict"
        )


def _of_training(found: Difference, why: str) -> Iterator[str]:
    """Yield the causes where a step ends in another state."""
    paths = [path for path, _, _ in found.items]
    if not found.batches and any(path.startswith("holdfast/rng") for path in paths):
        where = ""
        if why in ("after a report", "at the end of an epoch"):
            where = f" The life went on from a step saved {why}: an evaluation there is the usual place."
        yield (
            "Random numbers are drawn in one life that the other does not draw: by code that runs only at the start (a "
            "sanity check, compiling, `iter(loader)`), or by code after ck.step (an evaluation with a DataLoader of "
            f"its own, sampling, dropout left on).{where} Give that code a generator of its own "
            "(DataLoader(..., generator=torch.Generator())), or move it in front of ck.step"
        )
    if any(path.endswith(("/lr", "/initial_lr")) for path in paths):
        yield (
            "The learning rate differs: it is computed from a variable that is not saved (a batch index of "
            "`enumerate`, which begins at 0 again, a step counter of your own: use ck.global_step), or a scheduler is "
            "not in the state or steps after ck.step"
        )
