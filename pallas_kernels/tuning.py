"""Measured tile sizes by device: JSON tables beside this file, and a count of what they lacked."""

import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent / "tables"
MAX_TABLE_BYTES = 1 << 20


@dataclass(frozen=True)
class TileTables:
    """Reads `<folder>/<device>/<op>.json`, in the form of tables/README.md, written by tuning on that device."""

    folder: Path
    device: str
    _misses: Counter[tuple[str, str]] = field(default_factory=Counter)
    _read: dict[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def of_package() -> "TileTables":
        """The shipped tables for the default device, the same object at each call."""
        return _tables_of(device_folder(jax.devices()[0].device_kind))

    def look_up(self, op: str, key: str) -> Mapping[str, Any] | None:
        """The measured tile's fields, or None, which is counted as a miss. Raises ValueError for a broken table."""
        with self._lock:
            if op not in self._read:
                self._read[op] = self._load(op)
            found = self._read[op].get(key)
            if found is None:
                self._misses[op, key] += 1
            return found

    def misses(self) -> dict[tuple[str, str], int]:
        """(op, key) to how often it was looked for in vain."""
        with self._lock:
            return dict(self._misses)

    def _load(self, op: str) -> Mapping[str, Mapping[str, Any]]:
        path = self.folder / self.device / f"{op}.json"
        if not path.is_file():
            return {}
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise ValueError(
                f"{path.name} has {path.stat().st_size} bytes, at most {MAX_TABLE_BYTES} are read"
            )
        tiles = json.loads(path.read_text(encoding="utf-8")).get("tiles")
        if not isinstance(tiles, dict):
            raise ValueError(f'{path.name} holds no "tiles" by key')
        for key, tile in tiles.items():
            if not isinstance(tile, dict) or not all(isinstance(v, int) for v in tile.values()):
                raise ValueError(f"{path.name}: the tile of {key!r} is not a set of named numbers")
        return tiles


def num_tile_misses() -> int:
    """How often the default device's tables were asked in vain, in this process."""
    return sum(TileTables.of_package().misses().values())


def device_folder(device_kind: str) -> str:
    """`NVIDIA H200` to `nvidia_h200`."""
    return "".join(c if c.isalnum() else "_" for c in device_kind.lower())


@cache
def _tables_of(device: str) -> TileTables:
    return TileTables(FOLDER, device)
