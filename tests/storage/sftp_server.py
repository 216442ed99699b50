"""An SFTP server on loopback that keeps files in a directory: what the tests of fsspec's SFTP file system talk to."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import paramiko

USER, PASSWORD = "holdfast", "s3cr3t-of-the-tests"


class SftpServer:
    """Serves ``folder`` until `close`; one thread for each connection.

    Attributes:
        denied: names of operations that are answered with "permission denied".
    """

    def __init__(self, folder) -> None:
        self.folder = str(folder)
        self.denied: set[str] = set()
        self._key = paramiko.ECDSAKey.generate()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def options(self) -> dict:
        """Arguments of fsspec's SFTPFileSystem."""
        return {
            "host": "127.0.0.1",
            "port": self.port,
            "username": USER,
            "password": PASSWORD,
            "allow_agent": False,
            "look_for_keys": False,
        }

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                transport = paramiko.Transport(connection)
                transport.add_server_key(self._key)
                transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files, self)
                self._transports.append(transport)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(server=_Door(), event=threading.Event())

    def cut(self) -> None:
        """Drop all connections, as a restarted server or a network does."""
        for transport in self._transports:
            transport.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.cut()


class _Door(paramiko.ServerInterface):
    def check_auth_password(self, username, password):
        return paramiko.AUTH_SUCCESSFUL if (username, password) == (USER, PASSWORD) else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username):
        return "password"

    def check_channel_request(self, kind, chanid):
        return paramiko.OPEN_SUCCEEDED


def _answers(method):
    def wrapped(self, *args):
        if method.__name__ in self.owner.denied:
            return paramiko.SFTP_PERMISSION_DENIED
        try:
            return method(self, *args)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno)

    return wrapped


class _Files(paramiko.SFTPServerInterface):
    def __init__(self, server, owner):
        super().__init__(server)
        self.owner = owner

    def _path(self, path):
        return self.owner.folder + self.canonicalize(path)

    @_answers
    def list_folder(self, path):
        with os.scandir(self._path(path)) as found:
            return [paramiko.SFTPAttributes.from_stat(entry.stat(), entry.name) for entry in found]

    @_answers
    def stat(self, path):
        return paramiko.SFTPAttributes.from_stat(os.stat(self._path(path)))

    lstat = stat

    @_answers
    def open(self, path, flags, attr):
        descriptor = os.open(self._path(path), flags, 0o666)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        handle = paramiko.SFTPHandle(flags)
        file = os.fdopen(descriptor, "wb" if writes else "rb")
        handle.readfile = handle.writefile = file
        return handle

    @_answers
    def remove(self, path):
        os.remove(self._path(path))
        return paramiko.SFTP_OK

    @_answers
    def rename(self, oldpath, newpath):
        os.link(self._path(oldpath), self._path(newpath))  # SFTP's own rename replaces nothing
        os.unlink(self._path(oldpath))
        return paramiko.SFTP_OK

    @_answers
    def posix_rename(self, oldpath, newpath):
        os.replace(self._path(oldpath), self._path(newpath))
        return paramiko.SFTP_OK

    @_answers
    def mkdir(self, path, attr):
        os.mkdir(self._path(path))
        return paramiko.SFTP_OK

    @_answers
    def rmdir(self, path):
        os.rmdir(self._path(path))
        return paramiko.SFTP_OK
