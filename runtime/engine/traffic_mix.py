"""TrafficMix: which kinds of text the tokens of a window were of, and those of the next will be. Imports no JAX.

Which experts are hot follows the kind of text. A request says its kind by its traffic key, so what waits in line tells which
experts will be wanted before a token of it was computed. Owned by the engine's thread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from runtime.schedule.plan import Phase, StepPlan, StepResult
from runtime.schedule.sequence import Sequence

type Mixes = tuple[dict[str, float] | None, dict[str, float] | None]  # of the last window, of the next

MAX_KEYS = 32  # of a window; what the rarer ones computed counts as of no key
NO_KEY = ""


class TrafficMix:
    """Tokens by traffic key in the window that is going on."""

    def __init__(self, alive: Callable[[], Iterable[Sequence]]) -> None:
        """alive: the sequences that run or wait, those in line in its order."""
        self._alive = alive
        self._prefilled: Counter[str] = Counter()
        self._decoded: Counter[str] = Counter()
        self._num_steps = 0  # decode steps

    def on_step(self, plan: StepPlan, result: StepResult, num_steps: int) -> None:
        """A launch was read."""
        if plan.phase is Phase.PREFILL:
            for chunk in plan.chunks:
                self._prefilled[chunk.sequence.request.traffic_key] += chunk.num_tokens
            return
        self._num_steps += num_steps
        for chunk, token_ids in zip(plan.chunks, result.token_ids, strict=True):
            self._decoded[chunk.sequence.request.traffic_key] += len(token_ids)

    def end_window(self) -> Mixes:
        """Tokens by key of the window that ends, and as foreseen those of the next; None where no token has a key.

        The next window is taken to compute as many prompt tokens and decode steps as this one. Who runs decodes on; prompt
        tokens are those of sequences that have some left, then, if the line is shorter than a window, of requests still to
        come, which are taken to be like this window's.
        """
        prefilled, num_steps = self._prefilled, self._num_steps
        seen = prefilled + self._decoded
        room = prefilled.total()
        coming: defaultdict[str, float] = defaultdict(float)
        for sequence in self._alive():
            key = sequence.request.traffic_key
            left = _tokens_to_prefill(sequence)
            coming[key] += min(left, room)
            room -= min(left, room)
            if left == 0:
                coming[key] += min(num_steps, sequence.remaining)
        if room:
            for key, tokens in prefilled.items():
                coming[key] += tokens * room / prefilled.total()
        self._prefilled, self._decoded, self._num_steps = Counter(), Counter(), 0
        return _most(seen), _most(coming)


def _tokens_to_prefill(sequence: Sequence) -> int:
    if sequence.row is None:
        return sequence.prefill_len
    return max(0, sequence.prefill_end - sequence.num_scheduled)


def _most(tokens: Mapping[str, float]) -> dict[str, float] | None:
    """The keys with most tokens; those of the others count as of none."""
    by_size = sorted(((number, key) for key, number in tokens.items() if number > 0), reverse=True)
    known = {key: float(number) for number, key in by_size[: MAX_KEYS - 1]}
    rest = sum(number for number, _ in by_size[MAX_KEYS - 1 :])
    if rest:
        known[NO_KEY] = known.get(NO_KEY, 0.0) + rest
    return known if known.keys() - {NO_KEY} else None
