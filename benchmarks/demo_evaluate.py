"""Measure the demo model on held-out text: bits per byte against byte trigrams, expert use, sample texts.

Everything is measured on the weights as shipped: rounded to bfloat16, no capacity limit.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from demo_corpus import ChatDocument, Corpus
from demo_model import Model, ModelConfig, apply
from demo_tokenizer import END_OF_TEXT, IM_END, render_chat
from tokenizers import Tokenizer

PLAIN_PROMPTS = (
    "It was a fine morning, and",
    "The ball at Netherfield",
    "Elizabeth looked at him and",
    "In the evening",
)
CHAT_PROMPTS = (
    "Hello! How are you?",
    "Tell me about Mr. Darcy.",
    "What is a teapot?",
    "Write a short story about a letter.",
    "I think it will rain to-morrow, and we shall not be able to walk to the village.",
    "Explain how a computer works.",
)


SCORING_TOKENS = 4096  # in a batch
SCORING_CAPACITY = 8  # 16 experts, 2 for each token: no expert can get more than 8 times an even split


@dataclass(frozen=True)
class Score:
    """Held-out text under a model."""

    num_bytes: int
    num_tokens: int
    nats: float

    def figures(self) -> dict[str, float]:
        bits = self.nats / math.log(2) / self.num_bytes
        return {
            "num_bytes": self.num_bytes,
            "num_tokens": self.num_tokens,
            "bits_per_byte": round(bits, 4),
            "perplexity_per_byte": round(2**bits, 4),
            "perplexity_per_token": round(math.exp(self.nats / self.num_tokens), 3),
        }


def evaluate(params: dict, config: ModelConfig, tokenizer: Tokenizer, corpus: Corpus) -> dict:
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.bfloat16).astype(jnp.float32), params)
    model = Model(config, capacity_factor=config.num_experts / config.num_experts_per_tok)
    result: dict = {"held_out": {}, "byte_trigram": {}}
    for source, texts in corpus.held_out.items():
        train = "\n\n".join(corpus.train[source]).encode()
        held_out = "\n\n".join(texts).encode()
        nats = trigram_nats(train, held_out)
        result["byte_trigram"][source] = Score(len(held_out), len(held_out), nats).figures()
        for window in (512, 2048) if source == "austen" else (512,):
            score, load = score_text(config, params, tokenizer, texts, window)
            result["held_out"][f"{source}_{window}"] = score.figures()
            if source == "austen" and window == 512:
                result["experts"] = expert_use(load)
    generate = Generator(model, params, tokenizer)
    result["plain_samples"] = [
        {"prompt": p, "text": generate(p, 90, seed)[0]} for seed, p in enumerate(PLAIN_PROMPTS)
    ]
    result["chat_samples"], num_ended = [], 0
    for seed, prompt in enumerate(CHAT_PROMPTS):
        text, ended = generate(chat_prompt(prompt), 240, seed)
        num_ended += ended
        result["chat_samples"].append({"prompt": prompt, "text": text, "ended": ended})
    result["chat_ended_share"] = round(num_ended / len(CHAT_PROMPTS), 3)
    return result


def chat_prompt(text: str) -> str:
    return render_chat(ChatDocument("", text, "")).removesuffix(IM_END + "\n")


def score_text(
    config: ModelConfig, params: dict, tokenizer: Tokenizer, texts: list[str], window: int
) -> tuple[Score, np.ndarray]:
    """Each token is predicted once, from at most `window` tokens before it. Also the experts' load [layers, E].

    Several windows go at once, with room for SCORING_CAPACITY times an even split in each expert: checked, so none is dropped.
    """
    model = Model(config, capacity_factor=SCORING_CAPACITY)

    @jax.jit
    def run(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _, load = apply(model, params, tokens[:, :-1])
        log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], -1)[..., 0], load

    pieces, counts = [], []
    for text in texts:
        ids = np.array(tokenizer.encode(END_OF_TEXT + text).ids, np.int32)
        for start in range(0, len(ids) - 1, window):
            piece = ids[start : start + window + 1]
            counts.append(len(piece) - 1)
            filler = np.resize(ids, window + 1 - len(piece))  # ordinary text, so that routing stays ordinary
            pieces.append(np.concatenate([piece, filler]))
    rows = SCORING_TOKENS // window
    nats, loads = 0.0, []
    for start in range(0, len(pieces), rows):
        batch = np.stack((pieces[start : start + rows] * rows)[:rows])  # the last batch repeats its pieces
        losses, load = run(batch)
        if load.max() * config.num_experts > SCORING_CAPACITY:
            raise RuntimeError(
                f"an expert got {load.max() * config.num_experts:.2f} times an even split: rows were dropped"
            )
        for row, count in zip(np.asarray(losses), counts[start : start + rows], strict=False):
            nats += float(row[:count].sum())
        loads.append(np.asarray(load))
    return Score(sum(len(text.encode()) for text in texts), sum(counts), nats), np.mean(loads, 0)


def expert_use(load: np.ndarray) -> list[dict[str, float]]:
    """Per layer: the busiest and the idlest expert's share of the choices, relative to an even split."""
    even = 1 / load.shape[1]
    return [
        {"max_over_mean": round(float(x.max() / even), 3), "min_over_mean": round(float(x.min() / even), 3)}
        for x in load
    ]


def trigram_nats(train: bytes, held_out: bytes) -> float:
    """Byte trigrams with interpolated Witten-Bell smoothing, down to a uniform byte."""
    seen, text = (
        np.frombuffer(train, np.uint8).astype(np.int64),
        np.frombuffer(held_out, np.uint8).astype(np.int64),
    )
    probability = np.full(len(text), 1 / 256)
    for order in (1, 2, 3):
        context, last = grams(seen, order), grams(text, order)
        counts = np.bincount(context, minlength=256**order).reshape(-1, 256)
        total, kinds = counts.sum(1), (counts > 0).sum(1)
        history = last // 256
        seen_here = counts.reshape(-1)[last]
        weight = total[history] + kinds[history]
        tail = probability[order - 1 :]
        better = np.where(weight > 0, (seen_here + kinds[history] * tail) / np.maximum(weight, 1), tail)
        probability = np.concatenate([probability[: order - 1], better])
    return float(-np.log(probability).sum())


def grams(text: np.ndarray, order: int) -> np.ndarray:
    """Each run of `order` bytes as one number."""
    length = len(text) - order + 1
    numbers = np.zeros(length, np.int64)
    for i in range(order):
        numbers = numbers * 256 + text[i : i + length]
    return numbers


class Generator:
    """Samples one token at a time, recomputing the whole text: slow, simple, and independent of the server."""

    def __init__(self, model: Model, params: dict, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)}
        self.next_logits = jax.jit(partial(_next_logits, model, params))

    def __call__(
        self, prompt: str, num_tokens: int, seed: int, temperature: float = 0.7, top_k: int = 50
    ) -> tuple[str, bool]:
        rng = np.random.default_rng(seed)
        ids = self.tokenizer.encode(prompt).ids
        start = len(ids)
        while len(ids) < start + num_tokens:
            padded = np.pad(np.array(ids, np.int32), (0, -len(ids) % 96))  # a few lengths to compile
            logits = np.asarray(self.next_logits(padded, len(ids) - 1)).astype(np.float64) / temperature
            logits[logits < np.sort(logits)[-top_k]] = -np.inf
            weights = np.exp(logits - logits.max())
            token = int(rng.choice(len(weights), p=weights / weights.sum()))
            if token in self.eos:
                return self.tokenizer.decode(ids[start:]), True
            ids.append(token)
        return self.tokenizer.decode(ids[start:]), False


def _next_logits(model: Model, params: dict, tokens: jax.Array, last: jax.Array) -> jax.Array:
    return apply(model, params, tokens[None])[0][0, last]
