"""``python -m holdfast`` and the command ``holdfast``."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command line."""
    _open_streams()
    if sys.argv[1:2] == ["run"]:
        from .supervisor import hold

        hold()  # before anything else is imported: a signal meanwhile is for the script, and must not end us
    try:
        from .cli.main import main as command_line
    except KeyboardInterrupt:  # this takes half a second; what comes later handles it
        sys.stderr.write("Aborted!\n")
        sys.exit(1)
    command_line()


def _open_streams() -> None:
    """Let standard streams that the caller has closed lead nowhere: other files would get their numbers.

    What the encoding of the terminal lacks is printed as an escape.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  until the process ends
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is


if __name__ == "__main__":
    main()
