"""Print how long a writer process takes from its launch to its first answer. Run as a script; nothing is asserted."""

from __future__ import annotations

import statistics
import time

from holdfast.errors import HoldfastError
from holdfast.writer.client import WriterClient


def measure() -> tuple[float, float]:
    """Seconds of the call that launches, and until the first answer."""
    begun = time.perf_counter()
    client = WriterClient.start()
    launched = time.perf_counter() - begun
    assert isinstance(client.run_op("records").exception(30), HoldfastError)  # no run is open: an answer all the same
    answered = time.perf_counter() - begun
    client.close()
    return launched, answered


if __name__ == "__main__":
    pairs = [measure() for _ in range(9)]
    launched, answered = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(f"launch call {launched * 1e3:.1f} ms, first answer after {answered * 1e3:.1f} ms (median of {len(pairs)})")
