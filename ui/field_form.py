"""The widgets of a section's fields, as the server's schema describes them, and what was entered as a draft."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from control_plane.merge_patch import same
from ui.draft import Draft
from ui.fields import CHANGES, Field, parse, shown
from ui.plain import plain
from ui.units import age

BADGES = {
    "live": ":green-badge[live]",
    "recompile": ":orange-badge[recompile]",
    "restart": ":violet-badge[restart]",
}


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about the fields' values, by dotted path. last: the newest change of each, with its age in seconds."""

    effective: Mapping[str, Any]
    stored: Mapping[str, Any]
    defaults: Mapping[str, Any]
    last: Mapping[str, tuple[dict[str, Any], float]]


def field_form(fields: Sequence[Field], draft: Draft, known: Known, key: str) -> Draft | None:
    """The draft with what was entered when the form is sent, else None. Errors stand beside their fields."""
    entered: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    resets: list[str] = []
    with st.container(key="fields"), st.form(f"form_{key}"):
        for field in fields:
            text, widget = st.columns([7, 3], vertical_alignment="center")
            with text:
                _describe(field, known, draft)
            with widget:
                entered[field.path] = _widget(field, draft.value(field.path, known.defaults), key)
                errors[field.path] = st.empty()
        candidates = [
            f.path for f in fields if f.is_editable and not same(known.stored.get(f.path), f.default)
        ]
        if candidates:
            resets = st.multiselect(
                "Set back to the default",
                candidates,
                [p for p in draft.to_default if p in candidates],
                key=f"reset_{key}",
                format_func=lambda path: f"{path} → {shown(known.defaults.get(path))}",
            )
        is_sent = st.form_submit_button(
            "Plan this change", type="primary", help="A dry run: nothing is changed"
        )
    if not is_sent:
        return None
    is_right = True
    for field in fields:
        if not field.is_editable:
            continue
        try:
            draft = draft.with_value(field.path, parse(field, entered[field.path]))
        except ValueError as error:
            errors[field.path].error(plain(error))
            is_right = False
    for path in resets:
        draft = draft.with_default(path)
    return draft if is_right else None


def _describe(field: Field, known: Known, draft: Draft) -> None:
    effective, stored = known.effective.get(field.path), known.stored.get(field.path)
    parts = [f"in force **{_value(effective)}**"]
    if not same(effective, field.default):
        parts.append(f"default {_value(field.default)}")
    if not same(effective, stored):
        parts.append(f"pending until a restart: **{_value(stored)}**")
    if field.path in draft.paths:
        parts.append(f"in your change: **{_value(draft.value(field.path, known.defaults))}**")
    if (last := known.last.get(field.path)) is not None:
        revision, seconds = last
        why = f": {plain(revision['reason'])}" if revision.get("reason") else ""
        parts.append(f"revision {revision['number']} by {plain(revision['actor'])}, {age(seconds)} ago{why}")
    head = f"**{field.name}** {BADGES.get(field.change, '')} {plain(field.description)}"
    st.markdown(f"{head}  \n:small[:gray[{' · '.join(parts)}]]{_limits(field)}", help=_help(field))


def _widget(field: Field, value: Any, key: str) -> Any:
    label, name = field.path, f"{key}_{field.path}"
    common: dict[str, Any] = {
        "key": name,
        "disabled": not field.is_editable or bool(field.why_idle),
        "label_visibility": "collapsed",
    }
    if field.kind == "boolean":
        return st.toggle(label, bool(value), **common)
    if field.choices:
        at = field.choices.index(value) if value in field.choices else 0
        return st.selectbox(label, field.choices, at, **common)
    if field.kind in ("integer", "number"):
        return st.text_input(label, shown(value), max_chars=24, **common)
    return st.text_input(label, shown(value), max_chars=4096, **common)


def _value(value: Any) -> str:
    return plain(shown(value)) or "empty"


def _help(field: Field) -> str:
    return f"{CHANGES.get(field.change, field.change)}. Allowed: {field.allowed}."


def _limits(field: Field) -> str:
    if not field.is_editable:
        return "  \n:small[:orange[set in the configuration file only]]"
    return f"  \n:small[:orange[no effect: {plain(field.why_idle)}]]" if field.why_idle else ""
