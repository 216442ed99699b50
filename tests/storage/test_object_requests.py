"""How many requests an object store gets, counted by the fault proxy."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from object_kit import BUCKET, KEY, SECRET

import holdfast as hf
from holdfast.errors import StorageError, StorageNotFoundError
from holdfast.storage import LocalStorage, MemoryStorage, PrefixStorage
from holdfast.storage.object.object_storage import ObjectStorage
from holdfast.testing import Fault

_names = itertools.count()


@pytest.fixture
def storage(proxy):
    options = {"endpoint": proxy.url, "access_key_id": KEY, "secret_access_key": SECRET, "max_retries": 2}
    return ObjectStorage(f"s3://{BUCKET}/requests/{next(_names)}", options)


def methods(proxy):
    found = [one.method for one in proxy.exchanges]
    proxy.forget()
    return found


def test_reading_takes_one_request(proxy, storage):
    """Opening asks for the beginning: a small object is whole with that, a big one needs only what lies behind."""
    small, big = b"s" * 1000, bytes(range(256)) * 40_000
    storage.put("small", small)
    storage.put("empty", b"")
    with storage.create("big", len(big)) as writer:
        writer.write(memoryview(big[: 8 << 20]))
        writer.write(memoryview(big[8 << 20 :]))
    proxy.forget()
    assert storage.read("small") == small
    with storage.open("small") as reader:
        view = bytearray(reader.size)
        reader.read_into(0, memoryview(view))
    assert (bytes(view), reader.size) == (small, 1000)
    assert methods(proxy) == ["GET", "GET"]
    assert storage.read("big", 1000, 5000) == big[1000:6000]
    assert methods(proxy) == ["GET"]
    assert storage.read("big", 130_000, 300_000) == big[130_000:430_000]
    assert [one.range for one in proxy.exchanges] == ["bytes=0-131071", "bytes=131072-429999"]
    proxy.forget()
    assert storage.read("big") == big
    assert storage.read("empty") == b""
    with storage.open("empty") as reader:
        assert reader.size == 0
    proxy.forget()
    with pytest.raises(StorageNotFoundError):
        storage.open("missing")
    assert methods(proxy) == ["GET"]


def test_loading_a_checkpoint(proxy, storage):
    """Each file of a checkpoint is asked for once; no request only finds out how large something is."""
    saved = hf.save(hf.Checkpoint.at(storage, "one"), {"w": torch.ones(5_000), "note": {"a": 1}})
    proxy.forget()
    hf.load(hf.Checkpoint.at(storage, "one"))
    paths = [one.path.rpartition("/")[2] for one in proxy.exchanges]
    assert "HEAD" not in methods(proxy)
    assert len(paths) == len(set(paths)) == len(saved.manifest.files) + 1


def test_the_trial_of_conditions_leaves_nothing(proxy, storage, monkeypatch):
    """Whether a store keeps conditions is tried once; what killed processes left of such trials goes with it."""
    from holdfast.storage.object import client as conditions

    monkeypatch.setattr(conditions, "_known", {})
    obs, key = storage._obs, f"{storage._prefix}/.tmp-probe/dead"
    obs.put(storage._store, key, b"1")
    assert storage.conditional is True
    assert storage.child("deeper").conditional is True
    assert [one["path"] for page in obs.list(storage._store, storage._prefix) for one in page] == [key], "it is young"
    monkeypatch.setattr(conditions, "_known", {})
    monkeypatch.setattr(conditions, "_OLD", conditions.timedelta(seconds=-1))
    assert storage.conditional is True
    assert not [one for page in obs.list(storage._store, storage._prefix) for one in page]


def test_credentials_that_may_not_delete_leave_one_probe(proxy, storage, monkeypatch):
    """Who may write and not delete leaves an object behind, once: later processes try it on the same one."""
    from holdfast.storage.object import client as conditions

    monkeypatch.setattr(conditions, "_OLD", conditions.timedelta(seconds=-60))
    monkeypatch.setattr(conditions, "_with_old_ones", lambda storage, folder, key: [key])
    proxy.inject(Fault(kind="403", method="DELETE"), Fault(kind="403", method="POST", path="delete"))
    left = set()
    for _ in range(3):
        monkeypatch.setattr(conditions, "_known", {})
        assert storage.conditional is True
        left |= {one["path"] for page in storage._obs.list(storage._store, storage._prefix) for one in page}
    assert len(left) == 1


def test_a_slow_store_holds_up_no_other_one(proxy, storage, monkeypatch):
    """Each store is asked by itself, once, however many threads want to know."""
    from holdfast.storage.object import client as conditions

    asked, go_on, slow_is_asked = [], threading.Event(), threading.Event()

    def ask(client, prefix):
        asked.append(f"{client.uri}/{prefix}".rstrip("/"))
        if "slow" in client.uri:
            slow_is_asked.set()
            assert go_on.wait(30)
        return True

    monkeypatch.setattr(conditions, "_known", {})
    monkeypatch.setattr(conditions, "_try_out", ask)
    options = {"endpoint": proxy.url, "access_key_id": KEY, "secret_access_key": SECRET}
    slow = ObjectStorage("s3://slow-bucket", options)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(lambda: slow.conditional) for _ in range(2)]
        try:
            assert slow_is_asked.wait(30)
            assert storage.conditional is True
        finally:
            go_on.set()
        assert [one.result() for one in waiting] == [True, True]
    assert sorted(asked) == sorted([slow.uri, storage.uri])


def test_an_upload_whose_beginning_fails_is_given_up(storage, monkeypatch):
    """A try that got as far as an upload id aborts it before the next one begins another upload."""
    events = []

    class Upload:
        def write(self, data):
            events.append("write")
            if events.count("write") == 1:
                raise GenericError("connection closed before message completed")

        def __exit__(self, kind, error, trace):
            events.append("abort" if kind else "close")

        def close(self):
            events.append("close")

    class GenericError(Exception):
        pass

    monkeypatch.setattr(storage._obs, "open_writer", lambda *args, **options: Upload())
    writer = storage.create("big", 20 << 20)
    writer.write(memoryview(bytes(20 << 20)))
    writer.close()
    assert events[:3] == ["write", "abort", "write"]
    assert events[-1] == "close"


def test_a_lost_answer_to_the_trial(proxy, storage, monkeypatch):
    """A trial whose first answer was lost meets its own object, and still finds that conditions are kept."""
    from holdfast.storage.object import client as conditions

    monkeypatch.setattr(conditions, "_known", {})
    proxy.inject(Fault(kind="503", at=0, carried_out=True))
    assert storage.put("a", b"1", if_absent=True)
    assert storage.conditional is True


def test_every_storage_says_whether_it_keeps_conditions(tmp_path):
    """One property on every storage."""
    memory = MemoryStorage("conditional")
    assert LocalStorage(tmp_path).conditional is True
    assert memory.conditional is True
    assert PrefixStorage(memory, "a").conditional is True


@pytest.mark.parametrize("kind", [pytest.param("truncated", marks=pytest.mark.slow), "short"])
def test_answers_that_end_early(proxy, storage, kind):
    """Reads, listings and the beginning of an upload are made again; an end without an end is an error, in time."""
    data = bytes(range(256)) * 80_000
    proxy.inject(Fault(kind=kind, every=2))
    with storage.create("big", len(data)) as writer:
        writer.write(memoryview(data[: 16 << 20]))
        writer.write(memoryview(data[16 << 20 :]))
    for number in range(3):
        storage.put(f"many/{number}", b"1")
    assert storage.read("big") == data
    assert storage.read("big", 9_000_000, 9_000_000) == data[9_000_000:18_000_000]
    assert sorted(info.path for info in storage.list()) == ["big", "many/0", "many/1", "many/2"]
    assert sorted(info.path for info in storage.list(recursive=False)) == ["big", "many/"]
    storage.copy("big", "copy")
    assert storage.stat("copy").size == len(data)
    storage.delete_tree("many")
    assert not storage.exists("many/0")
    proxy.inject(Fault(kind=kind, method="GET"))
    with pytest.raises(StorageError):
        storage.read("big")


@pytest.mark.parametrize("compares", ["bare", "nothing right"])
def test_a_store_that_compares_etags_without_their_quotes(storage, monkeypatch, compares):
    """Etags are sent as the store wants them, as radosgw does; one that refuses every etag keeps no conditions."""
    from holdfast.storage.object import client as conditions

    def refuses(client, key, mode):
        tag = None if mode == "create" else mode["e_tag"]
        right = client.obs.head(client.store, key)["e_tag"].strip('"')
        return compares != "bare" or tag != right

    monkeypatch.setattr(conditions, "_known", {})
    monkeypatch.setattr(conditions, "_refuses", refuses)
    assert storage.conditional is (compares == "bare")
    assert conditions.as_condition(storage._client, '"abc"') == ("abc" if compares == "bare" else '"abc"')
