"""What the model rules out is refused by name before it is stored; what is let through, a start can carry out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EngineConfig, parse_config
from runtime.engine import build
from runtime.engine.device_arrays import DeviceArrays, resident_slots, start_placement, weight_specs
from runtime.engine.start_checks import (
    check_model,
    check_next_start,
    context_limit,
    shard_shape,
    weight_dtype,
)
from runtime.errors import InvalidRequest, ModelLoadError
from runtime.ladder.ladder import BucketLadder
from runtime.mesh import make_device_mesh
from runtime.model.architecture import Architecture, from_hf_config
from tests.engine_driver import TINY

ARCH = from_hf_config(
    TINY
)  # 8 experts, 2 of them a token; 4 heads, 2 of them for keys and values; context 256
PAGE_BYTES = 2 * 2 * 2 * 8 * 4 * 4  # layers, keys and values, heads, width, tokens, float32


def config(**sections: dict[str, Any]) -> EngineConfig:
    small = {"model": {"dtype": "fp32"}, "kv_cache": {"page_size": 4}}
    return parse_config({name: small.get(name, {}) | sections.get(name, {}) for name in small | sections})


@pytest.mark.parametrize(
    ("sections", "field", "told"),
    [
        ({"experts": {"resident_experts": 9}}, "experts.resident_experts", "is 9; 0 to 8"),
        ({"experts": {"resident_experts": 1}}, "experts.resident_experts", "is 1; 0, or 2"),
        ({"parallel": {"expert_parallel_size": 9}}, "parallel.expert_parallel_size", "is 9; at most 8"),
        ({"parallel": {"redundant_experts": 1}}, "parallel.redundant_experts", "is 1; 0 on one device"),
        (
            {"parallel": {"expert_parallel_size": 4, "redundant_experts": 25}},
            "parallel.redundant_experts",
            "is 25; at most 24 on 4 devices",
        ),
        ({"parallel": {"tensor_parallel_size": 4}}, "parallel.tensor_parallel_size", "is 4; it must divide key-value heads, 2"),
        ({"model": {"max_context": 257}}, "model.max_context", "is 257, the model's own limit is 256"),
        ({"kv_cache": {"kv_cache_size": f"{64 * PAGE_BYTES - 1}B"}}, "kv_cache.kv_cache_size", "needs 64 pages"),
        ({"kv_cache": {"kv_cache_size": "0%"}}, "kv_cache.kv_cache_size", "gives 0 bytes"),
        (
            {"parallel": {"hosts": 2, "expert_parallel_size": 2, "host_id": 1, "coordinator": "a:1"}},
            "parallel.host_id",
            "is 1; host 0 serves",
        ),
    ],
)  # fmt: skip
def test_what_the_model_rules_out_is_refused_with_field_value_and_what_is_allowed(
    sections, field, told
) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        check_next_start(config(**sections), ARCH)
    assert refused.value.param == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"experts": {"resident_experts": 8, "prefetch_experts": 8}},
        {"parallel": {"expert_parallel_size": 4, "redundant_experts": 24}},
        {"parallel": {"tensor_parallel_size": 2}},
        {"model": {"max_context": 256}},
        {"kv_cache": {"kv_cache_size": f"{64 * PAGE_BYTES}B"}},
        {"kv_cache": {"kv_cache_size": "1%"}},  # of what is known only then
    ],
)
def test_the_last_that_fits_is_let_through_without_a_word(sections) -> None:
    assert check_next_start(config(**sections), ARCH) == ()


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"expert_parallel_size": 8, "tensor_parallel_size": 2}, "needs 16 devices, 8 are present"),
        ({"expert_parallel_size": 2, "exchange": "ragged"}, "parallel.exchange is ragged"),
    ],
)
def test_what_this_machine_lacks_is_a_warning(parallel, told) -> None:
    (warning,) = check_next_start(config(parallel=parallel), ARCH)
    assert "this machine as it is now" in warning
    assert told in warning


def test_devices_of_other_hosts_are_not_guessed() -> None:
    parallel = {"hosts": 4, "expert_parallel_size": 8, "tensor_parallel_size": 2, "coordinator": "a:1"}
    assert check_next_start(config(parallel=parallel), ARCH) == ()


def test_flags_of_the_environment_that_stand_in_the_way_are_told(monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_dot_merger_threshold_mb=32")
    (warning,) = check_next_start(config(parallel={"micro_batch_overlap": "auto"}), ARCH)
    assert "threshold_mb is 32" in warning


wishes = st.fixed_dictionaries(
    {
        "parallel": st.fixed_dictionaries(
            {
                "expert_parallel_size": st.integers(1, 9),
                "tensor_parallel_size": st.sampled_from([1, 1, 2, 3]),
                "redundant_experts": st.integers(0, 60),
            }
        ),
        "model": st.fixed_dictionaries({"dtype": st.sampled_from(["bf16", "fp32"]), "max_context": st.integers(0, 300)}),
        "kv_cache": st.fixed_dictionaries(
            {"kv_cache_size": st.integers(0, 200_000).map("{}B".format), "page_size": st.integers(1, 40)}
        ),
        "batch_processing": st.fixed_dictionaries({"max_batch_size": st.integers(1, 40)}),
    }
)  # fmt: skip
sleeping = st.fixed_dictionaries(
    {
        "experts": st.fixed_dictionaries(
            {"resident_experts": st.integers(1, 10), "prefetch_experts": st.integers(0, 8)}
        )
    }
)


@given(sections=wishes | sleeping, arch=st.sampled_from([ARCH, replace(ARCH, num_experts=4)]))
def test_the_check_and_the_start_say_the_same(sections, arch) -> None:
    """The start's own steps, on a machine with memory enough, up to the arrays' shapes."""
    wanted = parse_config(sections)
    refused = _fault(lambda: check_model(wanted, arch))
    if wanted.parallel.expert_parallel_size * wanted.parallel.tensor_parallel_size > len(jax.devices()):
        return
    assert _fault(lambda: _start(wanted, arch)) == refused


def _fault(step: Callable[[], None]) -> tuple[str | None, str] | None:
    """Field and message of what a step refuses."""
    try:
        step()
    except ModelLoadError as fault:
        return fault.param, fault.message
    return None


def _start(wanted: EngineConfig, arch: Architecture) -> None:
    """As build_engine and load_devices do it."""
    max_context = context_limit(wanted, arch)
    mesh = make_device_mesh(wanted.parallel, arch)
    ladder = BucketLadder.from_config(wanted, max_context)
    shape, dtype = shard_shape(wanted, ladder, max_context), weight_dtype(wanted.model)
    placement = start_placement(wanted.parallel, arch)
    resident = resident_slots(wanted.experts, arch)
    specs = weight_specs(arch, dtype, placement, resident)
    num_pages = build.count_pages(wanted.kv_cache, arch, shape, dtype, specs, mesh)
    DeviceArrays(arch, shape, num_pages, dtype, mesh, placement, resident).abstract_state()


def test_a_model_without_experts_takes_no_slots() -> None:
    dense = replace(ARCH, num_experts=0)
    with pytest.raises(ModelLoadError, match="is 2; 0 to 0"):
        check_model(config(experts={"resident_experts": 2}), dense)
    assert weight_dtype(config().model) == jnp.float32
