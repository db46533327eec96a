"""What hosts tell each other before they work together: versions, flags, model, configuration; and where they differ. No JAX.

The steps of all hosts must be the same programs on the same shapes, or their collectives would not meet. Restart fields
of the sections that shape them are compared; fields that change while serving are taken from host 0. Kernels and kinds of
devices, which JAX knows, are compared while arrays are loaded (`build.py`, `device_kind.py`).
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtime.config import EngineConfig, parse_config
from runtime.engine.change import ChangeKind
from runtime.engine.host_frames import printable
from runtime.engine.reconfigure import kind_of, with_restart_fields_of
from runtime.xla_flags import shared_flags

PROTOCOL = 3
SHAPING = ("model", "parallel", "kv_cache", "ladder", "batch_processing")
OWN = frozenset(  # of each host
    {
        "model.path",
        "model.served_name",
        "model.aliases",
        "parallel.host_id",
        "ladder.cache_dir",
        "ladder.compile_workers",
    }
)
MAX_SHOWN = 5
MAX_HEADER_BYTES = 100 << 20


def make_greeting(config: EngineConfig, folder: Path) -> dict[str, Any]:
    """By name: all that must be the same on every host. After set_xla_flags."""
    shared: dict[str, Any] = {"protocol": PROTOCOL, "jax": version("jax"), "jaxlib": version("jaxlib")}
    shared["model (its files)"] = fingerprint(folder)
    shared |= {f"XLA_FLAGS {name}": value for name, value in shared_flags().items()}
    for section, fields in config.model_dump(mode="json", include=set(SHAPING)).items():
        for name, value in fields.items():
            path = f"{section}.{name}"
            if path not in OWN and kind_of(section, name) is ChangeKind.RESTART:
                shared[path] = value
    return shared


def differences(mine: dict[str, Any], theirs: Any, their_id: int) -> str:
    """A sentence that names what differs; empty where nothing does. theirs: as it came over the network."""
    if not isinstance(theirs, dict):
        return f"host {their_id} sent no greeting"
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    shown = [
        f"{printable(name, 80)} is {printable(mine.get(name), 80)} on host 0, "
        f"{printable(theirs.get(name), 80)} on host {their_id}"
        for name in names[:MAX_SHOWN]
    ]
    return "; ".join(shown) + (f"; and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")


def shaping_sections(config: EngineConfig) -> dict[str, Any]:
    """What host 0 sends of its configuration."""
    return config.model_dump(mode="json", include=set(SHAPING))


def config_of_leader(own: EngineConfig, sections: Any) -> EngineConfig:
    """This host's configuration with the leader's fields that may change while serving.

    Raises ValueError for what is no configuration.
    """
    if not isinstance(sections, dict) or not set(sections) <= set(SHAPING):
        raise ValueError("host 0 sent no configuration")
    leaders = parse_config(own.model_dump(mode="json") | sections, source="the configuration of host 0")
    return with_restart_fields_of(own, leaders)


def fingerprint(folder: Path) -> str:
    """Of config.json and of the names, types and shapes of all tensors; the weights themselves are not read."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            start = file.read(8)
            header = file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + header)
    return digest.hexdigest()[:16]
