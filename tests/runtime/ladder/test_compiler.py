"""Executables keep no copy of the weights, failures name their rung, and nothing is compiled on a call."""

import threading
from concurrent.futures import wait

import jax.numpy as jnp
import pytest

from runtime.engine.device_arrays import DeviceArrays
from runtime.errors import CompileFailed
from runtime.ladder.bucket import decode_bucket, prefill_bucket
from runtime.ladder.compiler import RungState, StepCompiler
from runtime.ladder.host_rungs import HostRungs
from runtime.ladder.step import StepShape
from runtime.model.architecture import from_hf_config
from runtime.model.params import abstract_params
from runtime.model.spec import tree_nbytes
from tests.engine_driver import TINY

ARCH = from_hf_config(
    TINY | {"hidden_size": 256, "num_experts": 16, "moe_intermediate_size": 128, "vocab_size": 1024}
)
SHAPE = StepShape(num_slots=4, page_size=4, pages_per_row=8, max_prefill_tokens=16)


@pytest.fixture(scope="module")
def compiler():
    compiler = StepCompiler(
        ARCH, SHAPE, DeviceArrays(ARCH, SHAPE, 20, jnp.bfloat16).abstract_state(), num_workers=1
    )
    yield compiler
    compiler.shutdown()


def test_the_decode_loop_keeps_no_converted_copy_of_the_weights(compiler):
    """The weights are invariants of the loop: XLA once converted those of dense products before each launch, 1.4 MB
    here instead of 0.14 MB of temporaries."""
    compiled = compiler._lower_rung(decode_bucket(1)).compile()
    assert (
        compiled.memory_analysis().temp_size_in_bytes < tree_nbytes(abstract_params(ARCH, jnp.bfloat16)) / 10
    )


def test_a_rung_that_fails_keeps_its_error_and_can_be_tried_again(compiler, monkeypatch):
    bucket = prefill_bucket(16, 4, 4)
    monkeypatch.setattr(compiler, "_lower_rung", lambda _: 1 / 0)
    for future in compiler.compile([bucket]):
        future.result()
    step = compiler.step(bucket.name)
    assert step.state is RungState.FAILED
    assert "ZeroDivisionError" in step.error
    assert not compiler.is_ready(bucket)
    assert bucket.name in compiler.first_error
    with pytest.raises(CompileFailed, match=f"{bucket.name} is failed"):
        compiler.call(bucket.name)
    monkeypatch.undo()
    for future in compiler.compile([bucket]):
        future.result()
    assert compiler.is_ready(bucket)


def test_what_was_never_compiled_is_not_compiled_by_a_call(compiler):
    with pytest.raises(CompileFailed, match="absent"):
        compiler.call("decode-99")


class Compiled:
    """What a lowered step and its executable are here."""

    def compile(self):
        return self

    def memory_analysis(self):
        return None


@pytest.fixture
def held(monkeypatch):
    """A compiler on host 0 of two, whose compiles take nothing, but `decode-2` waits for an event."""
    others, may_end, started = HostRungs([1]), threading.Event(), threading.Event()
    found = StepCompiler(
        ARCH,
        SHAPE,
        DeviceArrays(ARCH, SHAPE, 20, jnp.bfloat16).abstract_state(),
        num_workers=2,
        others=others,
    )

    def lower(bucket):
        if bucket == decode_bucket(2):
            started.set()
            assert may_end.wait(10)
        return Compiled()

    monkeypatch.setattr(found, "_lower_rung", lower)
    monkeypatch.setattr(found, "_common_jobs", lambda: [(n, Compiled) for n in found._common_names])
    yield found, others, may_end, started
    may_end.set()
    found.shutdown()


def report(compiler, others, *buckets):
    for name in {n for bucket in buckets for n in compiler.names_of(bucket)}:
        others.report(1, name, "")


def test_a_rung_dropped_while_it_compiles_here_is_not_ready_by_what_another_host_said_before(held):
    compiler, others, may_end, started = held
    one, two = decode_bucket(1), decode_bucket(2)
    compiler.compile([one, two])
    assert started.wait(10)
    report(compiler, others, one, two)
    compiler.forget_all_but([one])  # host 1 frees `two`
    compiler.compile([two])  # and is asked for it again
    futures = list(compiler._futures.values())
    may_end.set()
    wait(futures, 10)
    assert compiler.step(two.name).state is RungState.COMPILING
    report(compiler, others, two)
    assert compiler.is_ready(two)


def test_a_rung_that_nobody_wants_any_more_holds_up_nothing_and_is_freed_when_it_is_done(held):
    compiler, others, may_end, started = held
    one, two = decode_bucket(1), decode_bucket(2)
    futures = compiler.compile([one, two])
    assert started.wait(10)
    compiler.forget_all_but([one])  # host 1 cancels its compile of `two`: it never says that it has it
    report(compiler, others, one)
    wait(futures[:-1], 10)
    assert compiler.is_settled
    may_end.set()
    wait(futures, 10)
    assert compiler.is_settled
    assert compiler.step(two.name).state is RungState.ABSENT
