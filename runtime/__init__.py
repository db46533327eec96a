"""The JAX engine: model, experts, cache, scheduler, ladder and the loop that owns them."""
