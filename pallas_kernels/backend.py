"""Which implementation of an op runs here, and why.

Ops know their implementations by name and which operands each takes; this module knows which of the names can run on this
machine. It is the one table to extend when a new backend (a GPU kernel) arrives.

Any backend is switched off by naming it in the environment variable MOE_LADDER_DISABLE_BACKENDS, separated by commas.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType

import jax

from pallas_kernels.native import library as native_library

DISABLED_BY = "MOE_LADDER_DISABLE_BACKENDS"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_for_hopper: ContextVar[bool] = ContextVar("choosing_for_hopper", default=False)


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name and the sentence an operator reads about it."""

    name: str
    reason: str


@dataclass(frozen=True)
class Backend:
    """One row of the table: `unavailable()` is None where it runs, else the sentence that says why not."""

    name: str
    description: str
    unavailable: Callable[[], str | None]


def choose_backend(
    implemented: tuple[str, ...], requested: str | None = None, *, unfit: Mapping[str, str] = _NOTHING
) -> BackendChoice:
    """The backend to run: the requested one, else the first of the table that is implemented and can run here.

    unfit: backends that cannot take these operands, each with the reason.
    Raises ValueError for a name that the table or the op lacks, NotImplementedError for one that cannot run here.
    """
    disabled = disabled_backends()
    if requested is not None:
        return _requested_backend(implemented, requested, unfit, disabled)
    passed_over = []
    for backend in BACKENDS:
        if backend.name not in implemented:
            continue
        why_not = _why_not(backend, unfit, disabled)
        if why_not is None:
            reason = f"{backend.name}: {backend.description}"
            return BackendChoice(backend.name, "; ".join([reason, *passed_over]))
        passed_over.append(f"not {backend.name}: {why_not}")
    raise NotImplementedError(f"none of {implemented} runs here: {'; '.join(passed_over)}")


def disabled_backends() -> frozenset[str]:
    """Names in MOE_LADDER_DISABLE_BACKENDS. Raises ValueError for one that the table lacks."""
    names = frozenset(filter(None, (name.strip() for name in os.environ.get(DISABLED_BY, "").split(","))))
    known = [row.name for row in BACKENDS]
    unknown = sorted(names.difference(known))
    if unknown:
        raise ValueError(f"{DISABLED_BY} names {unknown[0][:50]!r}, which is not one of {tuple(known)}")
    return names


def _why_not(backend: Backend, unfit: Mapping[str, str], disabled: frozenset[str]) -> str | None:
    if backend.name in disabled:
        return f"switched off by {DISABLED_BY}"
    return unfit.get(backend.name) or backend.unavailable()


def _requested_backend(
    implemented: tuple[str, ...], requested: str, unfit: Mapping[str, str], disabled: frozenset[str]
) -> BackendChoice:
    if requested not in implemented:
        raise ValueError(f"backend {requested!r} is not one of {implemented}")
    backend = next((row for row in BACKENDS if row.name == requested), None)
    if backend is None:
        raise ValueError(f"backend {requested!r} is not one of {tuple(row.name for row in BACKENDS)}")
    why_not = _why_not(backend, unfit, disabled)
    if why_not is not None:
        raise NotImplementedError(f"{requested}: {why_not}")
    return BackendChoice(requested, f"{requested}: asked for by name; {backend.description}")


@contextmanager
def choosing_for_hopper() -> Iterator[None]:
    """Choices made inside are those of a Hopper GPU, whatever runs this: for compiling ahead of time."""
    token = _for_hopper.set(True)
    try:
        yield
    finally:
        _for_hopper.reset(token)


def _needs_hopper() -> str | None:
    if _for_hopper.get():
        return None
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"needs a Hopper GPU, the default device is {device.platform}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    return None if capability.startswith("9.") else f"needs compute capability 9.x, this GPU has {capability}"


def _needs_this_cpu() -> str | None:
    return "code is compiled for a GPU" if _for_hopper.get() else native_library.unavailable()


def _runs_everywhere() -> str | None:
    return None


# In order of preference. An op offers the subset that it implements.
BACKENDS: tuple[Backend, ...] = (
    Backend("mosaic", "Pallas Mosaic kernel for Hopper", _needs_hopper),
    Backend("native", "C++ kernel for CPUs with AVX-512 BF16", _needs_this_cpu),
    Backend("xla", "compiled by XLA, not dense", _runs_everywhere),
    Backend("reference", "dense jnp, slow and obviously right", _runs_everywhere),
)
