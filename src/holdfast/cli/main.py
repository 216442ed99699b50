"""Entry point of the command line, and the edge where errors become one line."""

from __future__ import annotations

import sys
from typing import Any

import click

import holdfast
from holdfast.errors import CheckpointNotFoundError, ConfigError, HoldfastError

from .export import export
from .import_ import import_
from .ls import ls
from .show import show
from .sweep import sweep
from .terminal import print_json, printable
from .transfer import cp, pull, push
from .verify import verify

__all__ = ["cli", "main"]


class _Group(click.Group):
    """A group whose commands never end in a traceback of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HoldfastError as error:
            # What the user typed is wrong, or what it names is.
            code = 2 if isinstance(error, (ConfigError, CheckpointNotFoundError)) else 1
            if "--json" in sys.argv:
                print_json({"error": type(error).__name__, "message": str(error)})
            click.echo(f"holdfast: {printable(str(error))}", err=True)
            raise click.exceptions.Exit(code) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(holdfast.__version__, prog_name="holdfast")
def cli() -> None:
    """Look at, check and copy training checkpoints.

    Exit status: 0 fine, 1 found a problem, 2 wrong usage.
    """


cli.add_command(cp)
cli.add_command(export)
cli.add_command(import_)
cli.add_command(ls)
cli.add_command(pull)
cli.add_command(push)
cli.add_command(show)
cli.add_command(sweep)
cli.add_command(verify)


def main() -> None:
    """Run the command line."""
    cli(prog_name="holdfast")


if __name__ == "__main__":
    main()
