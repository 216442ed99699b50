"""An S3 server for the tests of a module and a proxy before it for each test."""

from __future__ import annotations

from bucket_fixtures import local, proxy, remote, server

__all__ = ["local", "proxy", "remote", "server"]
