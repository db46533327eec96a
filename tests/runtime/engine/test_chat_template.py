"""Templates as models ship them, what they may not do, and the bounds on what they use."""

import json
import re
from pathlib import Path

import pytest

from runtime.engine import chat_template as module
from runtime.engine.chat_template import ChatTemplate
from runtime.errors import InvalidRequest, ModelLoadError

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict] = HELLO, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert render(source) == "hello\nend"


def test_what_templates_may_use() -> None:
    assert (
        render("{{ bos_token }}{{ messages | tojson }}", [{"content": "<é'>"}])
        == """<s>[{"content": "<é'>"}]"""
    )
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert (
        render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}")
        == "123"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hello"
    assert render("{% for m in messages %}{{ loop.last }}{{ loop.length }}{% endfor %}") == "True1"
    assert (
        render("{% macro m(x) %}{% for i in x %}{{ i }}.{% endfor %}{% endmacro %}{{ m([1, 2]) }}") == "1.2."
    )
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("{{ [tools, documents] | tojson }}") == "[null, null]"
    assert (
        render(
            "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ messages[-1]['x'] is defined }}"
        )
        == "a1False"
    )


def test_messages_become_plain() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ messages[1].tool_calls[0].function.arguments.x }}"
    assert render(source, messages) == "[a\nb][]1"
    assert isinstance(messages[0]["content"], list)  # the caller's messages stay as they were
    assert isinstance(call["function"]["arguments"], str)
    for bad in (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost"}}]},
        {"role": "user", "content": [7]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
    ):
        with pytest.raises(InvalidRequest):
            render(CHATML, [bad])


def test_options_are_a_short_list() -> None:
    assert render("{{ enable_thinking }}", options={"enable_thinking": False}) == "False"
    for bad in (
        {"messages": "x"},
        {"chat_template": "x"},
        {"enable_thinking": [1]},
        {"reasoning_effort": "x" * 65},
    ):
        with pytest.raises(InvalidRequest, match="option"):
            render(CHATML, options=bad)


def test_template_errors_are_the_requests() -> None:
    for source in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ):
        with pytest.raises(InvalidRequest):
            render(source)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[0].update(x=1) }}",
        "{% include '/etc/passwd' %}",
        "{{ _budget.count.__func__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set s = 'x' * 5000 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% for i in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    ],
)
def test_bombs_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.3)
    with pytest.raises(InvalidRequest):
        render(source)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_CHARS", 100)
    with pytest.raises(InvalidRequest, match="100 characters"):
        render(CHATML, [{"role": "user", "content": "x" * 200}])


def test_templates_are_found(tmp_path: Path) -> None:
    assert not ChatTemplate.from_folder(tmp_path).is_present
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate.from_folder(tmp_path).render(HELLO)
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": "<b>"}))
    template = ChatTemplate.from_folder(tmp_path)
    assert (template.render(HELLO), template.render(HELLO, tools=[{"name": "f"}])) == ("plain", "f")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "from json"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}jinja")
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "<b>jinja"


@pytest.mark.parametrize("value", [7, [1], [{"name": "default"}], "{% for %}", "{{"])
def test_bad_templates_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelLoadError):
        ChatTemplate.from_folder(tmp_path)
