"""Loads for the experts' benchmark: recorded routing of a trained model, and synthetic Zipf loads.

The recorded routing comes as token counts of steps of 128 tokens, an excerpt that is small enough to be carried along
(`data/README.md` says from where); `--routing DIR` reads the token-wise files instead and must give the same counts.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STEP_TOKENS = 128
WINDOW_TOKENS = 1024
TASKS = ("intent", "translation", "summary")
NUM_RECORDED_EXPERTS = 64
EXCERPT = Path(__file__).parent / "data" / "esft_step_counts.npz"

SYNTHETIC_LAYERS = 58
SYNTHETIC_EXPERTS = 256
SYNTHETIC_TOP_K = 8
SYNTHETIC_WINDOW_TOKENS = 16384
SYNTHETIC_STEP_TOKENS = 4096
ZIPF = 0.8


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """steps: int64 [tasks][steps, L, E], tokens of each expert in consecutive steps of 128 tokens of one task."""

    steps: dict[str, np.ndarray]

    @property
    def num_layers(self) -> int:
        return next(iter(self.steps.values())).shape[1]

    def windows(self) -> list[tuple[str, np.ndarray]]:
        """(task, steps [8, L, E]) of each window of 1,024 tokens, task after task; a task's last part window is left out."""
        width = WINDOW_TOKENS // STEP_TOKENS
        return [
            (task, steps[first : first + width])
            for task, steps in self.steps.items()
            for first in range(0, len(steps) - width + 1, width)
        ]


def read_recorded(routing: Path | None) -> RecordedLoads:
    """From the folder of `esft_routing_TASK.npz`, or the excerpt. ValueError or OSError for what is not that."""
    if routing is None:
        with np.load(EXCERPT, allow_pickle=False) as file:
            return RecordedLoads({task: file[task].astype(np.int64) for task in TASKS})
    return RecordedLoads({task: _count_steps(routing / f"esft_routing_{task}.npz") for task in TASKS})


def zipf_rates(rng: np.random.Generator) -> np.ndarray:
    """float64 [L, E]: Zipf shares, permuted anew for every layer; each layer adds up to one."""
    shares = np.arange(1, SYNTHETIC_EXPERTS + 1) ** -ZIPF
    shares /= shares.sum()
    return np.stack([shares[rng.permutation(SYNTHETIC_EXPERTS)] for _ in range(SYNTHETIC_LAYERS)])


def shifted(rng: np.random.Generator, rates: np.ndarray, part: float) -> np.ndarray:
    """Rates after that part of each layer's experts, chosen at random, has taken over each other's hotness in a ring."""
    rates = rates.copy()
    num_changed = round(part * rates.shape[1])
    for layer in rates:
        changed = rng.choice(rates.shape[1], num_changed, replace=False)
        layer[changed] = np.roll(layer[changed], 1)
    return rates


def draw(rng: np.random.Generator, rates: np.ndarray, num_tokens: int) -> np.ndarray:
    """int64 [L, E]: counts of that many tokens, eight experts each, drawn independently of each other."""
    return rng.multinomial(num_tokens * SYNTHETIC_TOP_K, rates)


def read_ids(path: Path) -> np.ndarray:
    """uint8 [tokens, L, k]: the experts of each token, from a token-wise file. Raises ValueError for what is not that."""
    with np.load(path, allow_pickle=False) as file:
        if "expert_ids" not in file.files:
            raise ValueError(f"{path.name} holds {file.files}, not expert_ids")
        ids = file["expert_ids"]
    if ids.ndim != 3 or ids.dtype != np.uint8 or not 0 < ids.size < 10**9:
        raise ValueError(
            f"{path.name}: expert_ids must be uint8 [tokens, layers, k], not {ids.dtype} {list(ids.shape)}"
        )
    if ids.max() >= NUM_RECORDED_EXPERTS or len(ids) < 2 * WINDOW_TOKENS:
        raise ValueError(
            f"{path.name}: needs {2 * WINDOW_TOKENS} tokens or more and experts below {NUM_RECORDED_EXPERTS}, "
            f"not {len(ids)} tokens and expert {ids.max()}"
        )
    return ids


def _count_steps(path: Path) -> np.ndarray:
    ids = read_ids(path)
    num_steps, num_layers = len(ids) // STEP_TOKENS, ids.shape[1]
    steps = ids[: num_steps * STEP_TOKENS].astype(np.int64).reshape(num_steps, STEP_TOKENS, num_layers, -1)
    place = np.arange(num_steps)[:, None, None, None] * num_layers + np.arange(num_layers)[:, None]
    keys = steps + NUM_RECORDED_EXPERTS * place
    counts = np.bincount(keys.ravel(), minlength=num_steps * num_layers * NUM_RECORDED_EXPERTS)
    return counts.reshape(num_steps, num_layers, NUM_RECORDED_EXPERTS)


def add_routing_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--routing", type=Path, metavar="DIR", help="folder with esft_routing_TASK.npz; default: an excerpt"
    )
