"""Small mistakes, one at a time, and whether the tests notice: `make mutants`.

Each patch in `*.txt` beside this file is old and new text of one file of the package, with the tests that should fail
first. torch is loaded once; each patch gets a fork of this process and a copy of the package, so that writers and
workers started by tests run the mistake too, and as many are tried at a time as there are processors. What survives is
listed, and fails the run unless a reason stands with it; a tenth fails only where so many survive that less than 95 of
100 are noticed in all (`_allowed`). No patch is begun after HOLDFAST_TEST_UNTIL (seconds since 1970).

    python tests/mutants/run.py [--tenth] [WORD ...]      # all; a tenth, all in ten days; those with these words
"""

from __future__ import annotations

import atexit
import compileall
import itertools
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_BOUND_S = 300
_PATCH = re.compile(
    r"^=== (?P<file>\S+) \| (?P<tests>[^\n|]+?)(?: \| survives: (?P<reason>[^\n]+))?\n"
    r"--- old\n(?P<old>.*?)\n\+\+\+ new(?P<new>.*?)(?=\n=== |\n*\Z)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One mistake.

    Attributes:
        file: below src/holdfast.
        old, new: the text and what it becomes; ``old`` occurs once.
        tests: arguments of pytest.
        reason: why no test can notice it; "" if one must.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str = ""

    @property
    def name(self) -> str:
        """Name it in one line."""
        first = next((line for line in self.new.splitlines() if line not in self.old.splitlines()), "removed")
        return f"{self.file}: {first.strip()[:80]}"

    def apply(self, package: Path) -> None:
        """Change a copy of the package."""
        path = package / self.file
        path.write_text(path.read_text().replace(self.old, self.new))

    def misfit(self) -> str | None:
        """Say why it cannot be applied; None if it can."""
        if any(not (ROOT / test).exists() for test in self.tests if test.startswith("tests/")):
            return f"{self.name}: one of {' '.join(self.tests)} is not there"
        path = ROOT / "src/holdfast" / self.file
        text = path.read_text() if path.exists() else ""
        if (num := text.count(self.old)) != 1:
            return f"{self.name}: its old text occurs {num} times"
        try:
            compile(text.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            return f"{self.name}: it makes no Python ({error})"
        return None


def patches() -> list[Patch]:
    """Read all patches.

    Raises:
        SystemExit: a file of them is not laid out as the others.
    """
    found = []
    for path in sorted(HERE.glob("*.txt")):
        text = path.read_text()
        rows = [match.groupdict() for match in _PATCH.finditer(text)]
        if len(rows) != len(re.findall(r"^=== ", text, re.MULTILINE)):
            sys.exit(f"{path.name}: a patch is not laid out as the others")
        for row in rows:
            row["tests"], row["reason"] = (*row["tests"].split(),), row["reason"] or ""
            found.append(Patch(**{**row, "new": row["new"].removeprefix("\n")}))
    return found


@cache
def _compiled() -> Path:
    """Copy the package once, with its bytecode, which a copy of the copy need not make again."""
    folder = tempfile.mkdtemp(prefix="mutants-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(folder) / "holdfast"
    shutil.copytree(ROOT / "src/holdfast", package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(package, quiet=1)
    return package


def fails(tests: Sequence[str], patch: Patch | None, *, bound_s: float = _BOUND_S) -> bool:
    """Run tests on a copy of the package, with a mistake; True if one fails, or does not end.

    Raises:
        SystemExit: the tests cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / "holdfast"
        shutil.copytree(_compiled(), package)
        if patch is not None:
            patch.apply(package)
        child = os.fork()
        if child == 0:
            status = 1  # what cannot be imported is noticed; an exception may not get further: this is a fork
            try:
                status = _test(tests, folder)
            finally:
                os._exit(status)
        until = time.monotonic() + bound_s
        while time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                # 2: they cannot be imported; 5: no quick test is among them; a signal: it has written where it must not
                if code >= 0 and code not in ((0, 1, 5) if patch is None else (0, 1, 2, 5)):
                    sys.exit(f"{' '.join(tests)}: cannot be run (exit status {code})")
                return code in (1, 2) or code < 0
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True


def _test(tests: Sequence[str], folder: str) -> int:
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    sys.path.insert(0, folder)
    os.environ |= {"PYTHONPATH": folder, "HOLDFAST_TEST_SHRINK": "0"}
    os.environ.pop("HOLDFAST_TEST_UNTIL", None)  # conftest skips all tests after it: no mistake would be noticed
    import pytest

    import holdfast

    assert holdfast.__file__ is not None
    if not holdfast.__file__.startswith(folder):
        return 70  # nothing would be proved
    arguments = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow and not long"]
    return int(pytest.main(["-o", "addopts=", *arguments, *tests]))


@cache
def _prove_nothing(tests: tuple[str, ...]) -> bool:
    return fails(tests, None) and fails(tests, None)  # a bound may not fit a busy machine


def _outcome(patch: Patch, until: float) -> str:
    """Tell what the tests of a patch make of it: "noticed", "SURVIVES"; "" where no time is left to try."""
    if time.time() > until:
        return ""
    if _prove_nothing(patch.tests):
        return f"NOT TRIED, {' '.join(patch.tests)} fails as it is"
    return "noticed" if fails(patch.tests, patch) else "SURVIVES"


def main(words: list[str]) -> int:
    """Try patches, one on each processor at a time; return the exit status."""
    chosen, is_sample = patches(), "--tenth" in words
    if is_sample:
        words.remove("--tenth")
        chosen = chosen[int(time.time() // 86400) % 10 :: 10]  # ten days try all
    chosen = [patch for patch in chosen if all(word in f"{patch.name} {patch.tests}" for word in words)]
    import pytest  # once, for all forks
    import torch

    print(f"torch {torch.__version__}, pytest {pytest.__version__}", flush=True)
    survivors = [patch for patch in chosen if patch.misfit() is not None]
    for patch in survivors:
        print(f"DOES NOT FIT the code any more: {patch.misfit()}", flush=True)
    groups: dict[tuple[str, ...], list[Patch]] = {}
    for patch in chosen:
        if patch not in survivors:
            groups.setdefault(patch.tests, []).append(patch)
    num, total, skipped = len(survivors), len(chosen), 0
    until = float(os.environ.get("HOLDFAST_TEST_UNTIL", "inf"))
    _compiled()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        # In any order: if the time ends, it must not always be the last files that are left out.
        order = random.sample([*groups.values()], len(groups))
        tried = {pool.submit(_outcome, patch, until): patch for group in order for patch in group}
        for future in as_completed(tried):
            patch, outcome = tried[future], future.result()
            if not outcome:
                skipped += 1
                continue
            num += 1
            explained = f" ({patch.reason})" if outcome == "SURVIVES" and patch.reason else ""
            print(f"{num}/{total} {outcome}{explained}: {patch.name}", flush=True)
            if outcome != "noticed" and not explained:
                survivors.append(patch)
    if skipped:
        print(f"{skipped} are not tried: no time left (HOLDFAST_TEST_UNTIL)")
    print(f"{num - len(survivors)} of {num} noticed or explained")
    for patch in survivors:
        print(f"not noticed: {patch.name}")
    if is_sample and all(patch.misfit() is None for patch in survivors):
        return int(len(survivors) > _allowed(num))
    return int(bool(survivors))


def _allowed(num: int) -> int:
    """How many of a sample may survive: more would come once in a hundred samples if 95 of 100 are noticed in all."""
    chances = itertools.accumulate(math.comb(num, k) * 0.05**k * 0.95 ** (num - k) for k in range(num + 1))
    return next((k for k, chance in enumerate(chances) if chance >= 0.99), num)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
