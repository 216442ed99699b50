"""Arguments of clients, for another process: as JSON, with the credentials apart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from holdfast._outgoing import conceal
from holdfast.errors import ConfigError

__all__ = ["Described", "rebuild_options"]

_SECRET = re.compile(
    r"pass(word|wd|phrase)|secret|token|credential|signature|sas|api_?key|_key$|^p?key$|^auth|cookie|connection_?string",
    re.IGNORECASE,
)
# Credentials of clients described here, so that a handle that was pickled and comes back finds them. Never leaves us.
_known: dict[str, dict[str, str]] = {}


class Described:
    """Arguments, split into plain values and credentials.

    Attributes:
        plain: the arguments, ``{"$secret": name}`` in the place of each credential; None if JSON cannot hold them.
        secrets: the credentials by name.
    """

    __slots__ = ("plain", "secrets")

    def __init__(self, options: Any) -> None:
        self.secrets: dict[str, str] = {}
        plain = self._split(options, "", is_secret=False)
        conceal(self.secrets.values())
        try:
            text = json.dumps(plain, sort_keys=True)
            self.plain: Any = plain if json.loads(text) == plain else None
        except (TypeError, ValueError):
            self.plain = None
        if self.plain is not None and self.secrets:
            _known[text] = self.secrets

    def _split(self, value: Any, path: str, *, is_secret: bool) -> Any:
        if isinstance(value, Mapping):
            is_secret = is_secret and set(value) != {"environ"}  # the name of a variable, not its value
            return {
                name: self._split(inner, f"{path}/{name}", is_secret=is_secret or bool(_SECRET.search(str(name))))
                for name, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._split(inner, f"{path}/{n}", is_secret=is_secret) for n, inner in enumerate(value)]
        if is_secret and isinstance(value, str) and value:
            self.secrets[path] = value
            return {"$secret": path}
        return value


def rebuild_options(plain: Any, secrets: Mapping[str, str] | None, where: str) -> Any:
    """Put the credentials back into the arguments of `Described.plain`.

    Args:
        plain: the arguments.
        secrets: the credentials; None: those that were described in this process.
        where: the storage, for messages.

    Raises:
        ConfigError: a credential is not known in this process.
    """
    known = secrets or _known.get(json.dumps(plain, sort_keys=True)) or {}

    def fill(value: Any) -> Any:
        if isinstance(value, Mapping):
            if set(value) != {"$secret"}:
                return {name: fill(inner) for name, inner in value.items()}
            if value["$secret"] not in known:
                name = value["$secret"].rpartition("/")[2]
                raise ConfigError(
                    f"{where}: its credentials ({name}) are never written down and not known in this process; let the "
                    "client find them in its environment or configuration instead"
                )
            return known[value["$secret"]]
        return [fill(inner) for inner in value] if isinstance(value, list) else value

    return fill(plain)
