"""``python -m holdfast`` and the command ``holdfast``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        from .supervisor import hold

        hold()  # before anything else is imported: a signal meanwhile is for the script, and must not end us
    from .cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
