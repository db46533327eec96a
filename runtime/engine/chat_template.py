"""Chat messages to the prompt text that the model was trained on, by the model folder's Jinja template. No JAX.

Templates run in a sandbox and never come from requests. Loops, time, repetition and output are bounded, because the
template may come from a stranger and its input does.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.engine.tokenizer_files import read_object, read_text, special_tokens
from runtime.errors import InvalidRequest, ModelLoadError

MAX_OUTPUT_CHARS = 8 << 20
MAX_ITERATIONS = 1_000_000
MAX_SECONDS = 2.0
MAX_SEQUENCE = 100_000  # of text or lists that a template makes by multiplying
MAX_OPTION_CHARS = 64
ALLOWED_OPTIONS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "preserve_thinking"})


class ChatTemplate:
    """A model's template. Rendering may be done by several threads at once."""

    def __init__(
        self, source: str | Mapping[str, str] | None, tokens: Mapping[str, str] | None = None
    ) -> None:
        """`source`: one template, or several by name ("default", "tool_use"), or none at all.

        `tokens` are the special tokens that templates name, such as `bos_token`. Raises ModelLoadError when a
        template is not valid.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._tokens = dict(tokens or {})
        environment = _Environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"the chat template is not valid: {str(error)[:200]}") from None

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate":
        """chat_template.jinja, else chat_template.json, else the entry of tokenizer_config.json, else none."""
        if (folder / "chat_template.jinja").exists():
            return cls(read_text(folder / "chat_template.jinja"), special_tokens(folder))
        for name in ("chat_template.json", "tokenizer_config.json"):
            source = read_object(folder / name).get("chat_template")
            if source is not None:
                return cls(_sources(source, name), special_tokens(folder))
        return cls(None)

    @property
    def is_present(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `options` are template settings such as `enable_thinking`, only those of ALLOWED_OPTIONS.

        Raises InvalidRequest when there is no template, when it refuses the messages, or when a bound is reached.
        """
        template = self._choose(bool(tools))
        budget = _Budget()
        variables = {
            **self._tokens,
            **_checked_options(options or {}),
            "messages": [_plain_message(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: budget,
        }
        try:
            return "".join(budget.count_output(template.generate(variables)))
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise InvalidRequest(f"the chat template refused: {str(error)[:300]}", param="messages") from None
        except (RecursionError, MemoryError):
            raise InvalidRequest("the chat template needs too much memory", param="messages") from None

    def _choose(self, has_tools: bool) -> jinja2.Template:
        if not self._templates:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        first = "tool_use" if has_tools else "default"
        return (
            self._templates.get(first)
            or self._templates.get("default")
            or next(iter(self._templates.values()))
        )


_BUDGET = (
    "_budget"  # the variable that loops report to; templates cannot assign to names that they do not spell
)


class _Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self._num_iterations = 0
        self._end = time.monotonic() + MAX_SECONDS

    def count(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._num_iterations += 1
            if self._num_iterations > MAX_ITERATIONS:
                raise SecurityError(f"more than {MAX_ITERATIONS} loop iterations")
            self._check_time()
            yield item

    def count_output(self, pieces: Iterable[str]) -> Iterator[str]:
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            if num_chars > MAX_OUTPUT_CHARS:
                raise SecurityError(f"more than {MAX_OUTPUT_CHARS} characters")
            self._check_time()
            yield piece

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise SecurityError(f"more than {MAX_SECONDS} seconds")


class _Environment(ImmutableSandboxedEnvironment):
    """Settings, filters and functions as `transformers` gives them to templates, with bounds."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The parsed template with every loop's iterable counted."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            counter = nodes.Getattr(nodes.Name(_BUDGET, "load"), "count", "load")
            loop.iter = nodes.Call(counter, [loop.iter], [], None, None, lineno=loop.lineno)
        template.set_environment(self)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if (
                isinstance(value, str | list | tuple)
                and isinstance(times, int)
                and len(value) * times > MAX_SEQUENCE
            ):
                raise SecurityError(f"a sequence of more than {MAX_SEQUENCE}")
        if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
            raise SecurityError("a power too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _sources(value: Any, name: str) -> str | dict[str, str]:
    """One template, or the list of named ones that some models have."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
        if all(isinstance(text, str) for pair in named.items() for text in pair):
            return named
    raise ModelLoadError(f"{name}: chat_template is neither text nor a list of named templates")


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: content a text, arguments of tool calls an object."""
    plain = dict(message)
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        plain["content"] = "\n".join(map(_part_text, content))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _part_text(part: Any) -> str:
    text = (
        part.get("text") if isinstance(part, Mapping) and part.get("type") in ("text", "input_text") else None
    )
    if not isinstance(text, str):
        raise InvalidRequest("only text parts are supported in a message's content", param="messages")
    return text


def _plain_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest("a tool call's arguments are not JSON", param="messages") from None
    return {**call, "function": function}


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name not in ALLOWED_OPTIONS:
            allowed = ", ".join(sorted(ALLOWED_OPTIONS))
            raise InvalidRequest(
                f"chat template option {name[:80]!r} is not one of {allowed}", param="chat_template_kwargs"
            )
        if not isinstance(value, bool | int | str) or len(str(value)) > MAX_OPTION_CHARS:
            raise InvalidRequest(
                f"chat template option {name} must be a boolean, a number or a short text",
                param="chat_template_kwargs",
            )
    return dict(options)
