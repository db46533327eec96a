"""The configuration as a JSON document: what it looks like, which fields changed, what may be changed while serving.

A document is complete (every field has a value) and canonical (durations and sizes as the YAML file writes them).
"""

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from control_plane.errors import InvalidConfig
from control_plane.merge_patch import is_too_deep, leaves, merge, nested, same
from runtime.config import EngineConfig, parse_config
from runtime.config_values import Duration, SizeField
from runtime.engine.change import FieldChange
from runtime.engine.reconfigure import WITHOUT_EFFECT

SECRETS = ("server.api_keys", "server.admin_keys", "server.viewer_keys")
# Where the server listens, who may enter, which weights it loads and the folder whose content it executes: a key that
# may tune must not be able to change these, and what the command line says must win.
FILE_ONLY = frozenset(
    {
        *SECRETS,
        "server.host",
        "server.port",
        "server.demo",
        "server.state_dir",
        "model.path",
        "model.load_format",
        "ladder.cache_dir",
    }
)
_NOT_BUILT = {
    "precision.": "this version holds weights in one precision",
    "traffic_prediction.": "this version has no forecast",
    "kv_cache.levels": "this version keeps KV on the device only",
    "kv_cache.l1_size": "this version keeps KV on the device only",
    "kv_cache.l2_size": "this version keeps KV on the device only",
    "kv_cache.l3_size": "this version keeps KV on the device only",
}


def document(config: EngineConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def checked(candidate: dict[str, Any]) -> EngineConfig:
    """The configuration of a document. Raises InvalidConfig that names each wrong field.

    Parsed twice, so that what is stored as text is sure to be read back at the next start.
    """
    if is_too_deep(candidate):
        raise InvalidConfig("The configuration is nested too deeply.", param="patch")
    try:
        return parse_config(document(parse_config(candidate, "patch")), "patch")
    except ValueError as error:
        raise InvalidConfig(str(error), param="patch") from None


def undone(current: dict[str, Any], changes: Iterable[FieldChange]) -> dict[str, Any]:
    """`current` with the old values of `changes`, but for fields that somebody has changed since."""
    now = dict(leaves(current))
    return merge(current, nested((c.path, c.old) for c in changes if same(now.get(c.path), c.new)))


def public(found: dict[str, Any]) -> dict[str, Any]:
    """The document without the digests of keys; what is left may be sent back as a patch."""
    hidden = {path.split(".")[1] for path in SECRETS}
    server = {key: value for key, value in found.get("server", {}).items() if key not in hidden}
    return found | ({"server": server} if "server" in found else {})


def no_effect(path: str) -> str | None:
    """Why a change of this field does nothing in this version; None when it does something."""
    return WITHOUT_EFFECT.get(path) or next(
        (why for p, why in _NOT_BUILT.items() if path.startswith(p)), None
    )


def schema() -> dict[str, Any]:
    """EngineConfig's JSON schema; each field says also `unit`, `has_effect` (with `reason`) and `file_only`."""
    return copy.deepcopy(_schema())


@cache
def _schema() -> dict[str, Any]:
    found = EngineConfig.model_json_schema(mode="serialization", schema_generator=_Schema)
    defaults = dict(leaves(document(EngineConfig())))
    for section, model in _sections().items():
        properties = found["$defs"][model.__name__]["properties"]
        for name, field in model.model_fields.items():
            path = f"{section}.{name}"
            why = no_effect(path)
            properties[name] |= {
                "default": defaults[path],
                "unit": _unit(field),
                "has_effect": why is None,
                "file_only": path in FILE_ONLY,
            }
            if why is not None:
                properties[name]["reason"] = why
    return found


class _Schema(GenerateJsonSchema):
    """Without the warnings about defaults that are written as text; those are added from a document."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def _sections() -> dict[str, type[BaseModel]]:
    found = {name: field.annotation for name, field in EngineConfig.model_fields.items()}
    return {
        name: model
        for name, model in found.items()
        if isinstance(model, type) and issubclass(model, BaseModel)
    }


def _unit(field: FieldInfo) -> str | None:
    """`duration` (us, ms, s, min, h), `size` (%, B to TiB), or None for a plain number or word."""
    if get_args(Duration)[1] in field.metadata:
        return "duration"
    return "size" if get_args(SizeField)[1] in field.metadata else None
