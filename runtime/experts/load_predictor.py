"""What each expert's load will be in the next window, from the windows before. Knows nothing of placements.

Five sources make a forecast for every window and are scored on it once it has come, as they were made by `predict`: where the
mix of keys was foreseen wrongly, "mix" pays for it. The forecast that counts is the one of the source with the lowest smoothed
error, if that is clearly lower than the error of "last window", which is what everybody has; else it is the last window.

- average: short exponential average; when the traffic jumps it starts anew from the cluster of the window.
- cluster: like windows are learned online as clusters; the forecast is the mean of the cluster of the last window.
- mix: rates by traffic key (data set, tenant, route), where callers say which keys the next window is made of. Windows
  are mixtures, so keys share the blame for an error in proportion to their tokens (normalised least mean squares). The part
  of keys that are not known is taken to be like the average.
- hour: a profile over the hours of the day, where an hour is given.

Hotness follows the data set and lasts tens to hundreds of steps (TensorRT-LLM's wide-EP notes; our recorded routing).
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

HOURS = 24
KEYS_IN_A_SLICE = 8  # of `observing`: about half a millisecond at 58 x 256


class Source(StrEnum):
    """Who makes a forecast."""

    LAST_WINDOW = "last_window"
    AVERAGE = "average"
    CLUSTER = "cluster"
    MIX = "mix"
    HOUR = "hour"


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """average_half_life: windows. slow_gain: smallest weight of a new window in clusters, keys and hours.
    jump: distance between windows, in [0, 1], above which traffic is another; where averages restart and clusters begin.
    score_half_life: windows that a source's error is smoothed over. margin: how much lower than the error of the last
    source's must be. max_clusters: the least recently seen is forgotten above it. max_keys: the one with the fewest tokens of
    late, which is the mean over about key_half_life windows, so that keys that come once push out no frequent one.
    """

    average_half_life: float = 4.0
    slow_gain: float = 0.1
    jump: float = 0.25
    score_half_life: float = 4.0
    margin: float = 0.02
    max_clusters: int = 16
    max_keys: int = 64
    key_half_life: float = 64.0

    def __post_init__(self) -> None:
        for name in ("average_half_life", "score_half_life", "key_half_life"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ValueError(f"{name} must be in (0, 1e6] windows, not {getattr(self, name)}")
        for name in ("slow_gain", "jump"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {getattr(self, name)}")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be in [0, 1), not {self.margin}")
        for name in ("max_clusters", "max_keys"):
            if not 1 <= getattr(self, name) <= 4096:
                raise ValueError(f"{name} must be in [1, 4096], not {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class Prediction:
    """loads: float64 [L, E], each layer adds up to one. uncertainty: [L, E], root mean square error of late, same unit.
    source: who made it. errors: smoothed error of every source so far, a distance in [0, 1]."""

    loads: np.ndarray
    uncertainty: np.ndarray
    source: Source
    errors: Mapping[Source, float]


@dataclass(eq=False)
class _Rates:
    """A mean [L, E] of windows, `num` of them so far, last touched at window `seen`. part: of the windows' tokens, of late."""

    rates: np.ndarray
    num: int = 1
    seen: int = 0
    part: float = 0.0

    def add(self, window: np.ndarray, slowest: float, seen: int) -> None:
        self.num += 1
        self.rates = self.rates + max(1 / self.num, slowest) * (window - self.rates)
        self.seen = seen


@dataclass(eq=False)
class LoadPredictor:
    """Feed it `observe` once a window; ask `predict` for the next. Not thread-safe: one owner."""

    num_layers: int
    num_experts: int
    config: PredictorConfig = field(default_factory=PredictorConfig)

    def __post_init__(self) -> None:
        self.num_windows = 0
        self.source = Source.LAST_WINDOW
        self._last: np.ndarray | None = None
        self._average: _Rates | None = None
        self._clusters: list[_Rates] = []
        self._current: _Rates | None = None
        self._keys: dict[str, _Rates] = {}
        self._hours: dict[int, _Rates] = {}
        self._errors: dict[Source, float] = {}
        self._scored: dict[Source, int] = {}
        self._squares: np.ndarray | None = None
        self._foreseen: dict[Source, np.ndarray] | None = (
            None  # by the last `predict`, until its window has come
        )

    def observe(
        self, counts: np.ndarray, mix: Mapping[str, float] | None = None, hour: float | None = None
    ) -> None:
        """Scores every source on the window with token counts [L, E], then learns from it.

        mix: tokens of each traffic key in the window. hour: of the day, in [0, 24). What `predict` foresaw is scored; if it
        was not asked, what it would have said for this mix and hour. A window without tokens in some layer says nothing
        and is passed over.
        """
        for _ in self.observing(counts, mix, hour):
            pass

    def observing(
        self, counts: np.ndarray, mix: Mapping[str, float] | None = None, hour: float | None = None
    ) -> Iterator[None]:
        """`observe` in slices, for who cannot wait: to be gone through before anything else is asked."""
        window = self._shares_of(counts)
        weights, slot = _checked_mix(mix), _checked_hour(hour)
        if window is None:
            return
        foreseen, self._foreseen = self._foreseen, None
        self._score(window, self._forecasts(weights, slot) if foreseen is None else foreseen)
        self.num_windows += 1
        self._learn(window, slot)
        self._last = window
        if weights is not None:
            yield from self._learn_mix(window, weights)

    def predict(self, mix: Mapping[str, float] | None = None, hour: float | None = None) -> Prediction:
        """The next window, made of `mix` if that is known. Even loads before the first window."""
        self._foreseen = forecasts = self._forecasts(_checked_mix(mix), _checked_hour(hour))
        if not forecasts:
            even = np.full((self.num_layers, self.num_experts), 1 / self.num_experts)
            return Prediction(even, even, Source.LAST_WINDOW, {})
        self.source = self._best(forecasts)
        loads = forecasts[self.source]
        # Before anything was scored, an expert may do anything up to its own load.
        uncertainty = loads if self._squares is None else np.sqrt(self._squares)
        return Prediction(loads, uncertainty, self.source, dict(self._errors))

    def _best(self, forecasts: Mapping[Source, np.ndarray]) -> Source:
        """The source with the lowest error, scored at least twice and better than the last window by the margin."""
        last = self._errors.get(Source.LAST_WINDOW)
        if last is None:
            return Source.LAST_WINDOW
        limit = last * (1 - self.config.margin)
        known = {
            s: e for s, e in self._errors.items() if s in forecasts and self._scored[s] >= 2 and e < limit
        }
        return min(known, key=known.__getitem__, default=Source.LAST_WINDOW)

    def _forecasts(self, mix: Mapping[str, float] | None, hour: int | None) -> dict[Source, np.ndarray]:
        if self._last is None or self._average is None or self._current is None:
            return {}
        found = {
            Source.LAST_WINDOW: self._last,
            Source.AVERAGE: self._average.rates,
            Source.CLUSTER: self._current.rates,
        }
        known = {key: part for key, part in (mix or {}).items() if key in self._keys}
        if known:
            part = min(1.0, sum(known.values()))
            found[Source.MIX] = _mixture(self._keys, known) * part + self._average.rates * (1 - part)
        if hour is not None and hour in self._hours:
            found[Source.HOUR] = self._hours[hour].rates
        return found

    def _score(self, window: np.ndarray, forecasts: Mapping[Source, np.ndarray]) -> None:
        gain = _gain(self.config.score_half_life)
        for source, forecast in forecasts.items():
            error = distance(forecast, window)
            before = self._errors.get(source)
            # A source that was not scored every time is compared on what it was scored on, smoothed alike.
            self._errors[source] = error if before is None else before + gain * (error - before)
            self._scored[source] = self._scored.get(source, 0) + 1
        if forecasts:
            used = forecasts.get(self.source, forecasts[Source.LAST_WINDOW])
            squares = (window - used) ** 2
            self._squares = (
                squares if self._squares is None else self._squares + gain * (squares - self._squares)
            )

    def _learn(self, window: np.ndarray, hour: int | None) -> None:
        config, now = self.config, self.num_windows
        cluster = self._learn_cluster(window)
        if self._average is None or distance(self._average.rates, window) > config.jump:
            self._average = _Rates(
                cluster.rates, seen=now
            )  # what such traffic was like before, if it ever came
        else:
            self._average.add(window, _gain(config.average_half_life), now)
        if hour is not None:
            if hour in self._hours:
                self._hours[hour].add(window, config.slow_gain, now)
            else:
                self._hours[hour] = _Rates(window, seen=now)

    def _learn_cluster(self, window: np.ndarray) -> _Rates:
        away = [distance(cluster.rates, window) for cluster in self._clusters]
        nearest = int(np.argmin(away)) if away else 0
        if away and away[nearest] <= self.config.jump:
            self._current = self._clusters[nearest]
            self._current.add(window, self.config.slow_gain, self.num_windows)
            return self._current
        if len(self._clusters) == self.config.max_clusters:
            self._clusters.remove(min(self._clusters, key=lambda cluster: cluster.seen))
        self._current = _Rates(window, seen=self.num_windows)
        self._clusters.append(self._current)
        return self._current

    def _learn_mix(self, window: np.ndarray, mix: Mapping[str, float]) -> Iterator[None]:
        """In slices of some keys."""
        known = {key: part for key, part in mix.items() if key in self._keys}
        new = {key: part for key, part in mix.items() if key not in self._keys}
        gain = _gain(self.config.key_half_life)
        for key, rates in self._keys.items():
            rates.part += gain * (mix.get(key, 0.0) - rates.part)
        if known:
            missing = window - _mixture(self._keys, known) * sum(known.values())
            if new:  # what the known do not explain is the new ones'; from now on they are learned together
                missing = missing - window * sum(new.values())
            norm = sum(part * part for part in known.values())
            for keys in itertools.batched(known, KEYS_IN_A_SLICE):
                yield
                for key in keys:
                    self._learn_key(self._keys[key], missing, known[key] / norm)
        for key, part in new.items():
            self._add_key(key, _Rates(window, seen=self.num_windows, part=part))

    def _learn_key(self, key: _Rates, missing: np.ndarray, blame: float) -> None:
        key.num += 1
        gain = max(1 / key.num, self.config.slow_gain) * blame
        key.rates = _normalised(key.rates + gain * missing)
        key.seen = self.num_windows

    def _add_key(self, name: str, key: _Rates) -> None:
        """Where there is room, or in place of the one with the fewest tokens of late if that has fewer."""
        if len(self._keys) == self.config.max_keys:
            rarest = min(self._keys, key=lambda k: (self._keys[k].part, self._keys[k].seen))
            if self._keys[rarest].part > key.part:
                return
            del self._keys[rarest]
        self._keys[name] = key

    def _shares_of(self, counts: np.ndarray) -> np.ndarray | None:
        given = np.asarray(counts, np.float64)
        if given.shape != (self.num_layers, self.num_experts):
            raise ValueError(
                f"counts must be [{self.num_layers}, {self.num_experts}], not {list(given.shape)}"
            )
        if not np.isfinite(given).all() or (given < 0).any():
            raise ValueError("counts must be finite and not negative")
        total = given.sum(axis=1, keepdims=True)
        return given / total if (total > 0).all() else None


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Half the sum of differences between two tables of shares [L, E], mean over layers: 0 alike, 1 disjoint."""
    return float(np.abs(one - other).sum(axis=1).mean() / 2)


def _mixture(keys: Mapping[str, _Rates], mix: Mapping[str, float]) -> np.ndarray:
    total = sum(mix.values())
    return sum((keys[key].rates * (part / total) for key, part in mix.items()), np.zeros(()))


def _normalised(rates: np.ndarray) -> np.ndarray:
    clipped = np.maximum(rates, 0)
    total = clipped.sum(axis=1, keepdims=True)
    even = np.full_like(clipped, 1 / clipped.shape[1])
    return np.divide(clipped, total, out=even, where=total > 0)


def _gain(half_life: float) -> float:
    return 1 - math.exp(-math.log(2) / half_life)


def _checked_mix(mix: Mapping[str, float] | None) -> dict[str, float] | None:
    """Parts that add up to one, without keys that have none; None if nothing is known."""
    if mix is None:
        return None
    for key, tokens in mix.items():
        if not 0 <= tokens < math.inf:
            raise ValueError(f"mix[{key!r}] must be a finite number of tokens, not {tokens}")
    total = sum(mix.values())
    return {key: tokens / total for key, tokens in mix.items() if tokens > 0} if total > 0 else None


def _checked_hour(hour: float | None) -> int | None:
    if hour is None:
        return None
    if not 0 <= hour < HOURS:
        raise ValueError(f"hour must be in [0, {HOURS}), not {hour}")
    return int(hour)
