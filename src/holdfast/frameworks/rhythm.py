"""How often a callback brings a checkpoint."""

from __future__ import annotations

from holdfast.errors import ConfigError

__all__ = ["epochs_between"]


def epochs_between(every_n_epochs: int | None, every_n_steps: int | None) -> int:
    """Return the epochs from one checkpoint to the next: 1 if neither argument is given.

    Raises:
        ConfigError: both are given, or one is no whole number of at least 1.
    """
    given = [one for one in (every_n_epochs, every_n_steps) if one is not None]
    if len(given) > 1 or any(type(one) is not int or one < 1 for one in given):
        raise ConfigError(
            f"ReportCallback(every_n_epochs={every_n_epochs!r}, every_n_steps={every_n_steps!r}): give one of them, "
            "every_n_epochs or every_n_steps, as a whole number of at least 1; two callbacks can do both"
        )
    return every_n_epochs or 1
