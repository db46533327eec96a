"""What the ahead-of-time tool compiles: an op lists its own in cases.py as AOT_CASES, the server its steps as AOT_STEPS."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

import pallas_kernels

# By name: kernels stand alone, and the whole server adds its steps.
STEPS_OF = ("runtime.ladder.aot_steps", "runtime.engine.aot_mesh_steps", "runtime.engine.aot_residency")


@dataclass(frozen=True)
class AotCase:
    """A function with abstract arguments, at the shape of a real model.

    name: unique over all ops, "<op>/<shape>/<variant>".
    function: jittable; a kernel is called directly, not through the choice of backend, since no GPU is there to choose.
    args: positional, `jax.ShapeDtypeStruct` leaves.
    needs_wgmma: False for a kernel without products.
    max_spill_bytes: of one kernel; above 0 only with the reason beside the case.
    """

    name: str
    function: Callable[..., object]
    args: tuple[jax.ShapeDtypeStruct, ...]
    needs_wgmma: bool = True
    max_spill_bytes: int = 0


@dataclass(frozen=True)
class AotStep:
    """A whole step of a model. Backends are chosen while it is traced, as on a Hopper GPU.

    build: mesh of `devices` GPUs to (function, positional trees of `jax.ShapeDtypeStruct`); leaves without a sharding
        are replicated over the mesh.
    max_temp_bytes: what it may allocate beside its arguments and results.
    dense_elements: tokens * experts * width: what the smallest product of every token with every expert would write.
        No array of the program may be as large, arguments and what has their shape apart.
    min_alias_bytes: arguments that must be updated in place, the KV pages above all.
    devices: GPUs of one host.
    max_exposed_collectives: that nothing hides; None: any number.
    is_quick: compiled where time is short, as in continuous integration.
    """

    name: str
    build: Callable[[Mesh], tuple[Callable[..., object], tuple[Any, ...]]]
    max_temp_bytes: int
    dense_elements: int
    min_alias_bytes: int = 0
    devices: int = 1
    max_exposed_collectives: int | None = None
    is_quick: bool = True


def all_cases(only: str = "", module: str | None = None) -> list[AotCase]:
    """The cases of every op whose folder has a cases.py, or those of one module.

    Raises ValueError for a name that two cases have, ImportError for a module that is not there.
    """
    modules = _ops_with_cases() if module is None else [module]
    found = [case for name in modules for case in getattr(importlib.import_module(name), "AOT_CASES", ())]
    names = [case.name for case in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two ahead-of-time cases are called {twice[0]!r}")
    return [case for case in found if only in case.name]


def all_steps(only: str = "", module: str | None = None, *, only_quick: bool = False) -> list[AotStep]:
    """The steps of whole models, where the server's packages are installed, or those of one module."""
    modules = STEPS_OF if module is None else (module,)
    found = [getattr(importlib.import_module(name), "AOT_STEPS", ()) for name in modules if _exists(name)]
    steps = [step for group in found for step in group]
    return [step for step in steps if only in step.name and (step.is_quick or not only_quick)]


def _ops_with_cases() -> list[str]:
    folders = [m.name for m in pkgutil.iter_modules(pallas_kernels.__path__, "pallas_kernels.") if m.ispkg]
    return [f"{folder}.cases" for folder in sorted(folders) if _exists(f"{folder}.cases")]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False
