"""Which tensors of a Hugging Face checkpoint make up each array of Params, and where in it each one goes.

A checkpoint may spell a part in several ways (experts one by one, or fused into one tensor): an array has alternatives,
and the first whose tensors are present is taken.
"""

from dataclasses import dataclass
from typing import Any

from runtime.experts.weights import MoEParams
from runtime.model.architecture import Architecture, ExpertNames, QkNorm
from runtime.model.params import AttentionParams, DenseParams, LayerParams, Params
from runtime.model.spec import ArraySpec


@dataclass(frozen=True)
class Part:
    """The tensor `name` of shape `shape` fills `array[index]`."""

    name: str
    shape: tuple[int, ...]
    index: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Source:
    """An array and the ways to fill it; each alternative covers it exactly."""

    spec: ArraySpec
    alternatives: tuple[tuple[Part, ...], ...]


def sources(arch: Architecture, abstract: Params) -> Params:
    """`abstract` (Params of ArraySpec) with every spec replaced by its Source."""
    return Params(
        embedding=_whole(abstract.embedding, "model.embed_tokens.weight"),
        layers=tuple(_layer(arch, layer, f"model.layers.{i}") for i, layer in enumerate(abstract.layers)),
        final_norm=_whole(abstract.final_norm, "model.norm.weight"),
        unembedding=None if abstract.unembedding is None else _whole(abstract.unembedding, "lm_head.weight"),
    )


def is_ignorable(arch: Architecture, name: str) -> bool:
    """Whether a tensor that no array uses may be present: a second copy of a tied head, or derived frequencies."""
    return (arch.tie_embeddings and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")


def _layer(arch: Architecture, layer: LayerParams, prefix: str) -> LayerParams:
    ffn = layer.ffn
    return LayerParams(
        attention_norm=_whole(layer.attention_norm, f"{prefix}.input_layernorm.weight"),
        attention=_attention(arch, layer.attention, f"{prefix}.self_attn"),
        ffn_norm=_whole(layer.ffn_norm, f"{prefix}.post_attention_layernorm.weight"),
        ffn=_moe(arch, ffn, prefix) if isinstance(ffn, MoEParams) else _dense(arch, ffn, f"{prefix}.mlp"),
    )


def _attention(arch: Architecture, attention: AttentionParams, prefix: str) -> AttentionParams:
    sizes = {"q_proj": arch.q_size, "k_proj": arch.kv_size, "v_proj": arch.kv_size}
    has_norm = arch.qk_norm is not QkNorm.NONE
    return AttentionParams(
        w_qkv=Source(attention.w_qkv, (_stacked(prefix, "weight", sizes, (arch.hidden_size,)),)),
        w_o=_whole(attention.w_o, f"{prefix}.o_proj.weight"),
        b_qkv=Source(attention.b_qkv, (_stacked(prefix, "bias", sizes, ()),))
        if arch.attention_bias
        else None,
        b_o=_whole(attention.b_o, f"{prefix}.o_proj.bias") if arch.attention_bias else None,
        q_norm=_whole(attention.q_norm, f"{prefix}.q_norm.weight") if has_norm else None,
        k_norm=_whole(attention.k_norm, f"{prefix}.k_norm.weight") if has_norm else None,
    )


def _moe(arch: Architecture, moe: MoEParams, prefix: str) -> MoEParams:
    e, d, f = arch.num_experts, arch.hidden_size, arch.expert_ffn
    if arch.expert_names is ExpertNames.MIXTRAL:
        block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    else:
        block, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    experts = f"{prefix}.{block}.experts"
    gate_up = tuple(
        part
        for i in range(e)
        for part in (
            Part(f"{experts}.{i}.{gate}.weight", (f, d), (i, slice(0, f))),
            Part(f"{experts}.{i}.{up}.weight", (f, d), (i, slice(f, 2 * f))),
        )
    )
    downs = tuple(Part(f"{experts}.{i}.{down}.weight", (d, f), (i,)) for i in range(e))
    blocks = dict.fromkeys((block, "mlp"))  # fused checkpoints say mlp in every family
    fused_gate_up = ((Part(f"{prefix}.{b}.experts.gate_up_proj", moe.w_gate_up.shape),) for b in blocks)
    fused_down = ((Part(f"{prefix}.{b}.experts.down_proj", moe.w_down.shape),) for b in blocks)
    return MoEParams(
        router=Source(
            moe.router, tuple((Part(f"{prefix}.{b}.gate.weight", moe.router.shape),) for b in blocks)
        ),
        w_gate_up=Source(moe.w_gate_up, (gate_up, *fused_gate_up)),
        w_down=Source(moe.w_down, (downs, *fused_down)),
    )


def _dense(arch: Architecture, dense: DenseParams, prefix: str) -> DenseParams:
    sizes = {"gate_proj": arch.dense_ffn, "up_proj": arch.dense_ffn}
    return DenseParams(
        w_gate_up=Source(dense.w_gate_up, (_stacked(prefix, "weight", sizes, (arch.hidden_size,)),)),
        w_down=_whole(dense.w_down, f"{prefix}.down_proj.weight"),
    )


def _whole(spec: ArraySpec, name: str) -> Source:
    return Source(spec, ((Part(name, spec.shape),),))


def _stacked(prefix: str, suffix: str, sizes: dict[str, int], tail: tuple[int, ...]) -> tuple[Part, ...]:
    parts, start = [], 0
    for name, size in sizes.items():
        parts.append(Part(f"{prefix}.{name}.{suffix}", (size, *tail), (slice(start, start + size),)))
        start += size
    return tuple(parts)
