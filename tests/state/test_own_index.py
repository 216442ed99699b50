"""A rank that loads what it has saved reads its own index and that of rank 0, not those of all others."""

import itertools

import pytest
import torch
from mesh_kit import Layout, load_ranks, playing, save_ranks

import holdfast as hf
from holdfast.errors import CorruptCheckpointError
from holdfast.state.load.restore import load_state
from holdfast.state.load.selection import Fit
from holdfast.state.tree.arrays import local_tensor
from holdfast.storage import MemoryStorage

_numbers = itertools.count()
WORLD = 5
VALUES = torch.arange(40 * 10, dtype=torch.float32).reshape(40, 10)


class Seen(MemoryStorage):
    """Remembers what was opened."""

    opened: list[str] = []  # noqa: RUF012 - shared with children

    def open(self, path):
        self.opened.append(path.rpartition("/")[2])
        return super().open(path)


def fill(model, optimizer):
    with torch.no_grad():
        model.weight.copy_(torch.ones(4, 4))
    model.weight.grad = torch.ones(4, 4)
    optimizer.step()


def state(layout, value=VALUES):
    """One tensor that is spread, and a module whose optimizer keeps a step count that is not."""
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    return {"w": layout.shard(value), "model": model, "optimizer": optimizer, "rank": hf.PerRank(1)}


def filled(layout):
    made = state(layout)
    fill(made["model"], made["optimizer"])
    return made


def indexes(seen):
    return sorted({int(name.split("-")[1]) for name in seen if name.startswith(("index-", "digests-"))})


@pytest.fixture
def saved():
    storage = Seen(f"own-index-{next(_numbers)}")
    layout = Layout((WORLD,), (0,))
    home = save_ranks(WORLD, lambda _: filled(layout), storage=storage)
    yield layout, home
    storage.opened.clear()


def test_what_is_spread_needs_two_indexes(saved):
    """In the same layout ranks read two indexes and the digests of two ranks, although step counts are shared."""
    layout, home = saved
    for rank in range(WORLD):
        with playing(rank, WORLD):
            live = {"w": layout.shard(torch.zeros_like(VALUES))}
            Seen.opened.clear()
            load_state(home, live, Fit(only="w"), rank=rank, world_size=WORLD)
            assert torch.equal(local_tensor(live["w"]), VALUES[8 * rank : 8 * rank + 8])
            assert indexes(Seen.opened) == sorted({0, rank})


def test_step_counts_are_with_rank_0(saved):
    """The step counts that optimizers keep are found without the index of another rank."""
    layout, home = saved
    with playing(3, WORLD):
        live = state(layout, torch.zeros_like(VALUES))
        Seen.opened.clear()
        loaded = load_state(home, live, Fit(only=["optimizer/state/model/weight/step"]), rank=3, world_size=WORLD)
        assert indexes(Seen.opened) == [0, 3]
        assert loaded.state["optimizer"].state[live["model"].weight]["step"] == 1


@pytest.mark.parametrize("placements", [(1,), ("R",)])
def test_another_layout_reads_them_all(saved, placements):
    """What another layout needs is in the indexes of others: they are read, and all of it is there."""
    _, home = saved
    other = Layout((WORLD,), placements)

    def check(rank, live):
        expected = VALUES if placements == ("R",) else torch.chunk(VALUES, WORLD, 1)
        assert torch.equal(local_tensor(live["w"]), expected if placements == ("R",) else expected[rank])
        assert torch.equal(live["model"].weight, load_state(home).state["model"]["weight"])

    load_ranks(home, WORLD, lambda _: state(other, torch.zeros(40, 10)), check)


def test_an_index_that_is_gone_is_missed_by_those_who_need_it(saved):
    """A rank whose own index is lost, or that needs all of them, says which; others of the same layout load."""
    layout, home = saved
    (lost,) = [info.path for info in home.list("") if info.path.startswith("index-00002")]
    home.delete(lost)
    for rank in range(WORLD):
        with playing(rank, WORLD):
            live = {"w": layout.shard(torch.zeros_like(VALUES))}
            if rank == 2:
                with pytest.raises(CorruptCheckpointError, match="index-00002"):
                    load_state(home, live, Fit(only="w"), rank=rank, world_size=WORLD)
            else:
                load_state(home, live, Fit(only="w"), rank=rank, world_size=WORLD)
    with pytest.raises(CorruptCheckpointError, match="index-00002"):
        load_state(home, {"w": torch.zeros(40, 10)}, Fit(only="w"), rank=1, world_size=WORLD)
    with pytest.raises(CorruptCheckpointError, match="index-00002"):
        load_state(home)
