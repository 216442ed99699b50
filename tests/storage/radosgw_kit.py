"""Ceph's S3 gateway behind TLS, from the system's packages: one monitor, one disk in memory, one gateway.

    apt-get install --no-install-recommends ceph-mon ceph-osd ceph-common radosgw

It takes about 15 s to start, and 300 MB of memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
import uuid
from pathlib import Path

_COMMANDS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "openssl")
_START_S = 120

_CONF = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 2147483648
mon data avail crit = 1
mon data avail warn = 1
mon max pg per osd = 1000
keyring = {home}/keyring
admin socket = {home}/$name.asok
log file = {home}/$name.log
pid file = {home}/$name.pid
run dir = {home}
crash dir = {home}
[mon.a]
mon data = {home}/mon
mon addr = 127.0.0.1:{mon}
[osd.0]
osd data = {home}/osd
[client.rgw]
rgw data = {home}/rgw
rgw frontends = beast ssl_endpoint=127.0.0.1:{port} ssl_certificate={home}/server.pem
rgw dns name = localhost
rgw run sync thread = false
rgw enable gc threads = false
rgw enable lc threads = false
"""


def why_not() -> str | None:
    """Return why there can be no such gateway here, None if there can."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    return f"Ceph's packages are not installed ({', '.join(missing)} missing)" if missing else None


class Radosgw:
    """A context manager: a gateway that one user may use.

    Args:
        home: of its files; short, since sockets lie there.
        key: of the user.
        secret: of the user.

    Attributes:
        endpoint: its address, by the only name that its certificate is made out for.
        authority: certificate of who signed that.
    """

    def __init__(self, home: Path, key: str, secret: str) -> None:
        self._home, self._key, self._secret = home, key, secret
        self.authority = home / "ca.pem"
        self.endpoint = ""
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Radosgw:
        home, fsid, disk = self._home, str(uuid.uuid4()), str(uuid.uuid4())
        mon, port = _free_ports(2)
        for name in ("mon", "osd", "rgw"):
            (home / name).mkdir()
        (home / "ceph.conf").write_text(_CONF.format(home=home, fsid=fsid, mon=mon, port=port))
        self.endpoint = f"https://localhost:{port}"
        try:
            self._certify()
            keys = ("ceph-authtool", str(home / "keyring"), "--gen-key")
            self._run(*keys, "--create-keyring", "-n", "mon.", "--cap", "mon", "allow *")
            self._run(*keys, "-n", "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *")
            address = f"[v2:127.0.0.1:{mon}]"
            self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, "monmap")
            self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring")
            self._start("ceph-mon", "-i", "a")
            self._run("ceph", "osd", "create", disk, "0")
            rights = {"osd.0": ("allow profile osd", "allow *"), "client.rgw": ("allow rw", "allow rwx")}
            for name, (of_mon, of_osd) in rights.items():
                made = self._run("ceph", "auth", "get-or-create", name, "mon", of_mon, "osd", of_osd)
                with (home / "keyring").open("a") as keyring:
                    keyring.write(made)
            self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
            self._start("ceph-osd", "-i", "0")
            self._start("radosgw", "-n", "client.rgw")
            self._wait()
            keys = ("--access-key", self._key, "--secret-key", self._secret)
            self._run("radosgw-admin", "user", "create", "--uid=tests", "--display-name=tests", *keys)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _certify(self) -> None:
        new = ("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-days", "2")
        self._run(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority of the tests")
        self._run(*new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
        (self._home / "names").write_text("subjectAltName=DNS:localhost\n")
        sign = ("openssl", "x509", "-req", "-days", "2", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        self._run(*sign, "-in", "server.csr", "-out", "server.crt", "-extfile", "names")
        parts = [(self._home / name).read_text() for name in ("server.key", "server.crt", "ca.pem")]
        (self._home / "server.pem").write_text("".join(parts))

    def _wait(self) -> None:
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(self.authority))),
        )
        until = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                opener.open(self.endpoint, timeout=10).close()
                return
            ended = [one.args for one in self._daemons if one.poll() is not None]
            said = [f"{path}: {path.read_text()[-600:]}" for path in self._home.glob("*.log")]
            assert not ended, f"{ended}: {said}"
            assert time.monotonic() < until, said
            time.sleep(0.3)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self._home / "ceph.conf")}

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self._home, env=self._environment(), capture_output=True, text=True, timeout=_START_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def _start(self, *command: str) -> None:
        with (self._home / "daemons.txt").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*command, "-f"], cwd=self._home, env=self._environment(), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=output,
                )
            )  # fmt: skip


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]
