"""A stream ends where it should: stop strings, stop ids, length; text and log probabilities end with it."""

from runtime.engine.detokenizer import IncrementalDetokenizer
from runtime.engine.stats import EngineStats
from runtime.engine.stream import Stream
from runtime.engine.tokenizer import ByteTokenizer
from runtime.request import FinishReason, Request, SamplingParams, TokenLogprob
from runtime.schedule.sequence import Sequence

EOS = frozenset({ByteTokenizer.EOS_ID})


def stream(stop: tuple[str, ...] = (), **params) -> Stream:
    sequence = Sequence(Request("r", (1,), SamplingParams(stop=stop, **params)))
    return Stream(sequence, IncrementalDetokenizer(ByteTokenizer(), stop=stop))


def test_stop_string_over_two_pushes_is_never_shown():
    s = stream(stop=("END",))
    first = s.push(tuple(b"ab E"), (), None, EOS)
    assert (first.text, first.finish_reason) == ("ab ", None)
    logprobs = tuple(TokenLogprob(t, -1.0) for t in b"NDzz")
    last = s.push(tuple(b"NDzz"), logprobs, None, EOS)
    assert (last.text, last.finish_reason, last.stop_reason) == ("", FinishReason.STOP, "END")
    assert last.token_ids == tuple(b"ND")
    assert len(last.logprobs) == 2


def test_held_back_text_comes_with_the_end():
    s = stream(stop=("END",))
    assert s.push(tuple(b"the E"), (), None, EOS).text == "the "
    assert s.push(tuple(b"N"), (), FinishReason.LENGTH, EOS).text == "EN"


def test_end_of_text_gives_no_text_and_no_reason():
    event = stream().push((*b"ok", 256), (), FinishReason.STOP, EOS)
    assert (event.text, event.stop_reason, event.finish_reason) == ("ok", None, FinishReason.STOP)


def test_requested_stop_id_is_named():
    event = stream(stop_token_ids=(33,)).push((*b"ok", 33), (), FinishReason.STOP, EOS | {33})
    assert (event.text, event.stop_reason) == ("ok", 33)


def test_half_a_character_waits():
    s = stream()
    smile = "🙂".encode()
    assert s.push(tuple(smile[:3]), (), None, EOS).text == ""
    assert s.push((smile[3],), (), None, EOS).text == "🙂"


def test_times_are_spread_over_the_tokens_of_a_launch():
    stats = EngineStats(clock=lambda: 0.0)
    s = stream()
    s.observe(1, 2.0, stats)
    s.observe(4, 2.4, stats)
    assert (stats.ttft_s.count, stats.itl_s.count) == (1, 4)
    assert abs(stats.itl_s.total - 0.4) < 1e-9


def test_prompt_scores_computed_again_after_a_preemption_count_once():
    scores = tuple(TokenLogprob(t, -float(t)) for t in range(1, 10))  # of positions 1 to 9
    s = stream()
    s.add_prompt_scores(1, scores[:4])
    first = s.push((7,), (), None, EOS)
    s.add_prompt_scores(1, scores[:6])  # from the start, in a larger chunk
    s.add_prompt_scores(7, scores[6:])
    second = s.push((8,), (), None, EOS)
    assert first.prompt_logprobs + second.prompt_logprobs == scores


def test_trouble_ends_the_request_alone():
    s = stream()
    s.trouble = "no mask"
    event = s.push((7,), (), None, EOS)
    assert (event.finish_reason, event.error) == (FinishReason.ERROR, "internal_error: no mask")


def test_a_stop_string_that_the_last_character_completes_is_a_stop():
    s = stream(stop=("�",))
    event = s.push(("🙂".encode()[0],), (), FinishReason.LENGTH, EOS)
    assert event.finish_reason is FinishReason.STOP
