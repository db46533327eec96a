"""Controllers: what the load says about batch sizes and waiting. Pure functions, no JAX."""
