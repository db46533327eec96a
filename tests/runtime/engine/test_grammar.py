"""Grammars over a real vocabulary: what the masks allow, and constraints that must be refused quickly."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.engine import grammar as module
from runtime.engine.grammar import GrammarCompiler, GrammarState
from runtime.engine.tokenizer import ByteTokenizer, HFTokenizer
from runtime.errors import InvalidRequest
from runtime.request import GrammarSpec
from tests.runtime.engine.small_tokenizers import write_byte_level

VOCAB_SIZE = 450  # the model's: larger than the tokenizer's, no multiple of 32
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, True]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return write_byte_level(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def compiler(tokenizer: HFTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


def allowed_ids(state: GrammarState) -> list[int]:
    """As the device reads the mask."""
    words = state.mask()
    assert (words.dtype, words.shape) == (np.int32, (-(-VOCAB_SIZE // 32),))
    ids = np.arange(VOCAB_SIZE)
    assert not (words[-1] >> np.arange(VOCAB_SIZE % 32, 32) & 1).any()
    return ids[words[ids // 32] >> (ids % 32) & 1 == 1].tolist()


def random_text(tokenizer: HFTokenizer, state: GrammarState, rng: np.random.Generator) -> str:
    """What a model without any sense would write under the mask."""
    ids: list[int] = []
    for _ in range(2000):
        allowed = allowed_ids(state)
        token_id = int(rng.choice(allowed))
        if token_id in tokenizer.eos_ids:
            assert state.can_end
            break
        assert state.advance([token_id])
        ids.append(token_id)
        if state.is_finished:
            break
    assert state.error is None
    return tokenizer.decode(ids)


def test_any_choice_satisfies_the_schema(tokenizer: HFTokenizer, compiler: GrammarCompiler) -> None:
    rng = np.random.default_rng(0)
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    for _ in range(20):
        value = json.loads(random_text(tokenizer, compiler.compile(spec), rng))
        assert list(value) == ["name", "count", "tags"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 8
        assert value["count"] in range(100)
        assert all(tag in ("a", "b", None, True) for tag in value["tags"])


def test_any_choice_matches_the_regex(tokenizer: HFTokenizer, compiler: GrammarCompiler) -> None:
    pattern = r"(fox|dog){1,3} [0-9]{2}好?"
    for seed in range(20):
        state = compiler.compile(GrammarSpec("regex", pattern))
        assert re.fullmatch(pattern, random_text(tokenizer, state, np.random.default_rng(seed)))


def test_json_object_follows_the_text(tokenizer: HFTokenizer, compiler: GrammarCompiler) -> None:
    state = compiler.compile(GrammarSpec("json_object", ""))
    end = tokenizer.eos_ids[0]
    ids = tokenizer.encode('{"name": [1, {"x": null}]}')
    for token_id in ids:
        allowed = allowed_ids(state)
        assert token_id in allowed
        assert end not in allowed
        assert state.advance([token_id])
    assert state.is_finished
    assert allowed_ids(state) == [end]
    assert state.advance([end])
    other = compiler.compile(GrammarSpec("json_object", ""))  # the cached one is still at its start
    assert other.advance(tokenizer.encode('{"'))


def test_lark(tokenizer: HFTokenizer, compiler: GrammarCompiler) -> None:
    state = compiler.compile(GrammarSpec("lark", 'start: "fox" rest\nrest: /[0-9]+/'))
    assert state.advance(tokenizer.encode("fox7"))
    assert (state.can_end, state.is_finished) == (True, False)
    assert tokenizer.eos_ids[0] in allowed_ids(state)


def test_white_space_comes_to_an_end(tokenizer: HFTokenizer, compiler: GrammarCompiler) -> None:
    state = compiler.compile(GrammarSpec("json_object", ""))
    assert state.advance(tokenizer.encode("{"))
    space = tokenizer.encode("\n")[0]
    count = 0
    while space in allowed_ids(state):
        assert state.advance([space])
        count += 1
    assert 0 < count <= 32


def test_a_token_that_does_not_fit_leaves_only_the_end(
    tokenizer: HFTokenizer, compiler: GrammarCompiler
) -> None:
    state = compiler.compile(GrammarSpec("regex", "[a-z]+"))
    assert not state.advance(tokenizer.encode("7"))
    assert state.is_finished
    assert state.error
    assert allowed_ids(state) == [tokenizer.eos_ids[0]]


def test_special_tokens_are_no_text(tokenizer: HFTokenizer, compiler: GrammarCompiler) -> None:
    allowed = allowed_ids(compiler.compile(GrammarSpec("regex", r"(.|\n)+")))
    assert not tokenizer.special_ids & set(allowed)
    assert max(allowed) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", "[1]", "must be an object"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "nothing is fetched"),
        ("json_schema", '{"items": [{"$ref": "http://localhost/"}]}', "nothing is fetched"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unclosed"),
        ("json_schema", '{"items":' * 70 + "{}" + "}" * 70, "64 deep"),
        ("json_schema", "[" * 9000, "64 deep|not JSON"),  # from Python 3.13 on the parser reads to the end
        ("json_schema", json.dumps({"enum": ["x" * 17000]}), "16384"),
        ("json_schema", "\ud800", "not JSON"),
        ("json_schema", json.dumps({"items": {"pattern": "a?" * 1100}}), "2200 characters"),
        ("json_schema", json.dumps({"patternProperties": {"a?" * 1100: {}}}), "2200 characters"),
        ("regex", "a?" * 1100, "2200 bytes"),
        ("regex", "(", "unclosed"),
        ("regex", "(" * 300 + ")" * 300, "64 deep"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: [" * 70, "64 deep"),
        ("lark", "x: y", "start"),
        ("python", "import os", "not known"),
    ],
)
def test_bad_constraints_are_refused(compiler: GrammarCompiler, kind: str, source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        compiler.validate(GrammarSpec(kind, source))
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(((a{1,1000}){1,1000}){1,1000}b){1000}"),
        ("regex", "a?" * 1000),
        ("regex", "(.*a.*b.*c){100}"),
        (
            "json_schema",
            json.dumps({"allOf": [{"pattern": f".*{x}.*"} for x in "abcdefghijklmno"], "type": "string"}),
        ),
        (
            "json_schema",
            json.dumps(
                {"allOf": [{"anyOf": [{"properties": {f"{i}.{j}": {}}} for i in range(8)]} for j in range(8)]}
            ),
        ),
        ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    ],
)
def test_bombs_cost_little(tokenizer: HFTokenizer, compiler: GrammarCompiler, kind: str, source: str) -> None:
    """Refused or not, neither compiling nor any mask takes long."""
    start = time.perf_counter()
    try:
        state = compiler.compile(GrammarSpec(kind, source))
    except InvalidRequest:
        assert time.perf_counter() - start < 10 * module.COMPILE_SECONDS
        return
    for token_id in tokenizer.encode("a" * 30):
        start = time.thread_time()
        state.mask()
        state.advance([token_id])
        assert time.thread_time() - start < 0.5


def test_slow_compiles_are_given_up(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_start", lambda *_: time.sleep(0.5))
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match="to compile"):
        compiler.compile(GrammarSpec("regex", "slow"))


def test_the_cache_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_CACHED", 4)
    for i in range(10):
        compiler.validate(GrammarSpec("regex", f"x{i}"))
    assert list(compiler._compiled) == [GrammarSpec("regex", f"x{i}") for i in range(6, 10)]


def test_several_ends_and_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 9000]}))
    tokenizer = write_byte_level(tmp_path)
    assert tokenizer.eos_ids == (1, 9000, 0)
    state = GrammarCompiler(tokenizer, VOCAB_SIZE).compile(GrammarSpec("regex", "a"))
    state.advance(tokenizer.encode("a"))
    assert allowed_ids(state) == [0, 1]
    endless = ByteTokenizer()
    endless.eos_ids = ()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidRequest, match="end-of-text"):
        GrammarCompiler(endless).compile(GrammarSpec("regex", "a"))
