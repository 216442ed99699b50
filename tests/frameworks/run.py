"""Run the tests that drive a real framework, each group in an environment of its own.

    python tests/frameworks/run.py [--venvs DIR] [GROUP ...] [-- ARGUMENTS OF PYTEST]

A group is a folder beside this file with a `requirements.txt` whose versions are pinned. Its environment is a layer
over the one that runs this script: torch and the test tools are installed once, and what a framework pins otherwise
shadows them. Without groups all run but those with a file `LOCAL`, which says why; the exit status says whether all
passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_PROCESSES = {"ray_engine": "0", "ray_tune": "0"}  # each process of pytest would start a Ray of its own


def main() -> int:
    """Install and run what the command line names."""
    arguments, pytest_arguments = _split(sys.argv[1:])
    groups = sorted(path.parent.name for path in _HERE.glob("*/requirements.txt"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(groups))
    parser.add_argument("--venvs", type=Path, default=Path(sys.prefix) / "frameworks", help="where environments lie")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.groups) - set(groups)):
        parser.error(f"no such group: {', '.join(unknown)}. There are: {', '.join(groups)}")
    failed = []
    for group in options.groups or [name for name in groups if not (_HERE / name / "LOCAL").exists()]:
        if time.time() > float(os.environ.get("HOLDFAST_TEST_UNTIL", "inf")):
            print(f"{group}: left out, no time left (HOLDFAST_TEST_UNTIL)", flush=True)
            continue
        started = time.monotonic()
        python = _environment(options.venvs.resolve() / group, _HERE / group / "requirements.txt")
        installed = time.monotonic()
        status = subprocess.run(
            [python, "-m", "pytest", "-rs", "-n", _PROCESSES.get(group, "2"), *pytest_arguments, _HERE / group],
            cwd=_ROOT, env={**os.environ, "HOLDFAST_TEST_FRAMEWORKS": group}, check=False,
        ).returncode  # fmt: skip
        print(
            f"{group}: installed in {installed - started:.0f} s, tests {time.monotonic() - installed:.0f} s, "
            f"exit status {status}", flush=True,
        )  # fmt: skip
        if status:
            failed.append(group)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _environment(folder: Path, requirements: Path) -> Path:
    """Python of the environment in `folder`, which holds what `requirements` names."""
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    wanted = requirements.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=False, symlinks=True)
    below = sysconfig.get_path("purelib")
    paths = {"base": str(folder), "platbase": str(folder)}
    layer = Path(sysconfig.get_path("purelib", vars=paths))
    # addsitedir, not a bare path: the folder below has .pth files too (this package is installed in place).
    (layer / "_below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", requirements],
        check=True,
    )
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    sys.exit(main())
