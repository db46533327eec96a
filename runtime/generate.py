"""`python -m runtime.generate MODEL "text"`: offline generation, streamed to the terminal; no server."""

import argparse
import queue
import sys
import time
from typing import TextIO

from rich.console import Console

from runtime.config import EngineConfig, parse_config
from runtime.engine.build import BuiltEngine, build_engine
from runtime.errors import RuntimeFault
from runtime.request import FinishReason, Request, SamplingParams, TokenEvent

EMBEDDED = "demo"
READY_TIMEOUT_S = 1800.0
_POLL_S = 0.5

console = Console(stderr=True, highlight=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.generate", description=__doc__)
    parser.add_argument(
        "model", help=f"folder in Hugging Face layout, or {EMBEDDED!r} for the embedded model"
    )
    parser.add_argument("text", help="text to continue, or the user's message with --chat")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 picks the likeliest token (default)"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="same seed, same text")
    parser.add_argument("--chat", action="store_true", help="put the text through the model's chat template")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    args = parser.parse_args(argv)
    if args.max_tokens < 1 or not 0 <= args.temperature <= 2 or not 0 < args.top_p <= 1:
        parser.error("--max-tokens must be 1 or more, --temperature in [0, 2], --top-p in (0, 1]")
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    try:
        return generate(offline_config(args.model, args.load_format), args.text, params, is_chat=args.chat)
    except (RuntimeFault, ValueError, OSError) as error:
        console.print(f"error: {error}", style="red")
        return 2


def offline_config(model: str, load_format: str = "auto") -> EngineConfig:
    """One row is all that one text needs, so the ladder is small and quickly compiled."""
    return parse_config(
        {
            "model": {"path": "" if model == EMBEDDED else model, "load_format": load_format},
            "batch_processing": {"max_batch_size": 1},
            "ladder": {"prefill_tokens": [64, 512], "decode_rows": [1], "max_prefill_rows": 1},
        }
    )


def generate(config: EngineConfig, text: str, params: SamplingParams, *, is_chat: bool = False) -> int:
    """Streams the answer to standard output; status 0, or 1 when the engine failed on the way."""
    built = build_engine(config)
    prompt = encode(built, text, is_chat=is_chat)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def publish(batch: list[TokenEvent]) -> None:
        for event in batch:
            events.put(event)

    built.loop.set_publisher(publish)
    built.loop.start()
    try:
        with console.status("loading and compiling the first rungs"):
            built.loop.wait_ready(READY_TIMEOUT_S)
        start_s = time.monotonic()
        built.loop.submit([Request("generate", prompt, params, arrival_s=start_s)])
        num_tokens, num_later, first_s, last = stream(built, events, sys.stdout)
        decode_s = time.monotonic() - first_s
    finally:
        built.loop.shutdown()
    if last.finish_reason is FinishReason.ERROR:
        console.print(f"error: {last.error}", style="red")
        return 1
    ttft_ms = 1e3 * (first_s - start_s)
    rate = f", then {num_later / decode_s:.1f} tokens/s" if num_later else ""
    console.print(
        f"{len(prompt)} prompt tokens, {num_tokens} new ({last.finish_reason}); first after {ttft_ms:.0f} ms{rate}"
    )
    return 0


def encode(built: BuiltEngine, text: str, *, is_chat: bool) -> tuple[int, ...]:
    """Token ids of the text; a chat template writes its own special tokens."""
    if not is_chat:
        return tuple(built.tokenizer.encode(text))
    rendered = built.chat_template.render([{"role": "user", "content": text}])
    return tuple(built.tokenizer.encode(rendered, add_special_tokens=False))


def stream(
    built: BuiltEngine, events: "queue.SimpleQueue[TokenEvent]", out: TextIO
) -> tuple[int, int, float, TokenEvent]:
    """Writes text as it comes; returns (tokens, those after the first event, time of the first event, last event)."""
    num_tokens, num_later, first_s = 0, 0, 0.0
    while True:
        try:
            event = events.get(timeout=_POLL_S)
        except queue.Empty:
            if built.loop.state == "failed":
                raise RuntimeFault(f"the engine failed: {built.loop.snapshot().error}") from None
            continue
        if first_s:
            num_later += len(event.token_ids)
        first_s = first_s or time.monotonic()
        num_tokens += len(event.token_ids)
        out.write(event.text)
        out.flush()
        if event.finish_reason is not None:
            out.write("\n")
            return num_tokens, num_later, first_s, event


if __name__ == "__main__":
    sys.exit(main())
