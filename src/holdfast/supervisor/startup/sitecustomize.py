"""Start file of every Python process below `holdfast run`, found through PYTHONPATH before any other sitecustomize.

It registers a signal that writes the Python stacks of all threads to a file of the life (from C: it works while a
thread holds the interpreter lock), and notes the exception that ends the process. Then it gives way to the
sitecustomize that would have been imported without it. Standard library only, and nothing here may fail the script.
"""


def report_to(folder: str) -> None:
    """Register for stacks, and note what ends this process, in the folder of a life."""
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


def _begin() -> None:
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.environ.get("HOLDFAST_LIFE")
    if folder:
        try:  # noqa: SIM105 - nothing is imported for it
            report_to(folder)
        except Exception:  # noqa: BLE001 - a folder that is gone or full: the script runs as it is
            pass
    sys.path[:] = [entry for entry in sys.path if entry != here]
    import importlib.machinery
    import importlib.util

    found = importlib.machinery.PathFinder.find_spec("sitecustomize", None)
    if found is not None and found.loader is not None:
        module = importlib.util.module_from_spec(found)
        sys.modules["sitecustomize"] = module
        found.loader.exec_module(module)


if __name__ != "spare":  # which runs this file for `report_to` alone
    _begin()
