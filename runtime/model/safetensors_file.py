"""Reads one .safetensors file that may come from anywhere: every number of its header is checked before use.

Layout: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from runtime.errors import ModelLoadError

MAX_HEADER_BYTES = 100 << 20
MAX_RANK = 8
DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file; `offset` counts from the start of the file, in bytes."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """The tensors of one file. The data is mapped, not read, until a tensor is copied out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read_header(path)
        self._bytes = np.memmap(path, np.uint8, mode="r")

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of the tensor."""
        entry = self.entries[name]
        return self._bytes[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).reshape(entry.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Entries by name. Raises ModelLoadError for anything but a whole, consistent file."""
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if file_size < 8 or not 2 <= header_size <= min(MAX_HEADER_BYTES, file_size - 8):
                raise ModelLoadError(f"{path}: header of {header_size} bytes in a file of {file_size} bytes")
            header = json.loads(file.read(header_size), object_pairs_hook=_refuse_repeated(path))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: header is not JSON: {str(error)[:120]}") from None
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path}: header is not a JSON object")
    data_start = 8 + header_size
    entries = {
        name: _entry(path, name, value, data_start, file_size - data_start)
        for name, value in header.items()
        if name != "__metadata__"
    }
    _check_no_overlap(path, entries)
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int, data_size: int) -> TensorEntry:
    where = f"{path}: tensor {name[:120]!r}"
    if not isinstance(value, dict) or value.keys() < {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"{where} lacks dtype, shape or data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise ModelLoadError(
            f"{where} has dtype {str(value['dtype'])[:20]!r}; supported: {', '.join(DTYPES)}"
        )
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise ModelLoadError(f"{where} has shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelLoadError(f"{where} has data_offsets {str(offsets)[:80]}")
    if offsets[1] > data_size:
        raise ModelLoadError(f"{where} ends at byte {offsets[1]} of {data_size}: the file is truncated")
    entry = TensorEntry(path, dtype, tuple(shape), data_start + offsets[0])
    if entry.nbytes != offsets[1] - offsets[0]:
        raise ModelLoadError(
            f"{where} of shape {shape} takes {entry.nbytes} bytes, its offsets {offsets} another number"
        )
    return entry


def _check_no_overlap(path: Path, entries: dict[str, TensorEntry]) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < end:
            raise ModelLoadError(f"{path}: tensor {name[:120]!r} overlaps another")
        end = entry.offset + entry.nbytes


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**62 for v in values
    )


def _refuse_repeated(path: Path) -> Any:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            raise ModelLoadError(f"{path}: header holds a name twice")
        return built

    return build
