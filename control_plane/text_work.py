"""Text work that takes processor time: tokenising, chat templates, grammar checks. Bounded, off the event loop.

Sizes are checked before any work; what is long goes to a small thread pool with a queue limit and a time limit.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from control_plane.engine_handle import ServedModel
from runtime.errors import ContextTooLong, InvalidRequest, QueueFull, RuntimeFault
from runtime.request import GrammarSpec

NUM_THREADS = 2
MAX_WAITING = 64
TIME_LIMIT_S = 2.0
INLINE_BYTES = 2048  # shorter texts are tokenised on the event loop: faster than the way to a thread and back


class TextWork:
    """The served model's tokenizer, template and grammars behind limits."""

    def __init__(self, model: ServedModel, max_prompt_bytes: Callable[[], int]) -> None:
        self._model = model
        self._max_prompt_bytes = max_prompt_bytes
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_waiting = 0

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        num_bytes = self.check_size(text, param)
        encode = self._model.tokenizer.encode
        if num_bytes <= INLINE_BYTES:
            return encode(text, add_special_tokens=add_special_tokens)
        return await self._run(lambda: encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the rendered conversation; special tokens come from the template."""
        self.check_size("".join(message["content"] for message in messages), "messages")

        def work() -> list[int]:
            text = self._model.chat_template.render(messages, tools=tools, options=options)
            self.check_size(text, "messages")
            return self._model.tokenizer.encode(text, add_special_tokens=False)

        return await self._run(work)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._run(lambda: self._model.tokenizer.decode(ids, skip_special_tokens=False))

    async def check_grammar(self, spec: GrammarSpec) -> None:
        await self._run(lambda: self._model.grammars.validate(spec))

    def check_size(self, text: str, param: str) -> int:
        """The text's size in bytes. Raises ContextTooLong over the limit, before any tokenising."""
        num_bytes = len(text.encode("utf-8", "replace"))
        if num_bytes > (most := self._max_prompt_bytes()):
            limit = f"{num_bytes} bytes is over the limit of {most} bytes"
            raise ContextTooLong(
                f"The prompt of {limit}; the context holds {self._model.card.max_context} tokens.",
                param=param,
            )
        return num_bytes

    async def _run[T](self, work: Callable[[], T]) -> T:
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull("Too many prompts are being prepared.", retry_after_s=1)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(TIME_LIMIT_S * (1 + self._num_waiting / NUM_THREADS)):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            raise QueueFull(
                "Preparing the prompt took too long; the server is busy.", retry_after_s=2
            ) from None
        except (RuntimeFault, MemoryError):
            raise
        except ValueError as error:
            raise InvalidRequest(f"The prompt or constraint was refused: {error}") from error
        finally:
            self._num_waiting -= 1
