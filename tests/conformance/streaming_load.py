"""Streams of the official openai client that go on until they are told to stop; some are cancelled on purpose."""

import asyncio
import random
from collections import Counter

from openai import AsyncOpenAI, OpenAIError

GREEDY_PROMPT = "Once upon a time there was an old house by the sea"
GREEDY_TOKENS = 40
WORDS = [
    "the",
    "a",
    "house",
    "of",
    "and",
    "in",
    "ship",
    "sea",
    "old",
    "king",
    "said",
    "never",
    "upon",
    "time",
    "light",
]
SHARE_CANCELLED = 0.2
SHARE_GREEDY = 0.2


class StreamingLoad:
    """`num_streams` requests at any time. `ends` counts how requests ended, `failures` holds what must not be."""

    def __init__(self, base_url: str, model: str, num_streams: int, seed: int = 0) -> None:
        self._client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
        self._model, self._num, self._rng = model, num_streams, random.Random(seed)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []
        self.greedy_texts: Counter[str] = Counter()

    async def start(self) -> None:
        """Asks for the greedy answer alone first: what all later ones are compared with."""
        self.expected = await self.greedy()
        self._tasks = [asyncio.create_task(self._stream_on()) for _ in range(self._num)]

    async def stop(self) -> None:
        """Lets the requests end that have begun."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._client.close()

    @property
    def num_requests(self) -> int:
        return sum(self.ends.values())

    async def greedy(self) -> str:
        """The answer to the fixed prompt. Raises OpenAIError, RuntimeError when the stream is cut off."""
        return await self._ask(GREEDY_PROMPT, GREEDY_TOKENS, 0.0, None)

    async def _stream_on(self) -> None:
        while not self._is_over:
            try:
                self.ends[await self._one()] += 1
            except (OpenAIError, RuntimeError) as error:
                self.ends["failed"] += 1
                self.failures.append(f"{type(error).__name__}: {str(error)[:300]}")

    async def _one(self) -> str:
        rng = self._rng
        if rng.random() < SHARE_GREEDY:
            self.greedy_texts[await self.greedy()] += 1
            return "greedy"
        text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 100)))
        leaves_after = rng.randrange(1, 20) if rng.random() < SHARE_CANCELLED else None
        await self._ask(text, rng.randrange(1, 120), rng.choice([0.0, 1.0]), leaves_after)
        return "complete" if leaves_after is None else "cancelled"

    async def _ask(self, prompt: str, max_tokens: int, temperature: float, leaves_after: int | None) -> str:
        """Text of one stream. leaves_after: chunks after which the client hangs up."""
        stream = await self._client.completions.create(
            model=self._model, prompt=prompt, max_tokens=max_tokens, temperature=temperature, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        text, reason, usage, num = "", None, None, 0
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text, reason = text + choice.text, choice.finish_reason or reason
            num += 1
            if num == leaves_after:
                await stream.close()
                return text
        if reason not in ("stop", "length") or usage is None or usage.completion_tokens > max_tokens:
            raise RuntimeError(f"the stream was cut off: finish_reason {reason}, usage {usage}")
        return text
