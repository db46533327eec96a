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
        # Of those that got a row of late, each window counting half of the next: positions to prefill, and those in the cache.
        self._admitted: dict[str, float] = {}
        self._cached: dict[str, float] = {}

    def on_step(self, plan: StepPlan, result: StepResult, num_steps: int) -> None:
        """A launch was read."""
        tokens = tokens_by_key(plan, result)
        if plan.phase is Phase.PREFILL:
            self._prefilled.update(tokens)
            for chunk in plan.chunks:
                key = chunk.sequence.request.traffic_key
                if chunk.is_new_row:  # what stands before the first chunk came from the prefix cache
                    self._admitted[key] = self._admitted.get(key, 0) + chunk.sequence.prefill_end
                    self._cached[key] = self._cached.get(key, 0) + chunk.start
            return
        self._num_steps += num_steps
        self._decoded.update(tokens)

    def end_window(self) -> Mixes:
        """Tokens by key of the window that ends, and as foreseen those of the next; None where no token has a key.

        The next window is taken to compute as many prompt tokens and decode steps as this one. Who runs decodes on; prompt
        tokens are those of sequences that have some left, then, if the line is shorter than a window, of requests still to
        come, which are taken to be like this window's. Of a prompt that waits, the prefix cache is taken to hold the part that
        it held of this key's prompts of late.
        """
        prefilled, num_steps = self._prefilled, self._num_steps
        seen = prefilled + self._decoded
        room = float(prefilled.total())
        coming: defaultdict[str, float] = defaultdict(float)
        for sequence in self._alive():
            if room <= 0 and sequence.row is None:  # most of a long line
                continue
            key = sequence.request.traffic_key
            left = self._tokens_to_prefill(sequence)
            coming[key] += min(left, room)
            room -= min(left, room)
            if left == 0:
                coming[key] += min(num_steps, sequence.remaining)
        if room:
            for key, tokens in prefilled.items():
                coming[key] += tokens * room / prefilled.total()
        self._prefilled, self._decoded, self._num_steps = Counter(), Counter(), 0
        self._admitted = {key: number / 2 for key, number in self._admitted.items() if number > 1}
        self._cached = {key: self._cached[key] / 2 for key in self._admitted}
        return _most(seen), _most(coming)

    def _tokens_to_prefill(self, sequence: Sequence) -> float:
        if sequence.row is not None:
            return max(0, sequence.prefill_end - sequence.num_scheduled)
        key = sequence.request.traffic_key
        admitted = self._admitted.get(key)
        computed_part = max(0.0, 1 - self._cached[key] / admitted) if admitted else 1.0
        return sequence.prefill_len * computed_part


def tokens_by_key(plan: StepPlan, result: StepResult) -> Counter[str]:
    """Tokens that a launch computed, by traffic key."""
    is_prefill, tokens = plan.phase is Phase.PREFILL, Counter[str]()
    for chunk, token_ids in zip(plan.chunks, result.token_ids, strict=True):
        tokens[chunk.sequence.request.traffic_key] += chunk.num_tokens if is_prefill else len(token_ids)
    return tokens


def _most(tokens: Mapping[str, float]) -> dict[str, float] | None:
    """The keys with most tokens; those of the others count as of none."""
    by_size = sorted(((number, key) for key, number in tokens.items() if number > 0), reverse=True)
    known = {key: float(number) for number, key in by_size[: MAX_KEYS - 1]}
    rest = sum(number for number, _ in by_size[MAX_KEYS - 1 :])
    if rest:
        known[NO_KEY] = known.get(NO_KEY, 0.0) + rest
    return known if known.keys() - {NO_KEY} else None
