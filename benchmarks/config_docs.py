"""`make docs`: writes docs/config.md from the descriptions in runtime/config.py, so that there is one truth.

With `--check` writes nothing and exits 1 when the page is not current.
"""

import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from runtime.config import EngineConfig

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = """# Configuration

Written by `make docs` from `runtime/config.py`; do not edit by hand. One YAML file, sections as below; a key that is
left out has its default, an unknown key is an error that names the nearest one. Durations are written `500ms`, `2s`,
`15min`; sizes `80%`, `512MiB`, `20GiB`.

A change takes effect: **live** with the next step; **recompile** by compiling rungs in the background and swapping them
between two steps; **restart** when the server starts again.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    defaults = EngineConfig().model_dump(mode="json")
    for section, field in EngineConfig.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        parts.append(f"\n## {section}\n\n{(model.__doc__ or '').strip()}\n")
        parts.append("| key | default | allowed | change | meaning |\n| --- | --- | --- | --- | --- |")
        for key, info in model.model_fields.items():
            parts.append(_row(key, info, defaults[section][key]))
    return "\n".join(parts) + "\n"


def _row(key: str, info: FieldInfo, default: Any) -> str:
    extra = info.json_schema_extra
    change = extra.get("change", "") if isinstance(extra, dict) else ""
    cells = (f"`{key}`", f"`{_yaml(default)}`", _allowed(info), str(change), info.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _allowed(info: FieldInfo) -> str:
    if get_origin(info.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(info.annotation))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "max_length": "at most"}
    found = [
        (signs[name], getattr(bound, name))
        for bound in info.metadata
        for name in signs
        if hasattr(bound, name)
    ]
    return ", ".join(f"{sign} {value}" for sign, value in found)


def main() -> int:
    page = render()
    if "--check" in sys.argv[1:]:
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page
        if not is_current:
            print(f"{PAGE.name} is not current: run make docs", file=sys.stderr)
        return 0 if is_current else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
