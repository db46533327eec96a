"""RopeSpec: rotary frequencies as data, from the spellings that config.json uses. Imports no JAX.

Every supported scaling changes only the inverse frequencies and one factor on cos and sin, both fixed at load time.
`dynamic` and `longrope` depend on the current length and are therefore refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.errors import ModelLoadError


@dataclass(frozen=True)
class RopeSpec:
    """inv_freq: one per pair of channels, float32 values; attention_factor multiplies cos and sin."""

    kind: str
    theta: float
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


def rope_from_config(
    config: dict[str, Any], head_dim: int, max_positions: int, default_theta: float
) -> RopeSpec:
    """Reads `rope_parameters` (newer) or `rope_scaling` with `rope_theta` (published checkpoints)."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    values = config.get(name) or {}
    if not isinstance(values, dict):
        raise _refused(name, values, "a mapping or null")
    reader = _Reader(name, values)
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise _refused(f"{name}.rope_type", kind, f"one of {', '.join(SCALINGS)}")
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise _refused("partial_rotary_factor", partial, "1 (the whole head is rotated)")
    if head_dim % 2:
        raise _refused("head_dim", head_dim, "an even number")
    theta = reader.number("rope_theta", default=_top_level_theta(config, default_theta))
    inv_freq, factor = SCALINGS[kind](reader, theta, head_dim, max_positions)
    return RopeSpec(kind, theta, tuple(float(f) for f in inv_freq), factor)


def _top_level_theta(config: dict[str, Any], default_theta: float) -> float:
    value = config.get("rope_theta")
    return _Reader("config.json", {"rope_theta": value}).number("rope_theta", default=default_theta)


class _Reader:
    """Numbers of the rope section, checked."""

    def __init__(self, section: str, values: dict[str, Any]) -> None:
        self._section, self._values = section, values

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise _refused(f"{self._section}.{name}", value, "a positive number")
        return float(value)

    def optional(self, name: str) -> float | None:
        return None if self._values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise _refused(f"{self._section}.{name}", value, "true or false")
        return value


def _plain(theta: float, head_dim: int) -> np.ndarray:
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)


def _default(_: _Reader, theta: float, head_dim: int, __: int) -> tuple[np.ndarray, float]:
    return _plain(theta, head_dim), 1.0


def _linear(reader: _Reader, theta: float, head_dim: int, _: int) -> tuple[np.ndarray, float]:
    return _plain(theta, head_dim) / np.float32(reader.number("factor")), 1.0


def _llama3(reader: _Reader, theta: float, head_dim: int, max_positions: int) -> tuple[np.ndarray, float]:
    """Long waves are stretched by `factor`, short ones kept, those between the two limits blended."""
    factor, low, high = (
        reader.number("factor"),
        reader.number("low_freq_factor"),
        reader.number("high_freq_factor"),
    )
    original = reader.number("original_max_position_embeddings", default=max_positions)
    if high <= low:
        raise _refused("high_freq_factor", high, f"more than low_freq_factor {low}")
    inv_freq = _plain(theta, head_dim)
    wavelength = 2 * math.pi / inv_freq
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * inv_freq / factor + blend * inv_freq).astype(np.float32), 1.0


def _yarn(reader: _Reader, theta: float, head_dim: int, max_positions: int) -> tuple[np.ndarray, float]:
    """Interpolates the slow channels by `factor`, keeps the fast ones, with a ramp between; scales cos and sin."""
    original = reader.number("original_max_position_embeddings", default=max_positions)
    factor = reader.number("factor", default=max_positions / original)
    attention_factor = reader.optional("attention_factor")
    if attention_factor is None:
        mscale, all_dim = reader.optional("mscale"), reader.optional("mscale_all_dim")
        attention_factor = (
            _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
        )

    def channel_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = channel_of(reader.number("beta_fast", default=32.0))
    high = channel_of(reader.number("beta_slow", default=1.0))
    if reader.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if high == low else high
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    inv_freq = _plain(theta, head_dim)
    return (inv_freq / factor * ramp + inv_freq * (1 - ramp)).astype(np.float32), attention_factor


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


SCALINGS: dict[str, Callable[[_Reader, float, int, int], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _refused(field: str, value: Any, allowed: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {field} is {repr(value)[:80]}; allowed: {allowed}", param=field)
