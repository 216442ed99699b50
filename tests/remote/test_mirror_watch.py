"""What a trainer knows of the remote side of its run: the answers of its writer, in whatever order they are taken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from holdfast.checkpointer.remote import RemoteWatch
from holdfast.config import Mirror
from holdfast.errors import HoldfastError, StorageError
from holdfast.writer.client import WriterClient

SOON_S = 0.05


class Writer:
    """Answers when it is told to.

    Attributes:
        asked: what it was asked: since which version, and the answer to be.
        at_question: what happens as soon as it is asked for the present state.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, Future[Any]]] = []
        self.at_question: Callable[[], None] = lambda: None

    def run_op(self, op: str, *, since: int | None) -> Future[Any]:
        assert op == "follow"
        answer: Future[Any] = Future()
        self.asked.append((since, answer))
        if since is None:
            self.at_question()
        return answer

    def answer(self, number: int, told: dict[str, Any] | None) -> None:
        """Answer a question, counted from 0."""
        self.asked[number][1].set_result(told)


def state(version: int, *waiting: str, step: int = 4, arrived: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"version": version, "last_step": step, "created": None, "waiting": list(waiting), "arrived": list(arrived)}


def watch(writer: Writer, **options: Any) -> RemoteWatch:
    return RemoteWatch(cast("WriterClient", writer), Mirror("/disk"), "s3://far", staged=True, **options)


def test_an_answer_that_was_given_earlier_and_is_taken_later_counts_for_nothing() -> None:
    """The last checkpoint arrives while the trainer asks how far the remote is: nobody waits for it once more."""
    writer = Writer()
    remote = watch(writer)

    def arrives() -> None:
        writer.answer(0, state(8, step=6))  # news, taken by the thread of the client
        writer.answer(1, state(7, "step_00000006"))  # was on its way already

    writer.at_question = arrives
    remote.finish(SOON_S, 6)


def test_news_of_a_writer_that_was_started_again_count() -> None:
    """They have higher versions than all those of the writer before."""
    writer = Writer()
    remote = watch(writer)
    writer.answer(0, state(7, "step_00000006"))
    writer.at_question = lambda: writer.answer(-1, state(9, "step_00000006"))
    with pytest.raises(StorageError, match="step_00000006"):
        remote.finish(SOON_S, 6)
    writer.answer(1, state(10, step=6))
    writer.at_question = lambda: writer.answer(-1, state(10, step=6))
    remote.finish(SOON_S, 6)


def test_a_writer_that_cannot_upload_is_no_riddle() -> None:
    """It answers that there is nothing to follow: that is said at once, not after the time is up."""
    writer = Writer()
    remote = watch(writer)
    writer.answer(0, None)
    writer.at_question = lambda: writer.answer(-1, None)
    with pytest.raises(HoldfastError, match="could not begin to bring checkpoints to s3://far; its log says why"):
        remote.finish(600.0, 6)


def test_an_answer_that_is_known_already_does_not_end_the_following() -> None:
    """Only an answer with the version that was asked about says that the mirror has ended."""
    writer = Writer()
    remote = watch(writer)
    writer.answer(0, state(1))
    remote._take(state(2))  # what `finish` asked for was faster
    writer.answer(1, state(2))
    assert [since for since, _ in writer.asked] == [0, 1, 2]
    assert not remote._ended
    writer.answer(2, state(2))
    assert remote._ended


def test_what_has_arrived_is_told_once() -> None:
    """However often the writer says so."""
    told = list[str]()
    remote = watch(Writer(), arrived=told.append)
    for names in (("a",), ("a", "b"), ("b",), ()):
        remote._take(state(1, arrived=names))
    assert told == ["a", "b"]
