"""Start file of a script that is being verified: this folder is put at the front of PYTHONPATH.

It gives way to the `sitecustomize` that the interpreter would have found without it, and then loads the observer, which
needs no Holdfast in this interpreter.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _chain() -> None:
    """Run the next `sitecustomize` of the path, if there is one, as if this file were not there."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _observe() -> None:
    plan = os.environ.get("HOLDFAST_VERIFY")
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "observer.py")
    spec = importlib.util.spec_from_file_location("_holdfast_observer", path)
    if not plan or spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["_holdfast_observer"] = module
    spec.loader.exec_module(module)
    module.start(plan)


_observe()
_chain()
