"""Train the embedded demo model on a CPU and write it in Hugging Face layout.

    python benchmarks/train_demo.py --work-dir SCRATCH --minutes 80 --output runtime/assets/demo-moe

Fetches the text (`demo_corpus.py`: needs apt-get, dpkg-deb and pip), trains a tokenizer, then the model (`demo_model.py`) for a
span of wall-clock time: the learning rate follows the share of the span that has passed, so the run always ends annealed,
however fast the machine is. Time in which the process was stopped does not count. A run that was interrupted resumes from the
last checkpoint in the work folder. At the end the model is written (`demo_export.py`) and measured (`demo_evaluate.py`).
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import demo_corpus
import demo_evaluate
import demo_export
import demo_readme
import demo_tokenizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_model import Model, ModelConfig, loss_of
from optax import contrib
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

MIXTURE = {
    "austen": 0.53,
    "chat": 0.24,
    "shakespeare": 0.15,
    "wordnet": 0.08,
}  # share of the training windows
BALANCE_WEIGHT = 0.005  # small: experts should specialise, the skew is wanted
PEAK_LEARNING_RATE = 3e-3
LONGEST_GAP = 5.0  # seconds between steps beyond which the process must have been stopped


@dataclass
class Clock:
    """Which share of the span has passed; stops while the process is stopped, but never runs past `deadline`."""

    minutes: float
    deadline: float
    elapsed: float = 0.0
    last: float | None = None
    usual: float = 0.0

    def tick(self) -> float:
        now = time.monotonic()
        if self.last is not None:
            gap = now - self.last
            is_stopped = self.usual > 0 and gap > max(LONGEST_GAP, 4 * self.usual)
            self.elapsed += self.usual if is_stopped else gap
            self.usual = (
                gap if self.usual == 0 else self.usual + (0 if is_stopped else 0.1 * (gap - self.usual))
            )
        self.last = now
        left = max(0.0, min(60 * self.minutes - self.elapsed, self.deadline - time.time()))
        return self.elapsed / (self.elapsed + left) if self.elapsed else 0.0


def window_shape(progress: float, step: int) -> tuple[int, int]:
    """(rows, tokens): short windows first, they are the cheapest; some as long as the model's context near the end."""
    if progress < 0.7:
        return 24, 256
    if progress > 0.88 and step % 4 == 0:
        return 3, 2048
    return 12, 512


def learning_rate(progress: float) -> float:
    warm = min(1.0, progress / 0.015)
    return PEAK_LEARNING_RATE * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer() -> optax.GradientTransformation:
    """Muon for the matrices (each expert is one), Adam for embedding, routers and norms."""

    def dimensions(params: optax.Params) -> optax.Params:
        def of_leaf(path: tuple, leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
            is_matrix = path[-1].key not in ("embed_tokens", "router", "weight")
            return contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if is_matrix else None

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    def build(rate: float) -> optax.GradientTransformation:
        muon = contrib.muon(
            rate,
            weight_decay=0.1,
            adam_b2=0.98,
            muon_weight_dimension_numbers=dimensions,
            consistent_rms=0.2,
        )
        return optax.chain(optax.clip_by_global_norm(1.0), muon)

    return optax.inject_hyperparams(build)(rate=0.0)


def windows(streams: dict[str, np.ndarray], seed: int, rows: int, length: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    picked = rng.choice(list(MIXTURE), rows, p=list(MIXTURE.values()))
    starts = [rng.integers(len(streams[source]) - length - 1) for source in picked]
    return np.stack([streams[s][i : i + length + 1] for s, i in zip(picked, starts, strict=True)])


def save_state(path: Path, state: object, meta: dict[str, str]) -> None:
    leaves = {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    save_file(leaves, path.with_suffix(".new"), metadata=meta)
    path.with_suffix(".new").replace(path)
    path.with_suffix(".json").write_text(json.dumps(meta))


def load_state(path: Path, template: tuple) -> tuple[tuple, dict[str, str]]:
    leaves = load_file(path)
    restored = [jnp.asarray(leaves[name]) for name in sorted(leaves)]
    return jax.tree.unflatten(jax.tree.structure(template), restored), json.loads(
        path.with_suffix(".json").read_text()
    )


def train(
    args: argparse.Namespace, streams: dict[str, np.ndarray]
) -> Iterator[tuple[dict, dict[str, float]]]:
    """Yield (params, figures so far) at each checkpoint, the last one at the end."""
    model = Model(ModelConfig(), capacity_factor=1.5)
    params = jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, 8), jnp.int32))["params"]
    optimizer = make_optimizer()
    state = (params, optimizer.init(params))
    clock = Clock(args.minutes, args.deadline or math.inf)
    step, num_tokens = 0, 0
    checkpoint = args.work_dir / "checkpoint.safetensors"
    if checkpoint.exists():
        state, meta = load_state(checkpoint, state)
        step, num_tokens, clock.elapsed = int(meta["step"]), int(meta["num_tokens"]), float(meta["elapsed"])
        print(f"resumed at step {step}, {clock.elapsed / 60:.1f} minutes", flush=True)

    @jax.jit
    def update(
        state: tuple, tokens: jax.Array, rate: jax.Array
    ) -> tuple[tuple, jax.Array, jax.Array, jax.Array]:
        params, opt_state = state

        def objective(params: dict) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            loss, balance, load = loss_of(model, params, tokens)
            return loss + BALANCE_WEIGHT * balance, (loss, load)

        gradients, (loss, load) = jax.grad(objective, has_aux=True)(params)
        opt_state.hyperparams["rate"] = rate
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        norm = optax.global_norm(gradients)
        return (optax.apply_updates(params, updates), opt_state), loss, load, norm

    last_saved, losses = clock.elapsed, []
    while (progress := clock.tick()) < 1.0:
        rows, length = window_shape(progress, step)
        tokens = windows(streams, args.seed * 1_000_003 + step, rows, length)
        state, loss, load, norm = update(state, tokens, jnp.float32(learning_rate(progress)))
        losses.append(float(loss))
        step, num_tokens = step + 1, num_tokens + rows * length
        if step % 20 == 0:
            skew = ", ".join(f"{x:.1f}" for x in np.asarray(load).max(1) * load.shape[1])
            print(
                f"step {step} {clock.elapsed / 60:.1f} min {progress:.3f} loss {np.mean(losses[-20:]):.3f} "
                f"norm {float(norm):.2f} tokens {num_tokens / 1e6:.2f}M max/mean load {skew}",
                flush=True,
            )
        if clock.elapsed - last_saved > 60 * args.checkpoint_minutes:
            figures = {"step": step, "num_tokens": num_tokens, "elapsed": clock.elapsed}
            save_state(checkpoint, state, {key: str(value) for key, value in figures.items()})
            last_saved = clock.elapsed
            yield state[0], figures
    figures = {"step": step, "num_tokens": num_tokens, "elapsed": clock.elapsed}
    save_state(checkpoint, state, {key: str(value) for key, value in figures.items()})
    yield state[0], figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", type=Path, required=True, help="scratch folder: corpora, checkpoints")
    parser.add_argument(
        "--output", type=Path, default=Path("runtime/assets/demo-moe"), help="model folder to write"
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/demo_moe.json"))
    parser.add_argument("--minutes", type=float, default=80, help="training time, stops excluded")
    parser.add_argument(
        "--deadline", type=float, help="Unix time by which training must be over, stops included"
    )
    parser.add_argument("--checkpoint-minutes", type=float, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-training", action="store_true", help="write and measure the last checkpoint")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    corpus = demo_corpus.load(args.work_dir, args.seed)
    tokenizer_file = args.work_dir / "tokenizer.json"
    if not tokenizer_file.exists():
        texts = corpus.train["austen"] * 2 + corpus.train["shakespeare"] + corpus.train["wordnet"]
        demo_tokenizer.train(texts).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    streams = demo_tokenizer.encode_streams(tokenizer, corpus)
    print(
        {source: len(stream) for source, stream in streams.items()},
        "tokens; process",
        os.getpid(),
        flush=True,
    )
    params_file = args.work_dir / "params.safetensors"
    if not args.skip_training:
        for params, figures in train(args, streams):
            save_file({name: np.asarray(leaf) for name, leaf in flatten(params).items()}, params_file)
            print("checkpoint", figures, flush=True)
    params = unflatten(load_file(params_file))
    figures = json.loads((args.work_dir / "checkpoint.json").read_text())

    config = ModelConfig()
    demo_export.write_model(params, config, args.output)
    demo_tokenizer.write(tokenizer, args.output, demo_export.MAX_LEN)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    result = {
        "machine": demo_readme.machine(),
        "jax": jax.__version__,
        "commit": commit.stdout.strip(),
        "model": dataclasses.asdict(config)
        | {"num_parameters": sum(leaf.size for leaf in jax.tree.leaves(params))},
        "training": {
            "steps": int(figures["step"]),
            "tokens": int(figures["num_tokens"]),
            "minutes": round(float(figures["elapsed"]) / 60, 1),
            "unique_tokens": {source: len(stream) for source, stream in streams.items()},
            "mixture": MIXTURE,
            "balance_weight": BALANCE_WEIGHT,
        },
        **demo_evaluate.evaluate(params, config, tokenizer, corpus),
    }
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    (args.output / "README.md").write_text(demo_readme.render(result))
    print(json.dumps(result, indent=2, ensure_ascii=False))


def flatten(params: dict) -> dict[str, jax.Array]:
    return {
        "/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def unflatten(leaves: dict[str, np.ndarray]) -> dict:
    params: dict = {}
    for path, leaf in leaves.items():
        *modules, name = path.split("/")
        module = params
        for key in modules:
            module = module.setdefault(key, {})
        module[name] = leaf
    return params


if __name__ == "__main__":
    main()
