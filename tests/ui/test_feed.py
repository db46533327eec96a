"""The feed: one question for all viewers, no page waits long, nothing that was seen is lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.patience import PATIENCE_S, until
from ui.feed import MAX_QUESTIONS, Feed, State


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Server:
    """Answers with the number of the question; may be held back, may fail."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_open = threading.Event()
        self.is_open.set()
        self.error: Exception | None = None

    def __call__(self) -> int:
        self.num_asked += 1
        assert self.is_open.wait(2 * PATIENCE_S)
        if self.error is not None:
            raise self.error
        return self.num_asked


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def feed(clock: Clock) -> Iterator[Feed]:
    found = Feed(wait_s=PATIENCE_S, clock=clock)
    yield found
    found.close()


def test_ten_viewers_ask_the_server_once(feed: Feed, clock: Clock) -> None:
    server = Server()
    with ThreadPoolExecutor(10) as viewers:
        answers = list(viewers.map(lambda _: feed.ask("page", server, 5), range(10)))
    assert server.num_asked == 1
    assert {(a.data, a.state) for a in answers} == {(1, State.FRESH)}
    clock.now_s += 4.9
    assert (feed.ask("page", server, 5).data, feed.ask("page", server, 5).age_s) == (1, pytest.approx(4.9))
    clock.now_s += 0.1
    assert feed.ask("page", server, 5).data == 2


def test_a_slow_server_leaves_the_last_answer_with_its_age(feed: Feed, clock: Clock) -> None:
    server = Server()
    feed.ask("page", server, 1)
    server.is_open.clear()
    clock.now_s += 40
    feed._wait_s = 0.05
    answer = feed.ask("page", server, 1)
    assert (answer.data, answer.age_s, answer.state) == (1, 40, State.SLOW)
    feed.ask("page", server, 1)
    assert server.num_asked == 2, "a question that is on its way is not asked again"
    server.is_open.set()
    until(lambda: feed.peek("page").data == 2)


def test_nothing_yet_is_loading_not_an_answer(feed: Feed) -> None:
    server = Server()
    server.is_open.clear()
    feed._wait_s = 0.05
    answer = feed.ask("page", server, 1)
    assert (answer.data, answer.age_s, answer.state) == (None, None, State.LOADING)
    assert feed.peek("another").state is State.LOADING
    server.is_open.set()


def test_a_failure_keeps_the_last_answer_and_is_not_hammered(feed: Feed, clock: Clock) -> None:
    server = Server()
    feed.ask("page", server, 5)
    server.error = ValueError("down")
    clock.now_s += 5
    answer = feed.ask("page", server, 5)
    assert (answer.data, answer.age_s, answer.state) == (1, 5, State.FAILED)
    assert isinstance(answer.error, ValueError)
    clock.now_s += 4
    assert feed.ask("page", server, 5).age_s == 9
    assert server.num_asked == 2
    server.error = None
    clock.now_s += 1
    again = feed.ask("page", server, 5)
    assert (again.data, again.age_s, again.state, again.error) == (3, 0, State.FRESH, None)


def test_forgetting_asks_anew_and_keeps_what_is_shown(feed: Feed) -> None:
    server = Server()
    feed.ask("page", server, 1000)
    feed.forget("page")
    server.error = ValueError("down")
    assert (feed.ask("page", server, 1000).data, server.num_asked) == (1, 2)


def test_keys_do_not_see_each_other(feed: Feed) -> None:
    feed.ask(("page", "operator"), lambda: "secret", 1000)
    assert feed.ask(("page", "viewer"), lambda: "public", 1000).data == "public"


def test_questions_are_bounded(feed: Feed) -> None:
    for number in range(MAX_QUESTIONS + 10):
        feed.ask(number, lambda: "x", 1000)
    assert feed.peek(0).state is State.LOADING
    assert feed.peek(MAX_QUESTIONS + 9).data == "x"
