"""Find a bucket, its settings and its credentials from a URI, options and the environment.

Settings and credentials are kept apart from the first moment: settings describe the storage to other processes and may
be written down, credentials go over the socket to the writer and nowhere else. The environment is read here, once, so
that a writer which was started earlier sees what the training script set later.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast._outgoing import conceal
from holdfast.errors import ConfigError

# Options that are credentials: kept out of descriptions. Options are named as obstore names its configuration.
SECRETS = frozenset(
    {
        "access_key_id", "secret_access_key", "session_token", "sse_customer_key_base64",
        "account_key", "sas_key", "client_secret", "token", "encryption_key",
        "service_account_key", "bearer_token",
    }
)  # fmt: skip

# Option -> environment variables, the first that is set wins.
_Table = dict[str, tuple[str, ...]]
_S3: _Table = {
    "endpoint": ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_SECRET_ACCESS_KEY",),
    "session_token": ("AWS_SESSION_TOKEN", "AWS_TOKEN"),
    "virtual_hosted_style_request": ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST",),
    "request_payer": ("AWS_REQUEST_PAYER",),
    "server_side_encryption": ("AWS_SERVER_SIDE_ENCRYPTION",),
    "sse_kms_key_id": ("AWS_SSE_KMS_KEY_ID",),
    "sse_customer_key_base64": ("AWS_SSE_CUSTOMER_KEY_BASE64",),
    "skip_signature": ("AWS_SKIP_SIGNATURE",),
    "profile": ("AWS_PROFILE",),
}
_HMAC: _Table = {
    "endpoint": ("GCS_ENDPOINT_URL",),
    "access_key_id": ("GCS_KEY",),
    "secret_access_key": ("GCS_SECRET",),
}
_GCS: _Table = {
    "base_url": ("GOOGLE_BASE_URL",),
    "service_account": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    "service_account_key": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "application_credentials": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "bearer_token": ("GOOGLE_BEARER_TOKEN",),
    "skip_signature": ("GOOGLE_SKIP_SIGNATURE",),
}
_AZURE: _Table = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_ACCOUNT_NAME"),
    "account_key": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_ACCOUNT_ACCESS_KEY",  # of Composer, as the account name without STORAGE
    ),
    "sas_key": ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    "token": ("AZURE_STORAGE_TOKEN",),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "client_id": ("AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID"),
    "client_secret": ("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET"),
    "tenant_id": ("AZURE_STORAGE_TENANT_ID", "AZURE_TENANT_ID"),
    "use_emulator": ("AZURE_STORAGE_USE_EMULATOR",),
    "use_azure_cli": ("AZURE_USE_AZURE_CLI",),
    "encryption_key": ("AZURE_ENCRYPTION_KEY",),
}
_OCI: _Table = {
    "endpoint": ("OCI_ENDPOINT_URL",),
    "namespace": ("OCI_NAMESPACE",),
    "region": ("OCI_REGION",),
    "access_key_id": ("OCI_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"),
    "secret_access_key": ("OCI_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
}
# Store -> (settings that stand for credentials or say that none are needed, variables and files of others that do).
_OTHERWISE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "S3Store": (
        ("skip_signature",),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    ),
    "GCSStore": (
        ("service_account", "application_credentials", "skip_signature"),
        ("~/.config/gcloud/application_default_credentials.json",),
    ),
    "AzureStore": (
        ("use_emulator", "use_azure_cli"),
        ("AZURE_FEDERATED_TOKEN_FILE",),
    ),
}
_NAMED = {
    "s3": (*_S3["access_key_id"], *_S3["secret_access_key"], "AWS_PROFILE", "~/.aws/credentials", "~/.aws/config"),
    "oci": (*_OCI["access_key_id"], *_OCI["secret_access_key"]),
    "gs": (*_HMAC["access_key_id"], *_HMAC["secret_access_key"], *_GCS["application_credentials"],
           *_GCS["service_account"], *_GCS["service_account_key"]),
    "az": (*_AZURE["account_key"], *_AZURE["sas_key"], *_AZURE["token"], *_AZURE["client_secret"]),
}  # fmt: skip
_SETTINGS = frozenset({"allow_bucket_creation", "endpoint_override", "region", "scheme"})
# A bucket, or a bucket and what it belongs to: container@account.dfs.core.windows.net, bucket@namespace.
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$-]*(@[A-Za-z0-9._-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """A bucket with everything needed to reach it.

    Attributes:
        store: class of obstore.store: "S3Store", "GCSStore" or "AzureStore".
        scheme: as in the canonical URI.
        netloc: bucket as the user wrote it.
        bucket: bucket or container as the client wants it.
        prefix: directory in the bucket, "" for all of it.
        options: what was chosen, without credentials.
        secrets: credentials; never written down.
        extra: extra of Holdfast that brings the client.
    """

    store: str
    scheme: str
    netloc: str
    bucket: str
    prefix: str
    options: dict[str, str]
    secrets: dict[str, str]
    extra: str

    def __repr__(self) -> str:
        return f"BucketConfig({self.scheme}://{self.netloc}/{self.prefix})"  # never the secrets


def split_settings(uri: str) -> tuple[str, dict[str, str]]:
    """Split a URI of S3 from the settings behind its "?", which are those of pyarrow.

    A "?" that no known setting follows is part of the path, as it is of a key.

    Raises:
        ConfigError: an unknown setting stands beside a known one.

    Example:
        >>> split_settings("s3://bucket/runs?endpoint_override=localhost:9000&scheme=http")
        ('s3://bucket/runs', {'endpoint': 'http://localhost:9000'})
    """
    from urllib.parse import parse_qsl  # not above: slow to import, rarely needed

    place, mark, query = uri.rpartition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    known = settings.keys() & _SETTINGS
    if not mark or not place.startswith(("s3://", "s3a://")) or not known:
        return uri, {}
    if others := sorted(settings.keys() - known):
        raise ConfigError(f"{uri}: {', '.join(others)} is no setting; there are {', '.join(sorted(_SETTINGS))}")
    options: dict[str, str] = {}
    if endpoint := settings.get("endpoint_override"):
        options["endpoint"] = endpoint if "://" in endpoint else f"{settings.get('scheme', 'https')}://{endpoint}"
    if region := settings.get("region"):
        options["region"] = region
    return place, options


def find_place(uri: str, options: Mapping[str, object], secrets: Mapping[str, str]) -> BucketConfig:
    """Read a URI, the options given with it, and the environment for other options.

    Raises:
        ConfigError: the URI is malformed, or a needed setting is neither given nor in the environment.
    """
    scheme, _, rest = uri.partition("://")
    netloc, _, prefix = rest.partition("/")
    if "?" in rest or "#" in rest:
        raise ConfigError(f"location {uri!r}: settings go into options or the environment, not into the URI")
    if ":" in netloc or not _BUCKET.fullmatch(netloc):
        # A URI is shown, logged and stored: credentials in it would be too.
        raise ConfigError(f"location {uri!r}: write scheme://bucket/prefix; credentials belong into the environment")
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in {**options, **secrets}.items()
        if value is not None
    }
    kind, find = _FINDERS[scheme]
    store, bucket, settings = find(netloc, given)
    _check(uri, settings)
    secrets = {name: value for name, value in sorted(settings.items()) if name in SECRETS}
    conceal(secrets.values())
    return BucketConfig(
        store=store,
        scheme=kind,
        netloc=netloc,
        bucket=bucket,
        prefix=prefix.strip("/"),
        options={name: value for name, value in sorted(settings.items()) if name not in SECRETS},
        secrets=secrets,
        extra={"S3Store": "s3", "GCSStore": "gcs", "AzureStore": "azure"}[store],
    )


def _check(uri: str, settings: Mapping[str, str]) -> None:
    """Refuse settings on which the client would panic, or that no store takes.

    Raises:
        ConfigError: an endpoint without scheme, or a credential with a blank or a line break at an end.
    """
    for name in ("endpoint", "base_url"):
        endpoint = settings.get(name) or "https://"
        if not endpoint.startswith(("http://", "https://")) or endpoint != "".join(endpoint.split()):
            shown = "***" if "@" in endpoint else repr(endpoint)
            raise ConfigError(f"{uri}: {name}={shown}: give it with its scheme, as in 'https://host:9000'")
    for name in sorted(SECRETS & settings.keys() - {"service_account_key"}):  # that is JSON
        value = settings[name]
        if value != value.strip() or (name == "access_key_id" and not value.isprintable()):
            raise ConfigError(
                f"{uri}: {name} begins or ends with a blank or a line break (of the file that it was read from?): "
                "leave that out, in the options or the environment"
            )


def looked_for(place: BucketConfig) -> tuple[str, ...]:
    """Name the variables and files in which credentials were looked for; () if some were found, or none are needed.

    Asks nobody: the role of a machine may still let it in.
    """
    settings, others = _OTHERWISE[place.store]
    if place.secrets or any(place.options.get(name, "false") != "false" for name in settings):
        return ()
    for other in others:
        if os.path.exists(os.path.expanduser(other)) if other.startswith("~") else os.environ.get(other):
            return ()
    return (*_NAMED["az" if place.scheme == "abfs" else place.scheme], *others)


def _with_environment(given: dict[str, str], table: _Table) -> dict[str, str]:
    settings = dict(given)
    # Given credentials exclude those of the environment: half a key pair from each would not work.
    secrets_given = SECRETS.intersection(given)
    for option, names in table.items():
        if option not in settings and not (option in SECRETS and secrets_given):
            value = next((os.environ[name] for name in names if os.environ.get(name)), None)
            if value is not None:
                settings[option] = value
    return settings


def _find_s3(netloc: str, given: dict[str, str]) -> tuple[str, str, dict[str, str]]:
    if "@" in netloc:
        raise ConfigError(f"bucket {netloc!r}: give a bucket name without '@'; credentials belong into the environment")
    settings = _with_environment(given, _S3)
    # In the order of the AWS tools: keys, then the web identity of a pod, then files. Roles are left to the client.
    identity = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and "profile" not in settings
    if "access_key_id" not in settings and "skip_signature" not in settings and not identity:
        settings = {**_from_profile(settings.get("profile", "default")), **settings}
    settings.pop("profile", None)
    settings.setdefault("region", "us-east-1")
    return "S3Store", netloc, settings


def _from_profile(profile: str) -> dict[str, str]:
    """Read the static keys of a profile from the files of the AWS tools, which obstore does not know."""
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    settings: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(os.path.expanduser(os.environ.get(variable, default)), encoding="utf-8")
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # the keys may still come from elsewhere; if not, the first request says what is missing
        if parser.has_section(section):
            settings |= {names[key]: value for key, value in parser.items(section) if key in names and value}
    return settings


def _find_gcs(netloc: str, given: dict[str, str]) -> tuple[str, str, dict[str, str]]:
    native = any(name in given for name in ("service_account", "service_account_key", "bearer_token", "base_url"))
    hmac = {} if native else _with_environment(given, _HMAC)
    if "access_key_id" in hmac:
        return "S3Store", netloc, {"endpoint": "https://storage.googleapis.com", "region": "auto", **hmac}
    return "GCSStore", netloc, _with_environment(given, _GCS)


def _find_azure(netloc: str, given: dict[str, str]) -> tuple[str, str, dict[str, str]]:
    container, _, host = netloc.partition("@")
    settings = _with_environment(given, _AZURE)
    if host:
        settings["account_name"] = host.partition(".")[0]
    if "account_name" not in settings and settings.get("use_emulator") != "true":
        raise ConfigError(
            f"container {container!r}: the storage account is not known: set AZURE_STORAGE_ACCOUNT_NAME, or write "
            f"abfs://{container}@ACCOUNT.dfs.core.windows.net/prefix"
        )
    return "AzureStore", container, settings


def _find_oci(netloc: str, given: dict[str, str]) -> tuple[str, str, dict[str, str]]:
    bucket, _, namespace = netloc.partition("@")
    settings = _with_environment(given, _OCI)
    namespace = namespace or settings.pop("namespace", "")
    region = settings.get("region", "")
    if "endpoint" not in settings:
        missing = [name for name, value in (("OCI_NAMESPACE", namespace), ("OCI_REGION", region)) if not value]
        if missing:
            raise ConfigError(
                f"oci://{netloc}: {' and '.join(missing)} not set: the S3-compatible endpoint of Oracle is "
                "https://NAMESPACE.compat.objectstorage.REGION.oraclecloud.com"
            )
        settings["endpoint"] = f"https://{namespace}.compat.objectstorage.{region}.oraclecloud.com"
    settings.pop("namespace", None)
    settings.setdefault("region", "us-east-1")
    return "S3Store", bucket, settings


_Finder = Callable[[str, dict[str, str]], tuple[str, str, dict[str, str]]]
# Scheme -> (scheme of the canonical URI, finder).
_FINDERS: dict[str, tuple[str, _Finder]] = {
    "s3": ("s3", _find_s3),
    "s3a": ("s3", _find_s3),
    "gs": ("gs", _find_gcs),
    "gcs": ("gs", _find_gcs),
    "az": ("az", _find_azure),
    "azure": ("az", _find_azure),
    "adl": ("az", _find_azure),
    "abfs": ("abfs", _find_azure),
    "abfss": ("abfs", _find_azure),
    "oci": ("oci", _find_oci),
}
