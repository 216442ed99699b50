"""Entry point of the command line, and the edge where errors become one line."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import click

import holdfast
from holdfast.errors import CheckpointNotFoundError, ConfigError, HoldfastError

from .convert import average, diff, export, import_
from .edit import pin, prune, rm, unpin
from .follow import best, latest, log, watch
from .ls import ls, show
from .scripts import attack, run, verify_resume
from .stats import page, stats
from .terminal import print_error, print_json
from .transfer import cp, pull, push, sweep
from .verify import doctor, verify

_GROUPS = {
    "Train": ("run",),
    "Look": ("ls", "show", "diff", "log", "stats", "page", "latest", "best"),
    "Check": ("verify", "verify-resume", "attack", "doctor"),
    "Follow": ("watch",),
    "Keep": ("pin", "unpin", "prune", "rm"),
    "Move": ("push", "pull", "cp", "sweep"),
    "Convert": ("export", "import", "average"),
}


class _HoldfastGroup(click.Group):
    """A group whose commands never end in a traceback of ours, and whose help says in a sentence what each is for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _GROUPS.items():
            rows = [(name, _sentence(self.commands[name])) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if "--json" in sys.argv:
                print_json({"error": "UsageError", "message": error.format_message()})
            raise
        except HoldfastError as error:
            # What the user typed is wrong, or what it names is.
            code = 2 if isinstance(error, (ConfigError, CheckpointNotFoundError)) else 1
            if "--json" in sys.argv:
                print_json({"error": type(error).__name__, "message": str(error)})
            print_error(error)
            raise click.exceptions.Exit(code) from error


def _sentence(command: click.Command) -> str:
    """Return the first sentence of what a command says about itself."""
    first = " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".") + "."


@click.group(cls=_HoldfastGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(holdfast.__version__, prog_name="holdfast")
@click.pass_context
def cli(context: click.Context) -> None:
    """Look at, check, keep, copy, convert and follow training checkpoints and runs.

    Alone it lists what is in the current folder, like ls.

    PATH is a directory or a URI such as s3://bucket/run. Where one checkpoint is wanted, a run means its newest one.

    \b
    Exit status:
      0  fine
      1  found a problem or a difference, or what was asked for is not there (yet), or may not be done now
      2  wrong usage: an option, a path or a name that means nothing
    """  # noqa: D301  click wants the character
    if context.invoked_subcommand is None:
        context.invoke(ls)
        click.echo("holdfast --help lists the commands", err=True)


for _command in (
    attack, average, best, cp, diff, doctor, export, import_, latest, log, ls, page, pin, prune, pull, push, rm,
    run, show, stats, sweep, unpin, verify, verify_resume, watch,
):  # fmt: skip
    cli.add_command(_command)


def main() -> None:
    """Run the command line."""
    try:
        try:
            cli(prog_name="holdfast")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        # Errors of storages have been told by now. What is still to be written would be tried again at the end.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        click.echo(f"holdfast: cannot write to standard output: {error.strerror}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
