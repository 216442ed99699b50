"""Small files of several writers, read as those of one checkpoint: what is damaged or contradicts itself is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from catalog_kit import Far

from holdfast.errors import CorruptCheckpointError
from holdfast.format.commit import PartSummary, commit
from holdfast.format.contents import ContentsReader, unite
from holdfast.format.digest import CHUNK, bytes_digest, chunk_digests, file_digest
from holdfast.format.division import Division
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.manifest import FileEntry
from holdfast.format.names import save_id_of
from holdfast.format.strict_json import dumps
from holdfast.storage import MemoryStorage

_numbers = count()


def made(indexes: list[Index], trees: list[Any], *, kind: type[MemoryStorage] = Far) -> ContentsReader:
    """Commit a checkpoint of so many writers, and open it."""
    storage = kind(f"writers-{next(_numbers)}")
    parts = []
    for rank in range(max(len(indexes), len(trees))):
        files = (
            {f"index-{rank:05d}-deadbeef-1.json": ("index", indexes[rank].to_bytes())} if rank < len(indexes) else {}
        )
        if rank < len(trees):
            files[f"state-{rank:05d}-deadbeef-1.json"] = ("state", dumps(trees[rank]))
        entries = []
        for path, (role, data) in files.items():
            storage.put(path, data)
            entries.append(FileEntry(path=path, size=len(data), digest=bytes_digest(data), role=role, writer=rank))
        parts.append(PartSummary(writer=rank, files=tuple(entries)))
    return ContentsReader(storage, commit(storage, "", {}, parts[::-1]))


def index(writer: int, *names: str, division: Division | None = None, **ties: str) -> Index:
    path = f"model-{writer:05d}-{{save_id}}.safetensors"
    entries = {
        name: TensorEntry(name, "uint8", (8,), (Piece(path, 4096 + 8 * place, 8),)) for place, name in enumerate(names)
    }
    return Index(writer=writer, files=(path,), tensors=entries, aliases=ties, division=division)


def unlisted(reader: ContentsReader) -> Any:
    """Read the tensors; the files of tensors are not part of this checkpoint, so sizes are not checked."""
    entries = reader.manifest.with_role("index")
    found = [Index.from_bytes(reader.read(entry), save_id=save_id_of(entry.path)) for entry in entries]
    return unite(found, where="it", files=reader.files)


def half(structure: str = "ab") -> Division:
    return Division(num_ranks=2, structure=structure)


def test_two_parts_make_a_state() -> None:
    """Tensors and ties of both; each tensor from the file of its writer."""
    found = unlisted(made([index(0, "a", division=half(), t="a"), index(1, "b", division=half())], []))
    assert found.entries.keys() == {"a", "b"}
    assert found.aliases == {"t": "a"}
    assert [found.entries[name].pieces[0].file[:11] for name in "ab"] == ["model-00000", "model-00001"]


@pytest.mark.parametrize(
    ("indexes", "problem"),
    [
        ([index(0, "a", division=half()), index(1, "b", division=half("cd"))], "another structure"),
        ([index(0, "a", division=half())], "part of rank 1 is missing"),
        ([index(0, "a"), index(1, "b", division=half())], "saved alone"),
        ([index(0, "a", division=half()), index(1, "a", division=half())], "both rank 0 and rank 1 have stored 'a'"),
        ([index(0, "a", "b", division=half(), t="a"), index(1, "c", division=half(), t="c")], "have stored 't'"),
        ([index(0, "a", division=half()), index(1, "b", division=half(), a="b")], "have stored 'a'"),
    ],
)
def test_parts_that_contradict_each_other(indexes: list[Index], problem: str) -> None:
    """The ranks are named, and nothing is taken from either."""
    storage = MemoryStorage(f"writers-{next(_numbers)}")
    entries = []
    for one in indexes:
        path = f"index-{one.writer:05d}-deadbeef-1.json"
        storage.put(path, one.to_bytes())
        entries.append(
            FileEntry(path=path, size=len(one.to_bytes()), digest=bytes_digest(one.to_bytes()), role="index")
        )
    manifest = commit(storage, "", {}, [PartSummary(writer=0, files=tuple(entries))])
    with pytest.raises(CorruptCheckpointError, match=problem):
        unlisted(ContentsReader(storage, manifest))


def test_of_two_structures_that_of_the_lowest_rank_wins() -> None:
    """In whatever order the manifest lists them."""
    where, tree = made([], [{"n": 0, "a": 1}, {"n": 1, "b": 2}]).structure() or ("", None)
    assert where.startswith("state-00000")
    assert (tree["n"], list(tree)) == (0, ["n", "a", "b"])


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
@pytest.mark.parametrize("kind", [Far, MemoryStorage])
def test_damage_of_one_file_is_that_of_one_file(kind: type[MemoryStorage], damage: str) -> None:
    """Also where it was read ahead, beside the others: they are read, and only who needs it gets the error."""
    reader = made([], [{"n": 0}, {"n": 1}, {"n": 2}], kind=kind)
    entries = reader.manifest.with_role("state")
    storage, rotten = reader._storage, entries[1]
    data = storage.read(rotten.path)
    if damage == "gone":
        storage.delete(rotten.path)
    else:
        storage.put(rotten.path, data.replace(b"1", b"7") if damage == "flipped" else data[:-1])
    reader.read_ahead(entries)
    assert reader.tree(entries[0]) == {"n": 2}
    assert reader.tree(entries[2]) == {"n": 0}
    with pytest.raises(CorruptCheckpointError, match=rotten.path):
        reader.read(rotten)


def test_tables_of_digests_belong_to_their_file() -> None:
    """One that is another file's, or none at all, is no proof: it is refused before a byte is compared with it."""
    storage = MemoryStorage(f"writers-{next(_numbers)}")
    contents = [bytes([number]) * (2 * CHUNK) for number in (1, 2)]
    tables = [chunk_digests(data) for data in contents]
    files = [FileEntry(path="d.bin", size=32, digest=bytes_digest(b"".join(tables)), role="digests")]
    for number, at in ((0, 0), (1, 16)):
        files.append(
            FileEntry(path=f"{number}.bin", size=2 * CHUNK, digest=file_digest(tables[number]), chunks=("d.bin", at))
        )
    for path, data in zip(("0.bin", "1.bin", "d.bin"), (*contents, b"".join(tables)), strict=True):
        storage.put(path, data)
    reader = ContentsReader(storage, commit(storage, "", {}, [PartSummary(writer=0, files=tuple(files))]))
    assert reader.tables(files) == {"0.bin": tables[0], "1.bin": tables[1]}
    swapped = [files[0], replace(files[1], chunks=("d.bin", 16)), replace(files[2], chunks=("d.bin", 0))]
    part = PartSummary(writer=0, files=tuple(swapped))
    reader = ContentsReader(storage, commit(storage, "", {}, [part], void=lambda _: True))
    with pytest.raises(CorruptCheckpointError, match=r"does not hold the digests of 0\.bin"):
        reader.tables(swapped)
