"""`NoteSender`: sends small records to the writer, without making training wait for a device that has to give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from holdfast.writer.client import WriterClient
from holdfast.writer.serial_executor import SerialExecutor

__all__ = ["NoteSender"]


class NoteSender:
    """Sends records in their order: at once, or from a thread of its own as soon as one of them has to wait.

    Args:
        client: the writer.
    """

    def __init__(self, client: WriterClient) -> None:
        self._client = client
        self._executor: SerialExecutor | None = None
        self._newest: Future[None] | None = None  # done when the newest record of that thread is sent
        self._save: tuple[str | None, Future[Any] | None] = (None, None)

    def save_begun(self, name: str, handed_over: Future[Any] | None) -> None:
        """Note the newest save: what is said about it comes after it, for the writer has to know it.

        Args:
            name: of the checkpoint.
            handed_over: done when the writer has the save; None: it has it.
        """
        self._save = (name, handed_over)

    def send(
        self, op: str, args: Mapping[str, Any], *, about: str | None, late: Callable[[], Mapping[str, Any]] | None
    ) -> Future[Any]:
        """Send a record; returns the future of its answer.

        Args:
            op: kind of record, see `WriterClient.run_op`.
            args: the record.
            about: name of its checkpoint.
            late: gives the rest of the record; may wait for a device.
        """
        name, handed_over = self._save
        # Rows of a report name a checkpoint that may come later, or never; they go ahead of it.
        after = handed_over if op != "report" and about is not None and about == name else None
        waits = late is not None or (after is not None and not after.done())
        if not waits and (self._newest is None or self._newest.done()):
            return self._client.run_op(op, **args)
        if self._executor is None:
            self._executor = SerialExecutor("holdfast-notes")
        answered: Future[Any] = Future()

        def send() -> None:
            try:
                wait([] if after is None else [after])
                sent = self._client.run_op(op, **args, **({} if late is None else late()))
            except BaseException as error:  # noqa: BLE001 - a thread edge: the record's future carries it
                answered.set_exception(error)
            else:
                sent.add_done_callback(lambda done: _pass_on(done, answered))

        self._newest = self._executor.run(send)
        return answered

    def behind(self, read: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """Return what calls ``read`` once the records up to now are sent.

        So a trainer that is killed right after it has handed a save over has sent the rows that belong to it too.
        """
        newest = self._newest

        def wait_and_read() -> Mapping[str, Any]:
            wait([] if newest is None else [newest])
            return read()

        return wait_and_read

    def close(self) -> None:
        """Send nothing more than what is on its way; waits for nothing."""
        if self._executor is not None:
            self._executor.close(wait=False)


def _pass_on(done: Future[Any], answered: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        answered.set_exception(error)
    else:
        answered.set_result(done.result())
