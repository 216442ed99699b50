"""Every kind of damage is found and named."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from holdfast.checkpoint.verify import verify_files
from holdfast.errors import StorageUnavailableError
from holdfast.format.commit import PartSummary, commit
from holdfast.format.digest import CHUNK, bytes_digest, chunk_digests, file_digest
from holdfast.format.index import Index, Piece, TensorEntry
from holdfast.format.manifest import FileEntry
from holdfast.format.tensor_file import lay_out
from holdfast.storage import FileReader, LocalStorage, PrefixStorage

SAVE = "deadbeef-1"
MODEL, INDEX, STATE, TABLE = (
    f"model-00000-{SAVE}.safetensors",
    f"index-00000-{SAVE}.json",
    f"state-{SAVE}.json",
    f"digests-00000-{SAVE}.bin",
)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of three tensors of 100 kB."""
    storage = LocalStorage(tmp_path)
    names, size = ("a", "b", "c"), 100_000
    header = lay_out([(name, "uint8", (size,), size) for name in names]).header
    data = header + random.Random(1).randbytes(3 * size)
    template = "model-00000-{save_id}.safetensors"
    tensors = {
        name: TensorEntry(name, "uint8", (size,), (Piece(template, len(header) + size * number, size),))
        for number, name in enumerate(names)
    }
    index = Index(files=(template,), tensors=tensors).to_bytes()
    table = chunk_digests(data)
    files = [FileEntry(path=MODEL, size=len(data), digest=file_digest(table), role="tensors", chunks=(TABLE, 0))]
    storage.put(f"s/{MODEL}", data)
    for path, role, content in ((INDEX, "index", index), (STATE, "state", b"{}"), (TABLE, "digests", table)):
        storage.put(f"s/{path}", content)
        files.append(FileEntry(path=path, size=len(content), digest=bytes_digest(content), role=role))
    return storage, commit(storage, "s", {}, [PartSummary(writer=0, files=tuple(files))]), tmp_path / "s"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_a_good_checkpoint_has_no_problems(saved):
    """Neither at a glance nor in depth."""
    storage, manifest, _ = saved
    assert verify_files(storage, "s", manifest) == []
    assert verify_files(storage.child("s"), "", manifest, deep=False) == []


def test_a_flipped_bit_is_placed_in_chunk_and_tensors(saved):
    """File, chunk and the tensors that have bytes in it are named."""
    storage, manifest, root = saved
    flip(root / MODEL, 2 * CHUNK + 1)
    (problem,) = verify_files(storage, "s", manifest)
    assert (problem.file, problem.chunk, problem.tensors) == (MODEL, 2, ("b",))
    assert "chunk 2" in str(problem)
    assert "tensors: b" in str(problem)
    assert verify_files(storage, "s", manifest, deep=False) == []


def test_a_tensor_that_begins_where_damage_ends_is_not_named(tmp_path):
    """Bytes up to the first of a tensor are not its bytes."""
    storage = LocalStorage(tmp_path)
    sizes = {"a": CHUNK, "b": CHUNK}
    header = lay_out([(name, "uint8", (size,), size) for name, size in sizes.items()]).header
    template = "model-00000-{save_id}.safetensors"
    at, tensors = len(header), {}
    for name, size in {"a": CHUNK - len(header), "b": CHUNK}.items():
        tensors[name] = TensorEntry(name, "uint8", (size,), (Piece(template, at, size),))
        at += size
    data = bytes(at)
    index, table = Index(files=(template,), tensors=tensors).to_bytes(), chunk_digests(data)
    files = [FileEntry(path=MODEL, size=at, digest=file_digest(table), role="tensors", chunks=(TABLE, 0))]
    storage.put(f"s/{MODEL}", data)
    for path, role, content in ((INDEX, "index", index), (STATE, "state", b"{}"), (TABLE, "digests", table)):
        storage.put(f"s/{path}", content)
        files.append(FileEntry(path=path, size=len(content), digest=bytes_digest(content), role=role))
    manifest = commit(storage, "s", {}, [PartSummary(writer=0, files=tuple(files))])
    for place, tensor in ((CHUNK - 1, "a"), (CHUNK, "b")):
        flip(tmp_path / "s" / MODEL, place)
        (problem,) = verify_files(storage, "s", manifest)
        assert problem.tensors == (tensor,)
        flip(tmp_path / "s" / MODEL, place)


def test_bytes_that_fit_digests_which_are_not_theirs(saved):
    """File and table were both replaced, say by those of another save: the digest in the manifest tells."""
    storage, manifest, root = saved
    other = bytes((root / MODEL).stat().st_size)
    (root / MODEL).write_bytes(other)
    (root / TABLE).write_bytes(chunk_digests(other))
    problems = verify_files(storage, "s", manifest)
    assert {problem.file for problem in problems} == {MODEL, TABLE}
    assert "does not hold the digests" in str(problems[0])


@pytest.mark.parametrize("path", [MODEL, INDEX, STATE, TABLE])
def test_every_file_is_covered(saved, path):
    """A flip in any file is found under its name, at any place; truncation and absence even at a glance."""
    storage, manifest, root = saved
    good = (root / path).read_bytes()
    for at in random.Random(2).sample(range(len(good)), min(len(good), 20)):
        flip(root / path, at)
        assert path in {problem.file for problem in verify_files(storage, "s", manifest)}
        (root / path).write_bytes(good)
    (root / path).write_bytes(good[:-1])
    (problem,) = verify_files(storage, "s", manifest, deep=False)
    assert problem.file == path
    (root / path).unlink()
    (problem,) = verify_files(storage, "s", manifest, deep=False)
    assert "missing" in str(problem)
    assert path in {problem.file for problem in verify_files(storage, "s", manifest)}


def test_a_damaged_index_costs_only_the_names(saved):
    """Both problems are reported."""
    storage, manifest, root = saved
    flip(root / MODEL, 5000)
    flip(root / INDEX, 50)
    problems = verify_files(storage, "s", manifest)
    assert [(problem.file, problem.chunk, problem.tensors) for problem in problems] == [
        (MODEL, 0, ()),
        (INDEX, None, ()),
    ]


class Failing(PrefixStorage):
    """Reads of one file fail as those of a store that does not answer."""

    def __init__(self, storage, path):
        super().__init__(storage, "s")
        self._path = path

    def open(self, path):
        reader = super().open(path)
        return Unanswered(reader) if path == self._path else reader


class Unanswered(FileReader):
    def __init__(self, reader):
        self._reader, self.size = reader, reader.size

    def read_into(self, offset, view):
        raise StorageUnavailableError("no answer")

    def close(self):
        self._reader.close()


@pytest.mark.parametrize("path", [MODEL, INDEX, STATE, TABLE])
def test_a_storage_that_fails_says_nothing_about_the_checkpoint(saved, path):
    """An error of the storage is raised as such, whichever file it strikes: it is no damage."""
    storage, manifest, _ = saved
    with pytest.raises(StorageUnavailableError):
        verify_files(Failing(storage, path), "", manifest)


def test_a_short_digest_file_is_a_problem_of_both_files(saved):
    """The digests of the tensors cannot be read, and their own file has the wrong size."""
    storage, manifest, root = saved
    (root / TABLE).write_bytes((root / TABLE).read_bytes()[:8])
    problems = verify_files(storage, "s", manifest)
    assert [problem.file for problem in problems] == [MODEL, TABLE]
    assert "cannot be read" in str(problems[0])


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A file of 256 MiB (sparse) is read through one buffer."""
    storage = LocalStorage(tmp_path)
    (tmp_path / "s").mkdir()
    with open(tmp_path / "s" / "big", "wb") as file:
        file.truncate(256 << 20)
    zero = chunk_digests(bytes(CHUNK)) * (256 << 4)
    storage.put("s/t", zero)
    files = (
        FileEntry(path="big", size=256 << 20, digest=file_digest(zero), chunks=("t", 0)),
        FileEntry(path="t", size=len(zero), digest=bytes_digest(zero), role="digests"),
    )
    manifest = commit(storage, "s", {}, [PartSummary(writer=0, files=files)])
    tracemalloc.start()
    assert verify_files(storage, "s", manifest) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.parametrize("writers", [(0, 0), (0, 1)])
def test_a_tensor_that_is_stored_twice_is_a_problem(tmp_path, writers):
    """By one rank or by two that know nothing of each other: no load takes such a checkpoint."""
    storage, size = LocalStorage(tmp_path), 100
    rows = [(writer, number) for number, writer in enumerate(writers)]
    files = []
    for writer in sorted(set(writers)):
        path, template = f"m-{writer:05d}-{SAVE}.safetensors", f"m-{writer:05d}-{{save_id}}.safetensors"
        mine = [number for of, number in rows if of == writer]
        data = bytes(size * len(mine))
        pieces = tuple(Piece(template, size * at, size) for at in range(len(mine)))
        index = Index(
            writer=writer, files=(template,), tensors={"a/b": TensorEntry("a/b", "uint8", (size,), pieces)}
        ).to_bytes()
        tables = f"digests-{writer:05d}-{SAVE}.bin"
        table = chunk_digests(data)
        files.append(
            FileEntry(
                path=path,
                size=len(data),
                digest=file_digest(table),
                role="tensors",
                writer=writer,
                chunks=(tables, 0),
            )
        )
        storage.put(f"s/{path}", data)
        for name, role, content in (
            (f"index-{writer:05d}-{SAVE}.json", "index", index),
            (tables, "digests", table),
        ):
            storage.put(f"s/{name}", content)
            files.append(
                FileEntry(path=name, size=len(content), digest=bytes_digest(content), role=role, writer=writer)
            )
    storage.put(f"s/{STATE}", b"{}")
    files.append(FileEntry(path=STATE, size=2, digest=bytes_digest(b"{}"), role="state"))
    manifest = commit(storage, "s", {}, [PartSummary(writer=0, files=tuple(files))])
    (problem,) = verify_files(storage, "s", manifest)
    assert "stored" in str(problem)
    assert "'a/b'" in str(problem)
    assert verify_files(storage, "s", manifest, deep=False) == []
