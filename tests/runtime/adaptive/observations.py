"""Observations and configurations to start tests from, and strategies that make any."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from runtime.adaptive.observation import Observation
from runtime.config import EngineConfig, parse_config

RUNGS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
NOW_S = 1000.0
QUIET = Observation(
    time_s=NOW_S,
    num_running=32,
    num_waiting=0,
    oldest_wait_s=0.0,
    used_pages=10,
    num_pages=100,
    free_bytes=1 << 30,
    bytes_per_token=1 << 10,
    expected_len=512.0,
    decode_step_s=0.02,
    prefill_step_s=0.03,
    decode_rungs=RUNGS,
    prefill_rungs=(64, 512),
)


def make_config(**batch: Any) -> EngineConfig:
    """Largest batch 128, target between tokens 100 ms; `controller` and `slo` are sections, the rest is batching."""
    sections = {name: batch.pop(name, {}) for name in ("controller", "slo")}
    return parse_config({"batch_processing": {"max_batch_size": 128, **batch}, **sections})


def observe(**fields: Any) -> Observation:
    return replace(QUIET, **fields)


def any_configs(**fixed: Any) -> st.SearchStrategy[EngineConfig]:
    """Configurations whose numbers lie anywhere inside their bounds, those in `fixed` apart."""
    batch = {
        "base_batch_size": st.integers(1, 256),
        "max_batch_size": st.integers(1, 256),
        "micro_batch_size": st.integers(1, 64),
        "max_micro_batch_size": st.integers(1, 64),
        "expert_load_threshold": st.floats(0.05, 1),
        "alpha": st.floats(0, 1),
        "smoothing": st.booleans(),
        "enable_dynamic_batch": st.booleans(),
    } | {name: st.just(value) for name, value in fixed.items()}
    controller = {
        "form": st.sampled_from(["current", "published"]),
        "up_below": st.floats(0.05, 0.9),
        "down_above": st.floats(0.91, 2),
        "dwell": st.sampled_from(["0s", "1s", "3s"]),
        "ttft_slack": st.floats(0, 1),
        "like_lengths": st.booleans(),
    }
    slo = {
        "itl": st.sampled_from(["1us", "1ms", "50ms", "100ms"]),
        "ttft": st.sampled_from(["1us", "1s", "2s"]),
    }
    return st.builds(
        lambda b, c, s: parse_config({"batch_processing": b, "controller": c, "slo": s}),
        st.fixed_dictionaries(batch),
        st.fixed_dictionaries(controller),
        st.fixed_dictionaries(slo),
    )


seconds = st.floats(0, 0.5)
uses = st.floats(0, 2)
wild = st.one_of(st.none(), st.floats(), seconds)
rungs = st.sets(st.integers(1, 256), max_size=8).map(lambda s: tuple(sorted(s)))
some_rungs = st.sets(st.integers(1, 256), min_size=1, max_size=8).map(lambda s: tuple(sorted(s)))


@st.composite
def observations(draw: st.DrawFn, *, is_sane: bool = False) -> Observation:
    """Sane: fresh, complete, with ready rungs. Otherwise anything that the types allow, numbers that are none too."""
    times = seconds if is_sane else wild
    ready = draw(some_rungs if is_sane else rungs)
    measured = draw(st.sets(st.sampled_from(ready))) if ready else set()
    return Observation(
        time_s=NOW_S if is_sane else NOW_S - draw(st.floats(-1, 5)),
        num_running=draw(st.integers(0, 300)),
        num_waiting=draw(st.integers(0, 50)),
        oldest_wait_s=draw(st.floats(0, 10)),
        used_pages=draw(st.integers(0, 100)),
        num_pages=100 if is_sane else draw(st.sampled_from([0, 100])),
        free_bytes=draw(st.integers(0, 1 << 40)),
        bytes_per_token=draw(st.integers(0, 1 << 20)),
        expected_len=draw(wild),
        decode_step_s=draw(times),
        prefill_step_s=draw(times),
        decode_rungs=ready,
        prefill_rungs=(64,),
        decode_step_s_by_rows={
            r: draw(st.floats(0, 0.5) if is_sane else st.floats()) for r in sorted(measured)
        },
        expert_load=draw(st.one_of(st.none(), uses) if is_sane else wild),
        exchange_s=draw(st.one_of(st.none(), seconds) if is_sane else wild),
    )
