"""What a Python process of a life does at its start: it registers for stacks, and notes what ends it.

Standard library only: this is imported before anything else.
"""


def report_to(folder: str) -> None:
    """Report to the folder of a life."""
    import atexit
    import faulthandler
    import os
    import signal
    import sys

    pid = os.getpid()
    if hasattr(signal, "SIGRTMIN"):
        # Not closed while this process lives: faulthandler writes to the descriptor.
        stacks = os.open(f"{folder}/stacks-{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(signal.SIGRTMIN + 7, file=stacks, all_threads=True, chain=False)
    noted: list[bool] = []

    def note(error) -> None:  # type: ignore[no-untyped-def]
        if noted or os.getpid() != pid or error is None or isinstance(error, (SystemExit, KeyboardInterrupt)):
            return  # after a KeyboardInterrupt imports make CPython forget to end by SIGINT, which says it, too
        noted.append(True)
        import json
        import time
        import traceback

        lines = traceback.format_exception(type(error), error, error.__traceback__)
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        about = {
            "type": type(error).__name__, "message": str(error)[:1000], "place": place, "time": time.time(),
            "traceback": "".join(lines)[-8000:],
        }  # fmt: skip
        with open(f"{folder}/.error-{pid}", "w", encoding="utf-8", errors="replace") as file:
            json.dump(about, file)
        os.rename(f"{folder}/.error-{pid}", f"{folder}/error-{pid}")

    def excepthook(kind, error, trace) -> None:  # type: ignore[no-untyped-def]
        before(kind, error, trace)
        note(error)

    def at_exit() -> None:
        # A script that sets an excepthook of its own has replaced ours.
        note(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    before, sys.excepthook = sys.excepthook, excepthook
    atexit.register(at_exit)
