"""Text from elsewhere stays text."""

import re

from hypothesis import given
from hypothesis import strategies as st

from ui.plain import plain

LIVE_SIGN = re.compile(r"(?<!\\)(?:\\\\)*[\[\]!`<>$:*_]")  # a sign that is not escaped


@given(st.text(alphabet="ab \\[]!`<>$:*_#\n", max_size=60) | st.text(max_size=100))
def test_every_sign_is_escaped_and_no_letter_is_lost(text: str) -> None:
    shown = plain(text)
    assert re.sub(r"\\(.)", r"\1", shown) == text
    assert not LIVE_SIGN.search(shown)


def test_length_is_bounded() -> None:
    assert len(plain("!" * 10**6)) <= 8000
