"""Where a step's time goes, by named scope: one run under the profiler, its operations joined with the compiled program.

    the program says    fusion.7 ... op_name="jit(decode_step)/while/body/router/router/top_k"
    the profile says    fusion.7 took 9 us, 4 of them in what it called

An operation counts for itself only, without what ran inside it. Times under the profiler are a little longer than without, and
the shares mean one run on the dummy page: attention over a long context takes more.
"""

import logging
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from runtime.ladder.scopes import OTHER, SCOPES

_OP_NAME = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.MULTILINE)

log = logging.getLogger(__name__)


def profile_scopes(run: Callable[[], object], program: str) -> Mapping[str, float]:
    """Shares of SCOPES and OTHER in the time of one `run`, which waits for its own end; they add up to 1.

    program: the compiled text. Empty where nothing can be profiled, another profile being taken for one: a server must not
    fail for want of a figure.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="step-profile-") as folder:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            options.enable_hlo_proto = False  # every loaded program would be written out, for half a second
            with jax.profiler.trace(folder, profiler_options=options):
                run()
            times = _times_by_operation(Path(folder), module_of(program))
    except Exception:  # the profiler's own errors are of many kinds
        log.warning("the step was not profiled", exc_info=True)
        return {}
    return shares_of(times, scopes_of(program))


def scopes_of(program: str) -> dict[str, str]:
    """Operation to the innermost of SCOPES in its name; those outside all of them are not there."""
    found = {}
    for operation, path in _OP_NAME.findall(program):
        scope = next((part for part in reversed(path.split("/")) if part in SCOPES), None)
        if scope is not None:
            found[operation] = scope
    return found


def shares_of(times: Mapping[str, float], scopes: Mapping[str, str]) -> dict[str, float]:
    """times: by operation, in any unit."""
    total = sum(times.values())
    by_scope: dict[str, float] = defaultdict(float)
    for operation, time in times.items():
        by_scope[scopes.get(operation, OTHER)] += time
    return {scope: by_scope[scope] / total for scope in (*SCOPES, OTHER) if total and by_scope[scope]}


def self_times(events: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """(start, duration, operation) of one thread or stream to each operation's time without what it contains."""
    times: dict[str, float] = defaultdict(float)
    open_events: list[tuple[float, str]] = []  # (end, operation), innermost last
    for start, duration, operation in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_events and open_events[-1][0] <= start:
            open_events.pop()
        if open_events:
            times[open_events[-1][1]] -= duration
        times[operation] += duration
        open_events.append((start + duration, operation))
    return {operation: max(0.0, time) for operation, time in times.items()}


def module_of(program: str) -> str:
    """`jit_decode_step` of a text that begins with `HloModule jit_decode_step, ...`."""
    found = re.match(r"HloModule ([^\s,]+)", program)
    return found[1] if found else ""


def _times_by_operation(folder: Path, module: str) -> dict[str, float]:
    """Operations of other programs, the sampler's for one, are told apart by their program's name before their own."""
    total: dict[str, float] = defaultdict(float)
    for path in folder.rglob("*.xplane.pb"):
        with warnings.catch_warnings():  # jax 0.12's own types warn when they are first used
            warnings.simplefilter("ignore", DeprecationWarning)
            planes: Any = jax.profiler.ProfileData.from_file(str(path)).planes
            for line in (line for plane in planes for line in plane.lines):
                events = [(e.start_ns, e.duration_ns, dict(e.stats)) for e in line.events]
                named = [(s, d, _name(stats, module)) for s, d, stats in events if "hlo_op" in stats]
                for operation, time in self_times(named).items():
                    total[operation] += time
    return total


def _name(stats: Mapping[str, Any], module: str) -> str:
    own = str(stats.get("hlo_module", module))
    return str(stats["hlo_op"]) if own.startswith(module) else f"{own}/{stats['hlo_op']}"
