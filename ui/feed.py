"""Feed: the last good answer of each question to the server, asked once for all viewers of this console. No Streamlit.

A page never waits longer than `wait_s` for the server, and never loses what it showed: an answer that could not be
renewed comes back with its age and with what went wrong.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

MAX_QUESTIONS = 256  # a key, a page and its parameters each; the least recently asked are forgotten
NUM_THREADS = 4


class State(StrEnum):
    """How an answer stands."""

    FRESH = "fresh"
    LOADING = "loading"  # nothing has come yet
    SLOW = "slow"  # the question is on its way for longer than a page waits
    FAILED = "failed"  # the last try failed


@dataclass(frozen=True, slots=True)
class Answer:
    """The last good answer, if there is one.

    age_s: seconds since it came; None without one. error: of the last try, when that failed. number: counts good answers.
    """

    data: Any
    age_s: float | None
    state: State
    error: BaseException | None = None
    number: int = 0


@dataclass(slots=True)
class _Question:
    """What is known about one question. Guarded by the feed's lock."""

    data: Any = None
    came_s: float | None = None
    tried_s: float | None = None
    asked_s: float | None = None
    error: BaseException | None = None
    pending: Future[None] | None = None
    number: int = 0


class Feed:
    """Questions by key. Any thread may ask; a question is on its way at most once."""

    def __init__(self, wait_s: float = 1.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._wait_s, self._clock = wait_s, clock
        self._lock = threading.Lock()
        self._questions: OrderedDict[Hashable, _Question] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="feed")

    def ask(self, key: Hashable, fetch: Callable[[], Any], ttl_s: float) -> Answer:
        """The answer to `key`, fetched anew when the last try is older than `ttl_s`. `fetch` runs in another thread.

        Nothing is raised: a try that failed is in the answer, and is not repeated within `ttl_s` either.
        """
        with self._lock:
            question = self._questions.setdefault(key, _Question())
            self._questions.move_to_end(key)
            while len(self._questions) > MAX_QUESTIONS:
                self._questions.popitem(last=False)
            is_due = question.tried_s is None or self._clock() - question.tried_s >= ttl_s
            if question.pending is None and is_due:
                question.asked_s = self._clock()
                question.pending = self._threads.submit(self._fetch, question, fetch)
            pending = question.pending
            must_wait = pending is not None and (is_due or question.number == 0)
        if pending is not None and must_wait:
            with suppress(FutureTimeout):
                pending.result(self._wait_s)
        return self._answer(question)

    def forget(self, key: Hashable) -> None:
        """The next `ask` fetches anew; what was known stays until then."""
        with self._lock:
            if (question := self._questions.get(key)) is not None:
                question.tried_s = None

    def peek(self, key: Hashable) -> Answer:
        """What is known, without asking the server."""
        with self._lock:
            question = self._questions.get(key)
        return self._answer(question) if question else Answer(None, None, State.LOADING)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, question: _Question, fetch: Callable[[], Any]) -> None:
        data, error = None, None
        try:
            data = fetch()
        except Exception as fault:  # the page says what it was
            error = fault.with_traceback(None)
        with self._lock:
            question.tried_s, question.error, question.pending = self._clock(), error, None
            if error is None:
                question.data, question.came_s = data, self._clock()
                question.number += 1

    def _answer(self, question: _Question) -> Answer:
        with self._lock:
            age_s = None if question.came_s is None else self._clock() - question.came_s
            answer = Answer(question.data, age_s, State.FRESH, question.error, question.number)
            if question.pending is not None:
                return replace(answer, state=State.SLOW if question.number else State.LOADING)
        if question.error is not None:
            return replace(answer, state=State.FAILED)
        return answer if question.number else replace(answer, state=State.LOADING)
