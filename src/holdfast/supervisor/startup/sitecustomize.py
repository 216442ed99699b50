"""Start file of every Python process below `holdfast run`, found through PYTHONPATH before any other sitecustomize.

It registers a signal that writes the Python stacks of all threads to a file of the life (from C: it works while a
thread holds the interpreter lock), and notes the exception that ends the process. Then it gives way to the
sitecustomize that would have been imported without it. Standard library only, and nothing here may fail the script.
"""


def _begin() -> None:
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.environ.get("HOLDFAST_LIFE")
    if folder:
        try:
            from _holdfast_life import report_to  # type: ignore[import-not-found]

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


_begin()
