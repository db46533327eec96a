"""Times of a call on the device: what runs without a GPU."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import device_time
from pallas_kernels.device_time import Times, best_method, measure
from pallas_kernels.workload import Prepared

LINKS = tuple(jnp.full(2, i, jnp.int32) for i in range(3))


def prepared(size: int) -> Prepared:
    x = jnp.ones((size, size))
    return Prepared(lambda link, x: (x + link[0]) @ x, LINKS, (x,), jnp.zeros(1, jnp.int32))


def test_a_cpu_has_no_cupti() -> None:
    assert best_method() == "chain"


def test_a_chain_makes_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times the work takes clearly longer: nothing was hoisted out of the loop or left out."""
    times = measure({"small": prepared(64), "large": prepared(512)}, "chain", 3)
    assert [t.method for t in times.values()] == ["chain", "chain"]
    assert all(len(t.seconds) == 3 for t in times.values())
    assert times["large"].median_s > 4 * times["small"].median_s


def test_a_chain_ends_with_the_link_of_its_last_call() -> None:
    chain = device_time._Chain(prepared(4))
    out, zero = chain._programs[1](jnp.stack(LINKS), jnp.ones((4, 4)))
    last = (device_time.LONG_CHAIN - 1) % len(LINKS)
    assert out.tolist() == ((jnp.ones((4, 4)) + last) @ jnp.ones((4, 4))).tolist()
    assert float(zero) == 0.0


def test_a_chain_lost_in_noise_still_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = device_time._Chain(prepared(4))
    monkeypatch.setattr(chain, "_best_s", lambda program: 0.25)
    assert chain.run() == [0.25 / device_time.LONG_CHAIN]


def test_wall_time_and_turns() -> None:
    calls: list[str] = []

    def contestant(name: str) -> Prepared:
        def function(link: jax.Array) -> jax.Array:
            calls.append(name)
            return link

        return Prepared(function, LINKS, (), jnp.zeros(1, jnp.int32))

    times = measure({"a": contestant("a"), "b": contestant("b")}, "wall", 2)
    assert "".join(calls) == "ababab"  # once to touch, then two rounds in turns
    assert all(t.median_s > 0 for t in times.values())


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="'sundial'"):
        measure({}, "sundial", 1)


def test_median_and_spread() -> None:
    times = Times("wall", (1.0, 2.0, 4.0))
    assert (times.median_s, times.spread) == (2.0, 1.5)
