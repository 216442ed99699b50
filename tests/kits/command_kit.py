"""The command ``holdfast``, run in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from holdfast.cli.main import cli


def invoke(*arguments: object, code: int | None = 0) -> Result:
    """Run ``holdfast ARGUMENTS``, which has to end with ``code`` (None: somehow) and not by an error without words."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="holdfast")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code in (None, result.exit_code), result.output
    return result
