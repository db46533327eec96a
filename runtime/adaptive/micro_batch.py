"""The micro-batch: how many sequences one prefill step may take in, by free memory. Imports no JAX.

Published: min(max, free bytes / bytes per token * sequence length). Read from left to right this multiplies by the
length: requests * tokens^2 come out, not requests, and the size grows with length although memory then suffices for
fewer. Sound: min(max, free bytes / (bytes per token * sequence length)), which is what is computed here.
"""

import math

from runtime.adaptive.choice import Choice, Reason, is_stale
from runtime.adaptive.observation import Observation
from runtime.config import EngineConfig


def decide_micro_batch(previous: int, obs: Observation, config: EngineConfig, now_s: float) -> Choice:
    """Sequences of one prefill step, from 1 to max_micro_batch_size."""
    batch = config.batch_processing
    fixed = min(batch.micro_batch_size, batch.max_micro_batch_size)
    inputs = {
        "free_bytes": obs.free_bytes,
        "bytes_per_token": obs.bytes_per_token,
        "expected_len": obs.expected_len,
        "max": batch.max_micro_batch_size,
    }
    if not batch.enable_dynamic_batch:
        return Choice(fixed, Reason.FIXED, inputs)
    if is_stale(obs, config, now_s):
        return Choice(max(1, min(previous, batch.max_micro_batch_size)), Reason.STALE, inputs)
    if obs.expected_len is None or not math.isfinite(obs.expected_len) or obs.expected_len <= 0:
        return Choice(fixed, Reason.MISSING_DATA, inputs)
    if obs.bytes_per_token <= 0 or obs.free_bytes < 0:
        return Choice(fixed, Reason.MISSING_DATA, inputs)
    fitting = obs.free_bytes / obs.bytes_per_token / obs.expected_len
    if fitting >= batch.max_micro_batch_size:
        return Choice(batch.max_micro_batch_size, Reason.AT_MAX, inputs)
    return Choice(int(fitting), Reason.MEMORY, inputs) if fitting >= 1 else Choice(1, Reason.AT_MIN, inputs)
