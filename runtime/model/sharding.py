"""LayerSharding: what a layer must know of the devices it shares work with. Static; `ALONE` is one device."""

from dataclasses import dataclass

import jax
from jax import lax

from runtime.experts.exchange_spec import Exchange


@dataclass(frozen=True)
class LayerSharding:
    """exchange: how tokens get to experts on other devices; tensor_axis: mesh axis whose devices share each product.

    num_halves: micro-batches that a step is computed in, 1 or 2.
    """

    exchange: Exchange | None = None
    tensor_axis: str | None = None
    num_halves: int = 1

    def add_up(self, partial: jax.Array) -> jax.Array:
        """The sum of the parts that the devices of one product computed."""
        return partial if self.tensor_axis is None else lax.psum(partial, self.tensor_axis)

    def any_device(self, flag: jax.Array) -> jax.Array:
        """Whether it holds on any device of the step; the same answer on all of them.

        Devices of one product have the same rows and should never differ; if rounding made them, a loop of more turns on
        one of them would wait for ever in its sums.
        """
        axes = (self.tensor_axis, self.exchange.axis if self.exchange is not None else None)
        if not (shared := tuple(axis for axis in axes if axis is not None)):
            return flag
        return lax.psum(flag.astype("int32"), shared) > 0


ALONE = LayerSharding()
