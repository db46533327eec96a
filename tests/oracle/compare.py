"""Compares this project's model with what transformers computed: every folder that make_fixtures.py wrote into DIR.

    python tests/oracle/compare.py DIR

Prints a line a model and exits with 1 if any disagrees. Greedy text must be equal as far as transformers' own choice is
clear: behind a near tie, rounding decides and texts may part.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.runtime.model.builders import Chunk, Runner

MAX_ERROR = 2e-4
MIN_MARGIN = 1e-3
NUM_GREEDY = 24


@dataclass(frozen=True)
class Comparison:
    """Largest absolute logit error over three prompts, largest logit, greedy tokens that were clear and that agree."""

    error: float
    scale: float
    num_clear: int
    num_same: int

    @property
    def agrees(self) -> bool:
        return self.error <= MAX_ERROR * max(1.0, self.scale) and self.num_same == self.num_clear


def main() -> int:
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/expected.npz"))
    num_agree = 0
    for folder in folders:
        got = compare(folder)
        num_agree += got.agrees
        print(
            f"{folder.name}: largest error {got.error:.1e} of logits up to {got.scale:.1f}, "
            f"greedy {got.num_same}/{got.num_clear}{'' if got.agrees else '  DISAGREES'}",
            flush=True,
        )
        jax.clear_caches()  # every model is a shape of its own
    print(f"{num_agree} of {len(folders)} models agree")
    return int(num_agree < len(folders) or not folders)


def compare(folder: Path) -> Comparison:
    data = np.load(folder / "expected.npz", allow_pickle=False)
    runner = Runner.load(folder, page_size=16, num_pages=40)
    prompts, expected, greedy, margins = (
        [data[f"{key}_{i}"] for i in range(3)] for key in ("prompt", "logits", "greedy", "margin")
    )
    prompts = [p.tolist() for p in prompts]
    logits, _ = runner.prefill([Chunk(p, runner.pages(1 + 12 * i, len(p))) for i, p in enumerate(prompts)])
    num_clear = num_same = 0
    for ours, theirs, margin in zip(runner.greedy(prompts, NUM_GREEDY), greedy, margins, strict=True):
        is_close = margin[:NUM_GREEDY] < MIN_MARGIN
        clear = int(is_close.argmax()) if is_close.any() else NUM_GREEDY
        num_clear += clear
        num_same += int(np.sum(np.array(ours[:clear]) == theirs[:clear]))
    return Comparison(
        error=max(float(np.abs(a[-len(b) :] - b).max()) for a, b in zip(logits, expected, strict=True)),
        scale=max(float(np.abs(e).max()) for e in expected),
        num_clear=num_clear,
        num_same=num_same,
    )


if __name__ == "__main__":
    sys.exit(main())
