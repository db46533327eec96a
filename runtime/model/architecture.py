"""Architecture: what a Hugging Face config.json says about a model, as plain data. Imports no JAX.

One forward pass serves every family; what differs between them is a field here, never a subclass. A setting known to
change the formulas in a way that the forward pass does not know is refused by name (`NEUTRAL`), because serving it
anyway would give wrong text without a sign.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pallas_kernels.router.spec import RouterSpec
from runtime.errors import ModelLoadError
from runtime.model.rope import RopeSpec, rope_from_config

MAX_CONFIG_BYTES = 1 << 20
MAX_DIMENSION = 1 << 24  # no integer of a real config is larger; larger ones would only exhaust memory
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Settings of other models that change the formulas and leave no trace in the tensors, with the value that changes nothing.
NEUTRAL: dict[str, Any] = {
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "partial_rotary_factor": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "swiglu_limit": None,
}


class FfnKind(StrEnum):
    DENSE = "dense"
    SPARSE = "sparse"


class QkNorm(StrEnum):
    """Where queries and keys are normalised: nowhere, each head by itself, or the whole projection at once."""

    NONE = "none"
    PER_HEAD = "per_head"
    FULL = "full"


class RouterKind(StrEnum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class NormPlacement(StrEnum):
    """Where the norms of a layer sit. `pre`: before attention and before the FFN, on the residual's branch."""

    PRE = "pre"


class ExpertNames(StrEnum):
    """How a checkpoint spells the parts of a sparse layer."""

    MLP = "mlp"  # mlp.experts.E.{gate,up,down}_proj
    MIXTRAL = "mixtral"  # block_sparse_moe.experts.E.{w1,w3,w2}


@dataclass(frozen=True)
class LayerKind:
    """What distinguishes one layer from another. `sliding_window` counts the token itself; None: no limit."""

    ffn: FfnKind
    sliding_window: int | None = None


@dataclass(frozen=True)
class Architecture:
    """Everything that fixes shapes and formulas. Hashable, so that it can be a static argument of a compiled step."""

    family: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_embeddings: bool
    rope: RopeSpec
    layers: tuple[LayerKind, ...]
    activation: str
    dense_ffn: int
    num_experts: int
    top_k: int
    expert_ffn: int
    norm_topk_prob: bool
    router: RouterKind = RouterKind.SOFTMAX
    has_router_bias: bool = False  # a correction for each expert that steers the choice only
    router_groups: int = 1
    kept_router_groups: int = 1
    router_scale: float = 1.0
    qk_norm: QkNorm = QkNorm.NONE
    norm_placement: NormPlacement = NormPlacement.PRE
    clip_qkv: float | None = None
    attention_bias: bool = False
    expert_names: ExpertNames = ExpertNames.MLP
    eos_token_ids: tuple[int, ...] = ()

    @property
    def routing(self) -> RouterSpec:
        """What the router op is told."""
        return RouterSpec(
            self.top_k,
            self.router.value,
            renormalise=self.norm_topk_prob,
            num_groups=self.router_groups,
            num_kept_groups=self.kept_router_groups,
            scale=self.router_scale,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Weights of the matrices, each counted once; norms and biases are too few to matter."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        ffn = {
            FfnKind.DENSE: 3 * self.hidden_size * self.dense_ffn,
            FfnKind.SPARSE: self.num_experts * self.hidden_size * (3 * self.expert_ffn + 1),
        }
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + sum(attention + ffn[layer.ffn] for layer in self.layers)


def load_architecture(path: Path) -> Architecture:
    """Architecture of a model folder; end-of-text ids of generation_config.json join those of config.json."""
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    if generation.is_file():
        ids = (
            *_token_ids(config.get("eos_token_id")),
            *_token_ids(_read_json(generation).get("eos_token_id")),
        )
        config = {**config, "eos_token_id": list(dict.fromkeys(ids))}
    return from_hf_config(config)


def from_hf_config(config: dict[str, Any]) -> Architecture:
    """Architecture from the content of config.json. Raises ModelLoadError naming the field, its value and what is allowed."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelLoadError(
            f"config.json: architectures is {_shown(names)}; supported: {', '.join(FAMILIES)}"
        )
    for field in ("quantization_config", "compression_config"):
        if config.get(field):
            raise ModelLoadError(f"config.json: {field} is set; only bf16, f16 and f32 weights are supported")
    for field, neutral in NEUTRAL.items():
        if config.get(field) not in (None, False, neutral):
            raise _refused(field, config[field], f"{neutral} or absent")
    for kind in config.get("layer_types") or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise _refused("layer_types", kind, "full_attention, sliding_attention")
    arch = family(_Fields(config))
    _check_shapes(arch)
    return arch


def _qwen3_moe(fields: "_Fields") -> Architecture:
    num_layers = fields.integer("num_hidden_layers")
    num_experts = fields.integer("num_experts", "num_local_experts", default=128)
    mlp_only = fields.integers("mlp_only_layers")
    sparse_step = fields.integer("decoder_sparse_step", default=1)
    window = fields.window() if fields.flag("use_sliding_window", default=False) else None
    is_sparse = [i not in mlp_only and (i + 1) % sparse_step == 0 for i in range(num_layers)]
    return fields.architecture(
        family="qwen3_moe",
        layers=tuple(LayerKind(FfnKind.SPARSE if s else FfnKind.DENSE, window) for s in is_sparse),
        dense_ffn=fields.integer("intermediate_size") if not all(is_sparse) else 0,
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", default=8),
        expert_ffn=fields.integer("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
        qk_norm=QkNorm.PER_HEAD,
        attention_bias=fields.flag("attention_bias", default=False),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
    )


def _mixtral(fields: "_Fields") -> Architecture:
    window = fields.window()
    return fields.architecture(
        family="mixtral",
        layers=(LayerKind(FfnKind.SPARSE, window),) * fields.integer("num_hidden_layers"),
        num_experts=fields.integer("num_local_experts", "num_experts", default=8),
        top_k=fields.integer("num_experts_per_tok", default=2),
        expert_ffn=fields.integer("intermediate_size"),
        norm_topk_prob=True,
        default_theta=1e6,
        expert_names=ExpertNames.MIXTRAL,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-5),
    )


def _olmoe(fields: "_Fields") -> Architecture:
    return fields.architecture(
        family="olmoe",
        layers=(LayerKind(FfnKind.SPARSE),) * fields.integer("num_hidden_layers"),
        num_experts=fields.integer("num_experts", "num_local_experts", default=64),
        top_k=fields.integer("num_experts_per_tok", default=8),
        expert_ffn=fields.integer("intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
        qk_norm=QkNorm.FULL,
        clip_qkv=fields.number("clip_qkv") if fields.get("clip_qkv") is not None else None,
        attention_bias=fields.flag("attention_bias", default=False),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-5),
    )


FAMILIES: dict[str, Callable[["_Fields"], Architecture]] = {
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
}


class _Fields:
    """Typed, bounded reading of config.json; every complaint names the field, its value and what is allowed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def get(self, *names: str) -> Any:
        """The first of the spellings that is present and not null."""
        return next((self._config[n] for n in names if self._config.get(n) is not None), None)

    def integer(self, *names: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_DIMENSION:
            raise _refused(names[0], value, f"an integer from {low} to {MAX_DIMENSION}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            raise _refused(name, value, "a list of layer numbers")
        return tuple(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise _refused(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise _refused(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: dict[str, str], default: str) -> str:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise _refused(name, value, f"one of {', '.join(allowed)}")
        return allowed[value]

    def window(self) -> int | None:
        return self.integer("sliding_window") if self.get("sliding_window") is not None else None

    def architecture(
        self, *, default_theta: float = 1e4, dense_ffn: int = 0, **by_family: Any
    ) -> Architecture:
        """The fields that all families spell alike, joined with the family's own."""
        hidden_size, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if self.get("head_dim") is None and hidden_size % num_heads:
            raise _refused(
                "num_attention_heads",
                num_heads,
                f"a divisor of hidden_size {hidden_size} where head_dim is absent",
            )
        head_dim = self.integer("head_dim", default=hidden_size // num_heads)
        max_positions = self.integer("max_position_embeddings")
        return Architecture(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=self.integer("num_key_value_heads", default=num_heads),
            head_dim=head_dim,
            vocab_size=self.integer("vocab_size"),
            max_position_embeddings=max_positions,
            tie_embeddings=self.flag("tie_word_embeddings", default=False),
            rope=rope_from_config(self._config, head_dim, max_positions, default_theta),
            activation=self.choice("hidden_act", ACTIVATIONS, default="silu"),
            eos_token_ids=_token_ids(self.get("eos_token_id")),
            dense_ffn=dense_ffn,
            **by_family,
        )


def _check_shapes(arch: Architecture) -> None:
    if arch.num_heads % arch.num_kv_heads:
        raise _refused(
            "num_key_value_heads", arch.num_kv_heads, f"a divisor of num_attention_heads {arch.num_heads}"
        )
    if any(layer.ffn is FfnKind.SPARSE for layer in arch.layers) and arch.top_k > arch.num_experts:
        raise _refused(
            "num_experts_per_tok", arch.top_k, f"at most the number of experts, {arch.num_experts}"
        )
    if arch.num_layers > 4096:
        raise _refused("num_hidden_layers", arch.num_layers, "at most 4096")


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise _refused("eos_token_id", value, "a token id, a list of them or null")
    return tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _refused(field: str, value: Any, allowed: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {field} is {_shown(value)}; allowed: {allowed}", param=field)


def _shown(value: Any) -> str:
    return repr(value)[:80]
