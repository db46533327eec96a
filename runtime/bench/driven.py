"""An engine without its thread, for measurements that look at every launch: loaded here, driven by the caller's loop.

JAX is imported inside: its flags, such as the number of virtual devices, must be set before.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import EngineConfig
from runtime.request import Request

if TYPE_CHECKING:
    from runtime.engine.engine import CollectedStep
    from runtime.engine.loaded import Loaded


def load(config: EngineConfig, folder: Path, max_context: int | None = None) -> "Loaded":
    """The model in `folder`, its rungs ordered. max_context: longest prompt + output, by default what the configuration
    says. Raises ModelLoadError."""
    from runtime.engine.build import load_engine  # noqa: PLC0415 - brings JAX
    from runtime.engine.start_checks import context_limit  # noqa: PLC0415
    from runtime.model.architecture import load_architecture  # noqa: PLC0415

    arch = load_architecture(folder)
    return load_engine(config, folder, arch, (), max_context or context_limit(config, arch))


def drive(
    loaded: "Loaded",
    requests: list[Request],
    texts: dict[str, tuple[int, ...]] | None = None,
    between: Callable[[], object] = lambda: None,
) -> Iterator["CollectedStep"]:
    """Run an engine without its thread: what was read of each launch. `between` is called before each; output ids go to
    `texts` at the end."""
    engine, scheduler = loaded.engine, loaded.scheduler
    flying = deque[Any]()
    try:
        engine.compiler.wait_settled()
        while not engine.adopt_ready_rungs():
            pass
        if engine.compiler.first_error:
            raise RuntimeError(f"a rung failed to compile: {engine.compiler.first_error}")
        sequences = [scheduler.add(request) for request in requests]
        while not scheduler.is_idle:
            between()
            plan = scheduler.schedule() if len(flying) < 2 else None
            if plan is not None:
                flying.append(engine.launch(plan, {}))
            if flying and (plan is None or len(flying) == 2):
                step = flying.popleft()
                collected = engine.collect(step)
                scheduler.collect(step.plan, collected.result)
                yield collected
        if texts is not None:
            texts |= {s.request_id: tuple(s.output_ids) for s in sequences}
    finally:
        engine.compiler.shutdown()
