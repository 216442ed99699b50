r"""What a text may show that leaves this process: no credentials, and no character that a terminal obeys.

Errors, log records, URIs of storages, what commands print and JSON all pass through here, so no other place decides it.
Credentials are recognised in two ways: by their place (the user part and the query of a URL, and in the words of
clients also ``password=...``), and by their value, once a storage has told it to `conceal`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MASK = "***"
# A user part ends at the last "@" before a blank. "host:9000/" in front of an "@" in the path is no user part.
_USERINFO = re.compile(r"(://)[^\s/@:'\"]*:(?!\d+/)[^\s'\"]*@")
_BARE_USER = re.compile(r"(\bhttps?://)[^\s/@:'\"]+@")  # a token alone, as code hosts take it
# Names may hold blanks, so the path of a URI ends where a sentence goes on: at a quote or a bracket, or at punctuation
# with a blank behind it. A question mark behind that belongs to a pattern or to the name of a tensor.
_QUERY = re.compile(r"(://(?:[^?\n'\"(),:;]|[,:;(](?!\s)|\)(?!\s))*(?<!\s)\?)([^\s'\"]+)")
_SECRET_NAME = re.compile(r"(?i)pass|secret|token|key|cred|sig|sas|auth|pwd|jwt|session|^(?:code|pw|pin)$")
_HARMLESS = re.compile(r"(?:allow_bucket_creation|endpoint_override|region|scheme)=[\w.:/-]*")
_NAMED = re.compile(
    r"(?i)\b([\w-]*(?:passw(?:or)?d|passphrase|secret|token|access_?key|account_?key|api_?key|credential|signature)\w*"
    r"|pwd|sas|sig|authorization)(['\"]?\s*[=:]\s*)['\"]?(?:(?:bearer|basic)\s+)?[^\s,;&)}\]'\"]+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")
_SECRET_VARIABLE = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSPHRASE|ACCESS_KEY|ACCOUNT_KEY|STORAGE_KEY|SAS|CONNECTION_STRING"
)
# Shorter values would mask ordinary words and parts of paths.
_SHORTEST = 8
_LONG_BITS = 14_000  # Python writes no more than 4 300 digits
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})  # asked first: there may be a million of them
_known: dict[str, re.Pattern[str]] = {}


def conceal(values: Iterable[str]) -> None:
    """Let no text of this process show these credentials any more; those of fewer than 8 characters are left out."""
    for value in {part for given in values for part in (given, *given.split())}:  # "Bearer TOKEN" is two words
        if len(value) >= _SHORTEST and value not in _known:
            from urllib.parse import quote  # not above: slow to import, rarely needed

            forms = sorted({value, quote(value), quote(value, safe="")}, key=len, reverse=True)
            _known[value] = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, forms))})(?![A-Za-z0-9])")


def conceal_url(url: str) -> None:
    """Let no text of this process show the credentials of a URL, also where somebody else takes it apart.

    These are its password and those parameters of its query that are called like credentials, or have no name. Other
    parameters are hidden in the URL alone (`masked`): their values may be words that mean something elsewhere.
    """
    _, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    user, mark, password = place.rpartition("@")[0].partition(":")
    conceal([*re.split("[@/]", password), user if mark and not password else ""])
    for part in re.split("[&;]", query):
        if not _HARMLESS.fullmatch(part):
            name, mark, value = part.partition("=")
            if not mark or _SECRET_NAME.search(name):
                conceal([value if mark else name])


def masked(text: str) -> str:
    """Return ``text`` without passwords and queries of URLs in it, and without credentials known here.

    Example:
        >>> masked("cannot open sftp://me:hunter2@host/runs, https://host/a?sig=abc&region=eu")
        'cannot open sftp://***@host/runs, https://host/a?sig=***&region=eu'
    """
    if "://" in text:
        if "?" in text:
            text = _QUERY.sub(_without_values, text)
        if "@" in text:
            text = _BARE_USER.sub(rf"\1{_MASK}@", _USERINFO.sub(rf"\1{_MASK}@", text))
    for value, pattern in list(_known.items()):
        if value in text or "%" in text:
            text = pattern.sub(_MASK, text)
    return text


def masked_client(text: str) -> str:
    """Return the words of a client without what looks like a credential, or stands as one in the environment."""
    conceal(value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name) and not os.path.isabs(value))
    return masked(_BEARER.sub(rf"\1 {_MASK}", _NAMED.sub(rf"\1\2{_MASK}", text)))


def brief(value: object, most: int) -> str:
    """Return the first ``most`` characters of a value as text, for a message about it: whatever it is, nothing raises.

    Example:
        >>> brief([1, 2, 3], 4), brief(10**5000, 80)
        ('[1, ', '<int that is too long to print>')
    """
    try:
        return str(value)[:most]
    except (ValueError, RecursionError):  # Python prints no more than 4 300 digits, also those inside of a list
        return f"<{type(value).__name__} that is too long to print>"


def visible(text: str) -> str:
    r"""Return ``text`` with escapes for the characters that a terminal obeys, or that change the order of others.

    Line breaks and tabs stay: a message may have several lines. Names are put in with `on_one_line`.

    Example:
        >>> visible("a\x1b[2J")
        'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return re.sub(r"[^\n\t]+", lambda match: on_one_line(match[0]), text)


def on_one_line(text: str) -> str:
    r"""Return ``text`` with escapes for line breaks too, so that a name cannot pass for lines of ours.

    Example:
        >>> on_one_line("weight\nok")
        'weight\\nok'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def strict(value: Any) -> Any:
    """Replace what no JSON document may hold: NaN and infinities by their names, numbers of thousands of digits by hex.

    Credentials in URLs are masked.
    """
    if type(value) in _AS_THEY_ARE:
        if type(value) is int and value.bit_length() > _LONG_BITS:
            return hex(value)
        return masked(value) if type(value) is str and "://" in value else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): strict(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [strict(inner) for inner in value]
    return value


def _without_values(match: re.Match[str]) -> str:
    parts = re.split(r"([&;])", match[2])
    return match[1] + "".join(part if part in "&;" or _HARMLESS.fullmatch(part) else _valueless(part) for part in parts)


def _valueless(part: str) -> str:
    name, mark, _ = part.partition("=")
    return f"{name}={_MASK}" if mark else _MASK
