"""Shares of a step by named scope: the arithmetic on its own, and one real profile."""

import jax
import jax.numpy as jnp
import pytest

from runtime.ladder.scopes import OTHER, ROUTING_SCOPES, SCOPES
from runtime.ladder.step_profile import module_of, profile_scopes, scopes_of, self_times, shares_of
from tests.engine_driver import EngineDriver

PROGRAM = """HloModule jit_step, is_scheduled=true
  %fusion.7 = f32[4]{0} fusion(%a), metadata={op_name="jit(step)/while/body/attention/rms_norm/mul" stack_frame_id=3}
  ROOT add.1 = f32[4]{0} add(%a, %b), metadata={op_name="jit(step)/router/router/add"}
  %copy.2 = f32[4]{0} copy(%a)
  %mul.3 = f32[4]{0} multiply(%a, %b), metadata={op_name="jit(step)/mul"}
"""


def test_an_operation_belongs_to_its_innermost_scope() -> None:
    assert scopes_of(PROGRAM) == {"fusion.7": "rms_norm", "add.1": "router"}
    assert (module_of(PROGRAM), module_of("")) == ("jit_step", "")


def test_an_operation_counts_without_what_ran_inside_it() -> None:
    events = [
        (0.0, 10.0, "while"),
        (1.0, 3.0, "dot"),
        (2.0, 1.0, "copy"),
        (5.0, 4.0, "dot"),
        (10.0, 2.0, "add"),
    ]
    assert self_times(events) == {"while": 3.0, "dot": 6.0, "copy": 1.0, "add": 2.0}
    assert self_times([]) == {}


def test_shares_add_up() -> None:
    times = {"fusion.7": 6.0, "add.1": 1.0, "copy.2": 2.0, "unheard.of": 1.0}
    assert shares_of(times, scopes_of(PROGRAM)) == {"rms_norm": 0.6, "router": 0.1, OTHER: 0.3}
    assert shares_of({}, {}) == {}


def test_every_rung_of_an_engine_is_profiled_before_traffic() -> None:
    driver = EngineDriver()
    shares = driver.engine.scope_shares
    driver.close()
    assert set(shares) == {bucket.name for bucket in driver.engine.ladder.rungs}
    for by_scope in shares.values():
        assert sum(by_scope.values()) == pytest.approx(1)
        assert set(by_scope) <= {*SCOPES, OTHER}
        assert {"router", "dispatch", "attention", "experts"} <= set(by_scope)
        assert all(by_scope[scope] > 0 for scope in ROUTING_SCOPES if scope in by_scope)


def test_a_profile_that_cannot_be_taken_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("no space left")

    assert profile_scopes(fail, "") == {}
    assert "the step was not profiled" in caplog.text


def test_operations_of_another_program_are_not_taken_for_this_one_s() -> None:
    def compiled(scope: str) -> jax.stages.Compiled:
        def function(x: jax.Array) -> jax.Array:
            with jax.named_scope(scope):
                return jnp.sin(x) @ x

        function.__name__ = f"in_{scope}"
        return jax.jit(function).lower(jnp.ones((64, 64))).compile()

    x = jax.block_until_ready(jnp.ones((64, 64)))
    router, other = compiled("router"), compiled("experts")
    assert set(profile_scopes(lambda: jax.block_until_ready(router(x)), router.as_text() or "")) == {"router"}
    both = profile_scopes(lambda: jax.block_until_ready((router(x), other(x))), router.as_text() or "")
    assert set(both) == {"router", OTHER}
