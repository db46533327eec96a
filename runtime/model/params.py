"""Params: the weights as a pytree of dataclasses, and the same tree described before it exists.

Layers are unrolled, each with arrays of its own: scanning over stacked weights copies a layer's slice on a CPU.
Matrices keep the checkpoint's orientation [out, in]; products that read the same input are stacked along `out`.
Norm weights and the router stay in float32, because they are small and feed computations in float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from runtime.experts.weights import ExpertStore, MoEParams
from runtime.model.architecture import Architecture, FfnKind, LayerKind, QkNorm
from runtime.model.spec import ArraySpec, Place, map_specs, on_one_device, random_array

# Leaves are jax.Array in use, ArraySpec in the abstract tree, numpy arrays or shardings in between.
Leaf = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionParams:
    """w_qkv [(H + 2 K) * head_dim, D]: rows of q, then k, then v; w_o [D, H * head_dim].

    b_qkv, b_o: None without biases. q_norm, k_norm: None, [head_dim] each, or [H * head_dim] and [K * head_dim].
    """

    w_qkv: Leaf
    w_o: Leaf
    b_qkv: Leaf = None
    b_o: Leaf = None
    q_norm: Leaf = None
    k_norm: Leaf = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseParams:
    """w_gate_up [2 F, D]: rows of gate, then up; w_down [D, F]."""

    w_gate_up: Leaf
    w_down: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """attention_norm [D], ffn_norm [D]."""

    attention_norm: Leaf
    attention: AttentionParams
    ffn_norm: Leaf
    ffn: MoEParams | DenseParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """embedding [V, D], final_norm [D], unembedding [V, D] or None where the embedding serves for both.

    balance_weight: expert_balance_weight, a float32 number; None where one device holds all experts.
    """

    embedding: Leaf
    layers: tuple[LayerParams, ...]
    final_norm: Leaf
    unembedding: Leaf = None
    balance_weight: Leaf = None


@dataclass(frozen=True)
class ExpertSlots:
    """Expert parallelism's part of the shapes: devices that share the experts, and physical slots of all of them."""

    num_slots: int
    num_devices: int


@dataclass(frozen=True)
class ResidentSlots:
    """Part of the experts on the device, all in a store: slots of a layer, and experts that are fetched ahead for it."""

    num_slots: int
    num_staged: int = 0


def abstract_params(
    arch: Architecture, dtype: DTypeLike, slots: ExpertSlots | ResidentSlots | None = None
) -> Params:
    """Params of ArraySpec. ExpertSlots: weights by physical slot and a table of copies; ResidentSlots: slots and a store."""
    vocabulary = ArraySpec((arch.vocab_size, arch.hidden_size), jnp.dtype(dtype), ("vocab", "embed"))
    return Params(
        embedding=vocabulary,
        layers=tuple(_layer(arch, layer, jnp.dtype(dtype), slots) for layer in arch.layers),
        final_norm=_norm(arch.hidden_size, "embed"),
        unembedding=None if arch.tie_embeddings else _matrix(vocabulary.shape, dtype, vocabulary.axes),
        balance_weight=ArraySpec((), jnp.dtype(jnp.float32), (), "zeros")
        if isinstance(slots, ExpertSlots)
        else None,
    )


def with_copies(params: Params, layer: int, table: Leaf) -> Params:
    """The weights with a new table of copies in one layer; the same if that layer has no experts."""
    ffn = params.layers[layer].ffn
    if not isinstance(ffn, MoEParams):
        return params
    changed = replace(params.layers[layer], ffn=replace(ffn, copies=table))
    return replace(params, layers=(*params.layers[:layer], changed, *params.layers[layer + 1 :]))


def with_router_bias(params: Params, layer: int, bias: Leaf) -> Params:
    """The weights with another bias of one layer's router; the same if that layer has no experts."""
    ffn = params.layers[layer].ffn
    if not isinstance(ffn, MoEParams):
        return params
    changed = replace(params.layers[layer], ffn=replace(ffn, router_bias=bias))
    return replace(params, layers=(*params.layers[:layer], changed, *params.layers[layer + 1 :]))


def with_slots(params: Params, layer: int, table: Leaf) -> Params:
    """The weights with a new table of slots in one layer, which must have a store."""
    ffn = params.layers[layer].ffn
    assert isinstance(ffn, MoEParams)
    store = replace(ffn.store, slot_of_expert=table)
    changed = replace(params.layers[layer], ffn=replace(ffn, store=store))
    return replace(params, layers=(*params.layers[:layer], changed, *params.layers[layer + 1 :]))


def has_store(params: Params) -> bool:
    """Whether part of the experts may be asleep."""
    return any(isinstance(layer.ffn, MoEParams) and layer.ffn.store is not None for layer in params.layers)


def init_params(arch: Architecture, dtype: DTypeLike, seed: int, place: Place = on_one_device) -> Params:
    """Seeded dummy weights, scaled so that activations keep their size through the layers."""
    rng = np.random.default_rng(seed)
    return map_specs(lambda spec: random_array(spec, rng, place), abstract_params(arch, dtype))


def _layer(
    arch: Architecture, layer: LayerKind, dtype: Any, slots: ExpertSlots | ResidentSlots | None
) -> LayerParams:
    d = arch.hidden_size
    return LayerParams(
        attention_norm=_norm(d, "embed"),
        attention=_attention(arch, dtype),
        ffn_norm=_norm(d, "embed"),
        ffn=_moe(arch, dtype, slots) if layer.ffn is FfnKind.SPARSE else _dense(arch, dtype),
    )


def _attention(arch: Architecture, dtype: Any) -> AttentionParams:
    d, qkv_size = arch.hidden_size, arch.q_size + 2 * arch.kv_size
    q_norm, k_norm = {
        QkNorm.NONE: (None, None),
        QkNorm.PER_HEAD: (_norm(arch.head_dim, "head_dim"), _norm(arch.head_dim, "head_dim")),
        QkNorm.FULL: (_norm(arch.q_size, "heads"), _norm(arch.kv_size, "heads")),
    }[arch.qk_norm]
    return AttentionParams(
        w_qkv=_matrix((qkv_size, d), dtype, ("qkv", "embed")),
        w_o=_matrix((d, arch.q_size), dtype, ("embed", "heads")),
        b_qkv=ArraySpec((qkv_size,), dtype, ("qkv",), "zeros") if arch.attention_bias else None,
        b_o=ArraySpec((d,), dtype, ("embed",), "zeros") if arch.attention_bias else None,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _moe(arch: Architecture, dtype: Any, slots: ExpertSlots | ResidentSlots | None) -> MoEParams:
    e, d, f = arch.num_experts, arch.hidden_size, arch.expert_ffn
    p = slots.num_slots if slots else e
    table = (
        ArraySpec((e, slots.num_devices), jnp.dtype(jnp.int32), ("experts", "device"), "zeros")
        if isinstance(slots, ExpertSlots)
        else None
    )
    store = _store(arch, dtype, slots.num_staged) if isinstance(slots, ResidentSlots) else None
    return MoEParams(
        router=_matrix((e, d), jnp.float32, ("expert_logits", "embed")),
        w_gate_up=_matrix((p, 2 * f, d), dtype, ("expert", "gate_up", "embed")),
        w_down=_matrix((p, d, f), dtype, ("expert", "embed", "ffn")),
        copies=table,
        router_bias=ArraySpec((e,), jnp.dtype(jnp.float32), ("expert_logits",), "zeros")
        if arch.has_router_bias
        or isinstance(
            slots, ExpertSlots
        )  # on several devices always: it may come to lean, and nothing compiles then
        else None,
        store=store,
    )


def _store(arch: Architecture, dtype: Any, num_staged: int) -> ExpertStore:
    e, d, f = arch.num_experts, arch.hidden_size, arch.expert_ffn
    gate_up = _matrix((e, 2 * f, d), dtype, ("expert", "gate_up", "embed"))
    down = _matrix((e, d, f), dtype, ("expert", "embed", "ffn"))
    table = ArraySpec((e,), jnp.dtype(jnp.int32), ("expert",), "zeros")
    return ExpertStore(
        replace(gate_up, in_host_memory=True), replace(down, in_host_memory=True), table, num_staged
    )


def _dense(arch: Architecture, dtype: Any) -> DenseParams:
    d, f = arch.hidden_size, arch.dense_ffn
    return DenseParams(
        w_gate_up=_matrix((2 * f, d), dtype, ("gate_up", "embed")),
        w_down=_matrix((d, f), dtype, ("embed", "ffn")),
    )


def _matrix(shape: tuple[int, ...], dtype: DTypeLike, axes: tuple[str, ...]) -> ArraySpec:
    """A product's weight: unit variance in gives unit variance out."""
    return ArraySpec(shape, jnp.dtype(dtype), axes, "normal", shape[-1] ** -0.5)


def _norm(size: int, axis: str) -> ArraySpec:
    return ArraySpec((size,), jnp.dtype(jnp.float32), (axis,), "ones")
