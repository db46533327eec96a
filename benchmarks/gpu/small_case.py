"""SmallCase: a named case of an op as the check on a chip runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pallas_kernels.interpret import InterpretParams


@dataclass(frozen=True)
class SmallCase:
    """kernel(interpret)(*args) against reference(*args); places that nobody may read hold NaN.

    is_short: part of a dry run.
    """

    name: str
    args: tuple[Any, ...]
    kernel: Callable[[InterpretParams | None], Callable[..., Any]]
    reference: Callable[..., Any]
    is_short: bool = False
