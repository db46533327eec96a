"""A small engine, driven in the test's own thread: the loop without its thread. Random weights, or a checkpoint."""

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runtime.config import parse_config
from runtime.engine.build import load_engine
from runtime.engine.engine import CollectedStep, InFlightStep
from runtime.engine.start_checks import context_limit
from runtime.model.architecture import from_hf_config, load_architecture
from runtime.request import Request, SamplingParams
from runtime.schedule.sequence import Sequence

TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


class EngineDriver:
    """Runs requests to their end; `depth` launches are in flight, as in the loop."""

    def __init__(
        self,
        depth: int = 2,
        eos_ids: tuple[int, ...] = (),
        folder: Path | None = None,
        arch: dict[str, Any] = TINY,
        **sections: Any,
    ) -> None:
        sections = {"ladder": {}, "model": {}, "kv_cache": {}} | sections
        sections["model"] = {"load_format": "auto" if folder else "dummy", "dtype": "fp32"} | sections[
            "model"
        ]
        sections["kv_cache"] = {"kv_cache_size": "4MiB", "page_size": 4} | sections["kv_cache"]
        small = {"decode_rows": [1, 4], "prefill_tokens": [16, 64], "cache_dir": "off", "max_decode_steps": 4}
        sections["ladder"] = small | sections["ladder"]
        config = parse_config(sections)
        found = load_architecture(folder) if folder else from_hf_config(arch)
        loaded = load_engine(config, folder or Path(), found, eos_ids, context_limit(config, found))
        self.engine, self.scheduler, self.mover = loaded.engine, loaded.scheduler, loaded.mover
        self.residency, self.config = loaded.residency, config
        self.engine.set_max_decode_steps(config.ladder.max_decode_steps)
        self.compile_all()
        self.depth = depth
        self.step_s: Callable[[InFlightStep], float] = lambda step: (
            1.0
        )  # what the judge of its two forms is told
        self.in_flight: deque[InFlightStep] = deque()
        self.steps: list[tuple[InFlightStep, CollectedStep]] = []

    def compile_all(self) -> None:
        self.engine.compiler.wait_settled()
        while not self.engine.adopt_ready_rungs():
            pass
        assert not self.engine.compiler.first_error

    def turn(self) -> None:
        """One turn of the loop."""
        plan = self.scheduler.schedule() if len(self.in_flight) < self.depth else None
        if plan is not None:
            self.in_flight.append(self.engine.launch(plan, {}))
        if self.in_flight and (plan is None or len(self.in_flight) == self.depth):
            step = self.in_flight.popleft()
            collected = self.engine.collect(step)
            self.scheduler.collect(step.plan, collected.result)
            self.engine.forms.read(step, collected, self.step_s(step))
            self.steps.append((step, collected))

    def run(self, requests: Iterable[Request]) -> list[list[int]]:
        """Output ids of each request, all submitted at once."""
        sequences: list[Sequence] = [self.scheduler.add(r) for r in requests]
        for _ in range(5000):
            if self.scheduler.is_idle:
                self.scheduler.check_integrity()
                return [s.output_ids for s in sequences]
            self.turn()
        raise AssertionError("the scheduler makes no progress")

    def close(self) -> None:
        self.engine.shutdown()


def request(name: str, prompt: Iterable[int], **params: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params)))
