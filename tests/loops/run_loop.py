"""One of the loops as a script: `python run_loop.py NAME RUN`."""

from __future__ import annotations

import random
import sys

import numpy as np

from loops import LOOPS

if __name__ == "__main__":
    random.seed(0)
    np.random.seed(0)
    LOOPS[sys.argv[1]](sys.argv[2], lambda: None)
