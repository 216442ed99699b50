"""Object stores behind TLS: certificates are checked, and what is wrong with one is said."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_kit import BUCKET, KEY, SECRET, free_port, make_bucket, s3_environment, server

import holdfast as hf
from holdfast.errors import StorageUnavailableError
from holdfast.storage.object.object_storage import ObjectStorage

pytest.importorskip("obstore", reason="obstore is not installed")
x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed")
DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; `path` is its own."""

    def __init__(self, home: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._home, self._key = home, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.path = home / f"{name}.pem"
        self.path.write_bytes(self._signed(self._name, self._key, is_authority=True))

    def _signed(self, name: Any, key: Any, *, is_authority: bool, sans: tuple[Any, ...] = (), days: int = 0) -> bytes:
        from cryptography.hazmat.primitives import hashes, serialization

        now = datetime.datetime.now(datetime.timezone.utc) + days * DAY
        made = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - DAY).not_valid_after(now + DAY)
        made = made.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        if sans:
            made = made.add_extension(x509.SubjectAlternativeName(sans), critical=False)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def sign(self, name: str, *sans: Any, days: int = 0) -> Path:
        """Make a certificate with its key, for names and addresses, around today or so many days away from it."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        path = self._home / f"{name}.pem"
        told = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(self._signed(subject, key, is_authority=False, sans=sans, days=days) + told)
        return path


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """Our own authority, which this process and those that it starts trust."""
    made = Authority(tmp_path, "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(made.path))
    return made


def here() -> Any:
    return x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@contextlib.contextmanager
def door(certificate: Path | None, came: list[object]) -> Iterator[str]:
    """Shake hands with whoever comes, by TLS if there is a certificate, and answer 500 to the first request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate is not None:
        context.load_cert_chain(certificate)
    answer = b"HTTP/1.1 500 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def serve() -> None:
        while True:
            try:
                sock, address = listener.accept()
                came.append(address)
            except OSError:
                return
            with contextlib.suppress(OSError), sock:
                if certificate is None:
                    sock.recv(4096)
                    sock.sendall(answer)
                else:
                    with context.wrap_socket(sock, server_side=True) as inner:
                        inner.recv(4096)
                        inner.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def put(endpoint: str) -> None:
    limits = {"max_retries": 0, "deadline_s": 60, "timeout_s": 30}
    told = {"endpoint": endpoint, "access_key_id": KEY, "secret_access_key": SECRET, **limits}
    ObjectStorage("s3://bucket/run", told).put("a", b"1")


def test_a_wrong_certificate_is_refused_in_words(authority: Authority, tmp_path: Path) -> None:
    """Of another authority, for another name, of another day, none at all: each has its own; none is tried again."""
    elsewhere = Authority(tmp_path, "stranger").sign("theirs", here())
    wrong = {
        elsewhere: r"certificate is refused \(UnknownIssuer\).*SSL_CERT_FILE",
        authority.sign("name", x509.DNSName("elsewhere.example")): "made out for another name",
        authority.sign("old", here(), days=-9): "time is over",
        authority.sign("early", here(), days=9): "has not come",
        None: "does not speak TLS",
    }
    for certificate, message in wrong.items():
        came: list[object] = []
        with door(certificate, came) as endpoint, pytest.raises(StorageUnavailableError, match=message) as caught:
            put(endpoint)
        assert SECRET not in str(caught.value)
        assert len(came) == 1
    with door(authority.sign("right", here()), []) as endpoint, pytest.raises(StorageUnavailableError, match="500"):
        put(endpoint)


@pytest.mark.slow
def test_a_run_behind_tls(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and writer process trust what SSL_CERT_FILE names: saves, retention and a resume as without TLS."""
    import torch

    pytest.importorskip("moto", reason="moto is not installed")
    certificate, port = str(authority.sign("server", here())), free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), "-c", certificate]
    with server([*command, "-k", certificate], port):
        endpoint = f"https://127.0.0.1:{port}"
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.path))  # for boto3, which makes the bucket
        make_bucket(endpoint)
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        for start, upto in ((0, 3), (3, 5)):
            state = {"model": torch.nn.Linear(3, 2), "n": 0}
            with hf.Checkpointer(f"s3://{BUCKET}/run", state, every=1, keep=hf.Keep(last=2)) as ck:
                assert ck.global_step == start
                while ck.global_step < upto:
                    state["n"] += 1
                    ck.step()
                    ck.wait()
        assert state["n"] == 5
        # The last two, and the one that was resumed from.
        assert [one.step for one in hf.Checkpointer(f"s3://{BUCKET}/run").checkpoints()] == [5, 4, 3]
