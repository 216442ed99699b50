"""A wall clock that is wrong, for one process and what it starts: a library that stands before the C library's."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

WORKS = shutil.which("cc") is not None and sys.platform.startswith("linux")
# Stands before the C library: the wall clock alone is wrong, by the seconds in a file.
SHIM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("CLOCK_OFFSET_FILE");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *found = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    offset_s = found == MAP_FAILED ? 0 : found;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t which, struct timespec *told) {
    int failed = syscall(SYS_clock_gettime, which, told);
    if (!failed && which == CLOCK_REALTIME && offset_s) told->tv_sec += *offset_s;
    return failed;
}
"""


def environment(folder: Path, offset_s: int) -> dict[str, str]:
    """Give the variables of a process whose clock is wrong by so many seconds.

    Args:
        folder: the library is built there, once, and the clock is a file in it.
        offset_s: how wrong.
    """
    library, clock = folder / "clock.so", folder / f"clock{offset_s}"
    if not library.exists():
        (folder / "clock.c").write_text(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "clock.c"], check=True, timeout=60)
    turn(clock, offset_s)
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(clock)}


def turn(clock: Path, offset_s: int) -> None:
    """Set a clock, also one that is being used."""
    with open(os.open(clock, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(struct.pack("l", offset_s))
