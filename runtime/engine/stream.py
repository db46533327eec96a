"""Stream: turns the tokens of one sequence into TokenEvents. Text, stop strings, grammar and times live here.

Knows nothing of the device. Imports no JAX.
"""

from dataclasses import dataclass

from runtime.engine.detokenizer import IncrementalDetokenizer
from runtime.engine.grammar import GrammarState
from runtime.engine.stats import EngineStats
from runtime.request import FinishReason, TokenEvent, TokenLogprob
from runtime.schedule.sequence import Sequence


@dataclass(slots=True)
class Stream:
    """One request on its way out."""

    sequence: Sequence
    detokenizer: IncrementalDetokenizer
    grammar: GrammarState | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # not sent yet
    num_prompt_logprobs: int = 0  # sent or not
    trouble: str = ""  # why the request cannot go on, found while a launch was made
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_first_tokens: int = 0  # tokens of the first event

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; 0 for a request that ended without one."""
        return 0.0 if self.first_token_s is None else self.first_token_s - self.sequence.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first event; 0 where nothing came after it."""
        num_later = len(self.sequence.output_ids) - self.num_first_tokens
        if self.first_token_s is None or self.last_token_s is None or num_later <= 0:
            return 0.0
        return (self.last_token_s - self.first_token_s) / num_later

    def add_prompt_scores(self, first: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Scores of prompt positions from `first` on. A preempted request computes some again: only news count."""
        num_known = 1 + self.num_prompt_logprobs - first  # position 0 has no score
        news = logprobs[max(0, num_known) :]
        self.prompt_logprobs += news
        self.num_prompt_logprobs += len(news)

    def push(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish_reason: FinishReason | None,
        stop_ids: frozenset[int],
    ) -> TokenEvent:
        """The event for newly read tokens.

        `finish_reason` is the scheduler's (stop id or length). A stop string or a finished grammar ends the request
        here; the event then says so and the caller tells the scheduler. Tokens after the end are dropped.
        """
        if self.trouble:
            return self.fail("internal_error", self.trouble)
        is_stop_id = finish_reason is FinishReason.STOP and bool(token_ids) and token_ids[-1] in stop_ids
        text, used, is_over = self._take(token_ids[:-1] if is_stop_id else token_ids)  # a stop id has no text
        if is_over:
            finish_reason = FinishReason.STOP
        else:
            used = len(token_ids)
        matched = self.detokenizer.matched_stop
        if self.grammar is not None and self.grammar.error is not None:
            return self.fail("invalid_value", f"the constraint could not be followed: {self.grammar.error}")
        stop_reason: str | int | None = matched
        if finish_reason is not None and matched is None:
            text += self.detokenizer.flush()
            stop_reason = self.detokenizer.matched_stop
            if stop_reason is not None:
                finish_reason = FinishReason.STOP
            elif finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in stop_ids:
                requested = token_ids[-1] in self.sequence.request.params.stop_token_ids
                stop_reason = token_ids[-1] if requested else None
        return self._event(token_ids[:used], text, logprobs[:used], finish_reason, stop_reason)

    def _take(self, token_ids: tuple[int, ...]) -> tuple[str, int, bool]:
        """Tokens into text and grammar: (text, tokens used, whether the last of them ended it)."""
        if self.grammar is None:
            num_before = self.detokenizer.num_tokens
            text, matched = self.detokenizer.push(token_ids)
            return text, self.detokenizer.num_tokens - num_before, matched is not None
        text = ""
        for num_used, token in enumerate(token_ids, start=1):
            delta, matched = self.detokenizer.push((token,))
            text += delta
            self.grammar.advance((token,))
            if matched is not None or self.grammar.is_finished:
                return text, num_used, True
        return text, len(token_ids), False

    def observe(self, num_tokens: int, now: float, stats: EngineStats) -> None:
        """Times of the tokens just read; a launch of several steps spreads its time over its tokens."""
        request = self.sequence.request
        if num_tokens == 0:
            return
        if self.first_token_s is None or self.last_token_s is None:
            self.first_token_s = now
            self.num_first_tokens = num_tokens
            stats.ttft_s.observe(now - request.arrival_s)
            started = self.sequence.first_scheduled_s or now
            stats.queue_s.observe(max(0.0, started - request.arrival_s))
            stats.prefill_s.observe(max(0.0, now - started))
            if num_tokens > 1:
                stats.itl_s.observe(0.0, num_tokens - 1)
        else:
            stats.itl_s.observe((now - self.last_token_s) / num_tokens, num_tokens)
        self.last_token_s = now

    def fail(self, code: str, message: str) -> TokenEvent:
        """The last event of a request that cannot go on."""
        return TokenEvent(self.request_id, finish_reason=FinishReason.ERROR, error=f"{code}: {message}")

    def _event(
        self,
        token_ids: tuple[int, ...],
        text: str,
        logprobs: tuple[TokenLogprob, ...],
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> TokenEvent:
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, ()
        return TokenEvent(
            request_id=self.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.sequence.num_cached,
        )
