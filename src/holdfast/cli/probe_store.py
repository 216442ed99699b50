"""What an object store promises and keeps: the probes of ``holdfast doctor`` for a URI."""

from __future__ import annotations

import mmap
import os
import statistics
import time
import uuid
from collections.abc import Callable, Generator
from functools import partial

from holdfast._units import format_bytes, format_duration
from holdfast.errors import HoldfastError, StorageError, StoragePermissionError
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from .probe_disk import probe_promises, rates, read, skew_of, undisturbed, write
from .probes import Finding, ProbeDeadline, bad, good, warn

__all__ = ["probe_store"]

_REQUESTS = 5
_BLOCK = 8 << 20
_PARALLEL = 4


def probe_store(
    storage: Storage, max_bytes: int, deadline: ProbeDeadline, progress: Callable[[int], object]
) -> Generator[Finding]:
    """Yield the findings about a storage that is not a local disk; removes all that it writes."""
    name = f"holdfast-doctor-{uuid.uuid4().hex[:12]}"
    own = storage.child(name)
    try:
        yield _requests(own)
        yield from probe_promises(own)
        yield _clock(own)
        yield _copies(own)
        if max_bytes:
            yield from _speed(own, max_bytes // _BLOCK * _BLOCK, deadline, progress)
    except StoragePermissionError as error:
        yield bad("access", str(error), "no checkpoint can be saved here",
                  "give these credentials the right to write, read, list and delete below this place")  # fmt: skip
        return
    except StorageError as error:
        yield bad("access", str(error), "no checkpoint can be saved here",
                  "check the address, the network and the credentials")  # fmt: skip
        return
    finally:
        left = _clean(own)
    if left:
        yield bad("delete", f"{left}; {storage.uri}/{name} is left", "old checkpoints stay for ever, and are paid for",
                  "give these credentials the right to delete; remove that folder by hand")  # fmt: skip
    else:
        yield good("delete", "works; nothing is left of this probe", "retention can remove old checkpoints")


def _clean(own: Storage) -> str:
    """Remove all of the probe, whatever Ctrl-C says; returns why that did not work."""
    with undisturbed():
        try:
            own.delete_tree("")
        except HoldfastError as error:
            return str(error)
    return ""


def _requests(own: Storage) -> Finding:
    times = []
    for number in range(_REQUESTS):
        start = time.perf_counter()
        own.put(f"small/{number}", b"x" * 1024)
        times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    text = f"{format_duration(middle)} for a small object, at worst {format_duration(max(times))}"
    values = {"median_s": middle, "worst_s": max(times)}
    if middle > 1.0:
        return warn("requests", text, "a save takes some of these, outside of training",
                    "train in the region of the bucket", **values)  # fmt: skip
    return good("requests", text, "what a commit takes at least", **values)


def _clock(own: Storage) -> Finding:
    before = time.time()
    own.put("clock", b"x")
    middle = (before + time.time()) / 2
    modified = own.stat("clock").modified
    if not modified:
        return good("clock", "the store does not tell", "ages go by the clock of this machine")
    skew = modified - middle
    # Stores tell whole seconds.
    return skew_of(0.0 if -1.0 < skew < 0.0 else skew, "the store")


def _copies(own: Storage) -> Finding:
    if not own.traits.copies_itself:
        return good("copies", "would come here and go back", "files that did not change are sent again by every save")
    own.copy("small/0", "small/copied")
    return good("copies", "made by the store itself", "files that did not change are not sent again")


def _speed(own: Storage, size: int, deadline: ProbeDeadline, progress: Callable[[int], object]) -> Generator[Finding]:
    """Measure one transfer alone, and several at once: only these together fill the network."""
    buffer = mmap.mmap(-1, _BLOCK)
    buffer.write(os.urandom(1 << 16) * (_BLOCK >> 16))
    each = max(_BLOCK, size // 2 // _PARALLEL // _BLOCK * _BLOCK)
    count = _PARALLEL if own.traits.num_parallel > 1 else 1
    places = [own.child(f"part{number}") for number in range(count)]
    work = {
        "write": lambda place: write(place, each, buffer, deadline, progress),
        "read": lambda place: read(place, deadline, progress),
    }
    for name, do in work.items():
        alone = rates(partial(do, places[0]))
        many = alone
        if count > 1 and deadline.left_s > 0:
            many = rates(lambda do=do: sum(together(own, [partial(do, place) for place in places])))  # type: ignore[misc]
        best = max(alone[1], many[1])
        text = f"{format_bytes(int(alone[1]))}/s alone, {format_bytes(int(many[1]))}/s {count} at once"
        yield good(
            f"{name} speed", text, f"10 GB take {format_duration(10e9 / max(best, 1.0))}",
            bytes_per_s=alone[1], parallel_bytes_per_s=many[1], parallel=count, bytes=alone[0] + many[0],
        )  # fmt: skip
        if deadline.left_s <= 0:
            return
