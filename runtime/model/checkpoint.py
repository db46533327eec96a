"""Loads Params from a folder of safetensors, array by array, straight into the layout that the forward pass uses.

On a CPU the model exists once: the device takes over the memory that an array was read into. Elsewhere one array exists
on the host at a time. All names and shapes are checked before the first byte of data is read, so a wrong folder fails at once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from runtime.errors import ModelLoadError
from runtime.model.architecture import Architecture
from runtime.model.checkpoint_names import Part, Source, is_ignorable, sources
from runtime.model.params import Params, abstract_params
from runtime.model.safetensors_file import SafetensorsFile
from runtime.model.spec import Place, on_one_device, tree_nbytes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100 << 20
MAX_NAMES_SHOWN = 3
ADOPTED_ALIGNMENT = 64

Progress = Callable[[int, int], None]  # (bytes loaded, bytes in all)


def load_params(
    path: Path,
    arch: Architecture,
    dtype: DTypeLike,
    on_progress: Progress | None = None,
    place: Place = on_one_device,
) -> Params:
    """Params in `dtype` from `path`/model.safetensors or its shards. Raises ModelLoadError."""
    files = _open_files(path)
    abstract = abstract_params(arch, jnp.dtype(dtype))
    tree = sources(arch, abstract)
    all_sources = jax.tree.leaves(tree, is_leaf=_is_source)
    chosen = {id(source): _choose(path, source, files) for source in all_sources}
    _check_unused(path, arch, files, {part.name for parts in chosen.values() for part in parts})
    total, loaded = tree_nbytes(abstract), 0

    def load(source: Source) -> jax.Array:
        nonlocal loaded
        # Waiting keeps host arrays from piling up behind a slow transfer. They must not be written again (see below).
        array = place(source.spec, _fill(source, chosen[id(source)], files)).block_until_ready()
        loaded += source.spec.nbytes
        if on_progress is not None:
            on_progress(loaded, total)
        return array

    return jax.tree.map(load, tree, is_leaf=_is_source)


def _is_source(node: Any) -> bool:
    return isinstance(node, Source)


def _fill(source: Source, parts: tuple[Part, ...], files: dict[str, SafetensorsFile]) -> np.ndarray:
    host = _empty_aligned(source.spec.nbytes).view(source.spec.dtype).reshape(source.spec.shape)
    for part in parts:
        # Assignment converts between float types without a whole converted copy.
        host[part.index] = files[part.name].tensor(part.name)
    return host


def _empty_aligned(num_bytes: int) -> np.ndarray:
    """Uninitialised bytes at an address that JAX's CPU device adopts instead of copying.

    A donated update of an adopted array copies it once; from then on updates are in place.
    """
    memory = np.empty(num_bytes + ADOPTED_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ADOPTED_ALIGNMENT
    return memory[start : start + num_bytes]


def _choose(path: Path, source: Source, files: dict[str, SafetensorsFile]) -> tuple[Part, ...]:
    """The alternative that the checkpoint spells, with all its tensors present and of the right shape."""
    parts = next(
        (parts for parts in source.alternatives if any(p.name in files for p in parts)),
        source.alternatives[0],
    )
    missing = [p.name for p in parts if p.name not in files]
    if missing:
        raise ModelLoadError(f"{path}: {len(missing)} tensors are missing: {_listed(missing)}")
    for part in parts:
        shape = files[part.name].entries[part.name].shape
        if shape != part.shape:
            raise ModelLoadError(
                f"{path}: tensor {part.name} has shape {shape}, config.json implies {part.shape}"
            )
    return parts


def _check_unused(path: Path, arch: Architecture, files: dict[str, SafetensorsFile], used: set[str]) -> None:
    unused = [name for name in files if name not in used and not is_ignorable(arch, name)]
    if unused:
        raise ModelLoadError(
            f"{path}: {len(unused)} tensors have no place in this architecture: {_listed(unused)}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:MAX_NAMES_SHOWN])
    return shown + (", ..." if len(names) > MAX_NAMES_SHOWN else "")


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    """The file that holds each tensor, by tensor name."""
    if not path.is_dir():
        raise ModelLoadError(f"{path}: no such folder")
    if (path / INDEX_FILE).is_file():
        return _open_shards(path)
    if (path / SINGLE_FILE).is_file():
        file = SafetensorsFile(path / SINGLE_FILE)
        return dict.fromkeys(file.entries, file)
    raise ModelLoadError(
        f"{path}: holds neither {SINGLE_FILE} nor {INDEX_FILE} (pickled weights are not read)"
    )


def _open_shards(path: Path) -> dict[str, SafetensorsFile]:
    weight_map = _read_index(path / INDEX_FILE)
    shards = {name: SafetensorsFile(path / name) for name in dict.fromkeys(weight_map.values())}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard].entries:
            raise ModelLoadError(f"{path / INDEX_FILE}: tensor {tensor[:120]} is not in {shard}")
    listed = {(tensor, shard) for tensor, shard in weight_map.items()}
    for shard, file in shards.items():
        extra = [tensor for tensor in file.entries if (tensor, shard) not in listed]
        if extra:
            raise ModelLoadError(
                f"{path / shard}: {len(extra)} tensors are not in the index: {_listed(extra)}"
            )
    return {tensor: shards[shard] for tensor, shard in weight_map.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ModelLoadError(f"{path}: larger than {MAX_INDEX_BYTES} bytes")
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {str(error)[:120]}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise ModelLoadError(
                f"{path}: shard {str(shard)[:80]!r} is not the name of a .safetensors file in the folder"
            )
    return weight_map


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not set(name) & {"/", "\\", "\0", ":"}
