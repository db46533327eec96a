"""The named scopes that a step's time is told apart by. Imports no JAX."""

ROUTING_SCOPES = ("router", "dispatch", "combine")  # all that exists only because experts are chosen
SCOPES = (
    *("embed", "rms_norm", "rope", "kv_write", "attention"),
    *(*ROUTING_SCOPES, "experts", "dense_ffn", "unembed", "sample"),
)
OTHER = "other"
