"""Which sequence computes what in the next step; imports no JAX."""
