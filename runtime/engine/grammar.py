"""Constraints on the text (JSON, JSON schema, regular expression, Lark) as masks over the vocabulary, by llguidance.

`GrammarCompiler` is shared and may be used from any thread; a `GrammarState` belongs to one request. Sizes, depth and
time are bounded, because constraints come from requests. Imports no JAX.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from runtime.engine.tokenizer import Tokenizer
from runtime.errors import InvalidRequest
from runtime.request import GrammarSpec

MAX_SOURCE_BYTES = 16 << 10
MAX_PATTERN_BYTES = 2 << 10  # of a regular expression; the cost of one mask grows with its square
MAX_DEPTH = 64  # of a schema, and of brackets in the other kinds
MAX_ERROR_CHARS = 300
COMPILE_SECONDS = 2.0
NUM_WORKERS = 2
NUM_CACHED = 64
# A model that is unsure could write white space for ever; this much formats any sensible answer.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,32}"
LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 500_000,  # some 40 ms for one mask at worst
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # about 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class GrammarState:
    """How far one request's text is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)

    def mask(self) -> np.ndarray:
        """int32 [ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t may come next.

        End-of-text ids are allowed where the text may end, and alone when it must, also after an error.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._num_words]
        return np.pad(words, (0, self._num_words - len(words)))

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Takes the tokens that were sampled; False when one does not fit, after which the state stays in error."""
        return all(self._matcher.consume_token(token_id) for token_id in token_ids)

    @property
    def is_finished(self) -> bool:
        """Nothing but the end may follow; true after an error too."""
        return self._matcher.is_stopped()

    @property
    def can_end(self) -> bool:
        """The text so far is a whole answer."""
        return self._matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """Why the state can go no further: a token that does not fit, or a grammar that exceeds a limit while it runs."""
        return _bounded(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles constraints for one vocabulary and keeps the latest ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        """`vocab_size` is the model's, which may be larger than the tokenizer's. Preparation goes on in a worker."""
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="grammar")
        self._vocabulary = self._pool.submit(_vocabulary, tokenizer, self._vocab_size)
        self._lock = Lock()
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()

    def validate(self, spec: GrammarSpec) -> None:
        """Raises InvalidRequest when the constraint is wrong, too large or too slow; else `compile` will be quick."""
        self.compile(spec)

    def compile(self, spec: GrammarSpec) -> GrammarState:
        """A fresh state at the start of the text. Raises InvalidRequest that says what is wrong with the constraint."""
        with self._lock:
            matcher = self._compiled.get(spec)
            if matcher is not None:
                self._compiled.move_to_end(spec)
                return GrammarState(matcher.deep_copy(), self._vocab_size)
        grammar = _checked_grammar(spec)
        vocabulary = self._vocabulary.result()
        if vocabulary is None:
            raise InvalidRequest(
                "the model has no end-of-text id, without which no grammar can end", param=_PARAM
            )
        work = self._pool.submit(_start, vocabulary, grammar)
        try:
            matcher = work.result(COMPILE_SECONDS)
        except FutureTimeout:
            work.cancel()
            raise InvalidRequest(
                f"the {spec.kind} takes more than {COMPILE_SECONDS} s to compile", param=_PARAM
            ) from None
        if matcher.is_error():
            raise _refused(spec, matcher.get_error())
        with self._lock:
            self._compiled[spec] = matcher
            while len(self._compiled) > NUM_CACHED:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), self._vocab_size)


_PARAM = "response_format"


def _start(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher whose first mask is computed, so that a grammar that is too heavy fails here."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    matcher.compute_bitmask()
    return matcher


def _checked_grammar(spec: GrammarSpec) -> str:
    """llguidance's form of the constraint, after checks that cost little."""
    num_bytes = len(spec.source.encode("utf-8", "replace"))
    limit = MAX_PATTERN_BYTES if spec.kind in ("regex", "lark") else MAX_SOURCE_BYTES
    if num_bytes > limit:
        raise _refused(spec, f"it has {num_bytes} bytes, more than the limit of {limit}")
    match spec.kind:
        case "json_object":
            return _json_grammar({"type": "object"})
        case "json_schema":
            return _json_grammar(_checked_schema(spec))
        case "regex" | "lark":
            depth = _bracket_depth(spec.source)
            if depth > MAX_DEPTH:
                raise _refused(spec, f"its brackets are nested more than {MAX_DEPTH} deep")
            make = LLMatcher.grammar_from_regex if spec.kind == "regex" else LLMatcher.grammar_from_lark
            return make(spec.source)
    raise _refused(spec, "this kind of constraint is not known")


def _json_grammar(schema: dict[str, Any] | bool) -> str:
    options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), options)


def _checked_schema(spec: GrammarSpec) -> dict[str, Any] | bool:
    """The parsed schema: written anew, the text cannot smuggle anything past the parser."""
    try:
        schema = json.loads(spec.source)
    except RecursionError:
        raise _refused(spec, f"it is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise _refused(spec, f"it is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise _refused(spec, "a schema must be an object")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        for value in level:
            _check_keywords(spec, value)
        level = [child for value in level for child in _children(value)]
        if not level:
            return schema
    raise _refused(spec, f"it is nested more than {MAX_DEPTH} deep")


def _check_keywords(spec: GrammarSpec, value: Any) -> None:
    if not isinstance(value, dict):
        return
    reference, pattern, patterns = value.get("$ref"), value.get("pattern"), value.get("patternProperties")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise _refused(spec, f"$ref {reference[:80]!r} points outside the schema; nothing is fetched")
    for text in (pattern, *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(text, str) and len(text) > MAX_PATTERN_BYTES:
            raise _refused(
                spec, f"a pattern of {len(text)} characters is longer than the limit of {MAX_PATTERN_BYTES}"
            )


def _children(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in children if isinstance(child, dict | list)]


def _bracket_depth(text: str) -> int:
    """Deepest nesting of opening brackets, at most too high (escaped ones count): a bound on the parser's recursion."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _refused(spec: GrammarSpec, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{spec.kind} refused: {_bounded(reason)}", param=_PARAM)


def _bounded(text: str) -> str:
    text = text.replace("<non-verbose/>", "").strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."


class _Words:
    """A tokenizer in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer | None:
    """llguidance's tables of the vocabulary, about a second of work for a large one; None without end-of-text ids."""
    ends = [token_id for token_id in tokenizer.eos_ids if token_id < vocab_size]
    if not ends:
        return None
    return LLTokenizer(TokenizerWrapper(_Words(tokenizer, vocab_size, ends[0])), eos_token=ends)
