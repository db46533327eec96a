"""Start of JAX across hosts. Must run before JAX touches a device; once in a process.

JAX's own watching of the hosts is put out of the way: it would end the surviving processes, where an answer is wanted.
"""

import math

import jax

from runtime.config import ParallelConfig
from runtime.errors import ModelLoadError

NEVER_S = 10 * 86_400  # the channel between the hosts notices a loss, long before
SHUTDOWN_S = 5


def start_distributed(parallel: ParallelConfig) -> None:
    """Meet the other hosts at the coordinator; afterwards jax.devices() are those of all hosts.

    Raises ModelLoadError where they do not meet in parallel.host_start_timeout.
    """
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from the server
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host, port = parallel.coordinator_address
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        jax.distributed.initialize(
            address,
            parallel.hosts,
            parallel.host_id,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(parallel.host_start_timeout),
            coordinator_bind_address=address,
            heartbeat_timeout_seconds=NEVER_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except RuntimeError as error:
        raise ModelLoadError(
            f"parallel.coordinator: the hosts did not meet at {address}: {str(error)[:300]}",
            param="parallel.coordinator",
        ) from None
