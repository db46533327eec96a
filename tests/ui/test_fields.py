"""Fields come from the server's real schema; what is entered becomes a value, or an error that names what is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.config_document import FILE_ONLY, checked, document, schema
from control_plane.merge_patch import leaves, same
from runtime.config import EngineConfig
from ui.fields import Field, about, fields_of, parse, shown

FIELDS = fields_of(schema())
BY_PATH = {field.path: field for field in FIELDS}
DEFAULTS = dict(leaves(document(EngineConfig())))


def test_every_field_of_the_configuration_is_there_once() -> None:
    assert [field.path for field in FIELDS] == list(DEFAULTS)
    assert all(same(field.default, DEFAULTS[field.path]) for field in FIELDS)
    assert {field.path for field in FIELDS if not field.is_editable} == FILE_ONLY
    assert {field.change for field in FIELDS} == {"live", "recompile", "restart"}
    assert about(schema(), "slo")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.path)
def test_what_is_shown_is_read_back_as_the_same(field: Field) -> None:
    entered = field.default if field.kind == "boolean" else shown(field.default)
    assert same(parse(field, entered), field.default)


@pytest.mark.parametrize(
    ("path", "entered", "value"),
    [
        ("batch_processing.dynamic_adjust_window", " 300ms ", "300ms"),
        ("batch_processing.max_batch_size", "16", 16),
        ("batch_processing.alpha", "0.25", 0.25),
        ("batch_processing.smoothing", False, False),
        ("ladder.decode_rows", "1, 4,8,", [1, 4, 8]),
        ("controller.form", "published", "published"),
    ],
)
def test_good_input(path: str, entered: object, value: object) -> None:
    assert same(parse(BY_PATH[path], entered), value)


@pytest.mark.parametrize(
    ("path", "entered", "allowed"),
    [
        ("batch_processing.dynamic_adjust_window", "500", "a duration such as"),
        ("batch_processing.max_batch_size", "0", "from 1 to 4096"),
        ("batch_processing.max_batch_size", "9" * 400, "whole number"),
        ("batch_processing.max_batch_size", "4.5", "whole number"),
        ("batch_processing.alpha", "nan", "a number from 0 to 1"),
        ("batch_processing.expert_load_threshold", "0", "above 0 to 1"),
        ("ladder.decode_rows", "1, x", "whole numbers"),
        ("ladder.decode_rows", "0", "from 1"),
        ("controller.form", "other", "one of current, published"),
        ("kv_cache.kv_cache_size", "much", "a size such as"),
        ("model.served_name", "x" * 5000, "at most 4096"),
    ],
)
def test_bad_input_names_the_field_and_what_is_allowed(path: str, entered: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=r"must be|at most") as told:
        parse(BY_PATH[path], entered)
    assert path in str(told.value)
    assert allowed in str(told.value)
    assert len(str(told.value)) < 1000


@given(st.sampled_from(FIELDS), st.text(max_size=30) | st.integers() | st.floats() | st.booleans())
def test_nothing_but_value_errors_come_out(field: Field, entered: object) -> None:
    try:
        value = parse(field, entered)
    except ValueError:
        return
    assert isinstance(value, bool | int | float | str | list)


def test_a_schema_with_more_than_we_know_does_not_break_the_page() -> None:
    odd = {
        "properties": {"new": {"$ref": "#/$defs/New"}, "gone": {"$ref": "#/$defs/Missing"}},
        "$defs": {"New": {"properties": {"odd": {"anyOf": []}, "fine": {"type": "integer"}}}},
    }
    assert [field.path for field in fields_of(odd)] == ["new.fine"]


def test_the_server_takes_what_the_form_lets_through() -> None:
    """The same numbers at both ends of each bound."""
    for path in ("batch_processing.alpha", "slo.ttft", "server.max_n"):
        section, _, name = path.partition(".")
        value = parse(BY_PATH[path], shown(BY_PATH[path].default))
        checked({section: {name: value}})
