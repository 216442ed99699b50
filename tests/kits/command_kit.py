"""The command ``holdfast``, run in this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from click.testing import CliRunner, Result

from holdfast.cli.main import cli


def invoke(*arguments: object, code: int | None = 0) -> Result:
    """Run ``holdfast ARGUMENTS``, which has to end with ``code`` (None: somehow) and not by an error without words."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="holdfast")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (None, result.exit_code), result.output
    return result


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """Let the modes of files hold in this thread for root, too: without the capabilities that pass them over."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this thread
    assert libc.capget(header, before) == 0
    fewer = (ctypes.c_uint32 * 6)(*before)
    fewer[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
