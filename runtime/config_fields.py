"""Fields of the configuration: each says how a change takes effect (live, by recompiling, at a restart). Imports no JAX."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def _field(
    kind: Literal["live", "recompile", "restart"], default: Any, description: str, **bounds: Any
) -> Any:
    return Field(
        default, description=description, json_schema_extra={"change": kind}, validate_default=True, **bounds
    )


def live(default: Any, description: str, **bounds: Any) -> Any:
    return _field("live", default, description, **bounds)


def recompile(default: Any, description: str, **bounds: Any) -> Any:
    return _field("recompile", default, description, **bounds)


def restart(default: Any, description: str, **bounds: Any) -> Any:
    return _field("restart", default, description, **bounds)


class Section(BaseModel):
    """A part of the configuration: frozen, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
