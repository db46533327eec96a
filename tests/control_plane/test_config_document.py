"""Documents: what may be sent back, what is refused, what the schema tells about each field."""

import pytest

from control_plane.config_document import FILE_ONLY, checked, document, public, schema, undone
from control_plane.errors import InvalidConfig
from control_plane.merge_patch import leaves, merge
from runtime.config import EngineConfig, parse_config
from runtime.engine.change import ChangeKind, FieldChange


def test_a_document_is_read_back_as_it_was() -> None:
    config = parse_config({"slo": {"ttft": "1500ms"}, "ladder": {"decode_rows": [1, 4]}})
    assert checked(document(config)) == config


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"slo": {"tftt": "1s"}}, ["slo.tftt", "slo.ttft"]),
        ({"slo": {"ttft": "soon"}}, ["slo.ttft", "soon", "500ms"]),
        ({"batch_processing": {"alpha": 2}}, ["batch_processing.alpha", "2"]),
        ({"slo": {"ttft": -5.0}}, ["slo.ttft"]),  # a number slips through the parser and must not be stored
        ({"controller": {"up_below": 1.5, "down_above": 1.2}}, ["up_below"]),
        ({"a": [[[[[[[[[1]]]]]]]]]}, ["deep"]),
    ],
)
def test_wrong_documents_are_named(patch: dict, words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as found:
        checked(merge(document(EngineConfig()), patch))
    assert all(word in found.value.message for word in words), found.value.message


def test_keys_are_not_shown_and_the_rest_may_be_sent_back() -> None:
    config = parse_config({"server": {"api_keys": ["aa"], "admin_keys": ["bb"], "viewer_keys": ["cc"]}})
    shown = public(document(config))
    assert not {"aa", "bb", "cc"} & set(str(shown).split("'"))
    assert checked(merge(document(config), shown)) == config


def test_every_field_tells_how_it_changes() -> None:
    found = schema()
    paths = {}
    for section, reference in found["properties"].items():
        name = (reference.get("$ref") or reference["allOf"][0]["$ref"]).rsplit("/", 1)[-1]
        for key, field in found["$defs"][name]["properties"].items():
            paths[f"{section}.{key}"] = field
    assert paths.keys() == {path for path, _ in leaves(document(EngineConfig()))}
    for path, field in paths.items():
        assert field["change"] in set(ChangeKind), path
        assert field["has_effect"] is ("reason" not in field), path
        assert field["file_only"] is (path in FILE_ONLY), path
    assert (paths["slo.ttft"]["unit"], paths["slo.ttft"]["default"]) == ("duration", "2s")
    assert paths["server.max_body_size"]["unit"] == "size"
    assert paths["batch_processing.alpha"]["unit"] is None
    assert paths["batch_processing.alpha"]["maximum"] == 1
    dead = {path for path, field in paths.items() if not field["has_effect"]}
    assert {"precision.high_precision", "traffic_prediction.prediction_window"} <= dead
    assert "batch_processing.expert_balance_weight" in dead
    assert "batch_processing.alpha" not in dead


def test_undone_leaves_what_somebody_changed_since() -> None:
    now = {"a": {"x": 2, "y": 5}}
    changes = [FieldChange("a.x", ChangeKind.LIVE, 1, 2), FieldChange("a.y", ChangeKind.LIVE, 1, 2)]
    assert undone(now, changes) == {"a": {"x": 1, "y": 5}}
