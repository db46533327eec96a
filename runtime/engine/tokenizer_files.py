"""The JSON files that lie beside tokenizer.json in a model folder: reading them, and what they say about tokens."""

import json
from pathlib import Path
from typing import Any

from runtime.errors import ModelLoadError

MAX_FILE_BYTES = 256 << 20
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_text(path: Path) -> str:
    """The file's text. Raises ModelLoadError when it is missing, too large or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelLoadError(f"{path.name} has {size} bytes, more than the limit of {MAX_FILE_BYTES}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {str(error)[:200]}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object, empty where there is no such file. Raises ModelLoadError when it is anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} holds a {type(value).__name__} where an object is expected")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """Text of the named special tokens, such as `bos_token`; tokenizer_config.json wins over special_tokens_map.json."""
    named = read_object(folder / "special_tokens_map.json") | {
        name: value
        for name, value in read_object(folder / "tokenizer_config.json").items()
        if value is not None
    }
    found = {}
    for name in SPECIAL_NAMES:
        value = named.get(name)
        text = value.get("content") if isinstance(value, dict) else value  # an added token, or its text alone
        if isinstance(text, str):
            found[name] = text
    return found


def eos_ids(folder: Path) -> tuple[int, ...]:
    """End-of-text ids that generation_config.json and config.json name; there may be several or none."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_object(folder / name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ModelLoadError(
                    f"{name}: eos_token_id holds {str(token_id)[:40]!r}, which is no token id"
                )
            ids.append(token_id)
    return tuple(dict.fromkeys(ids))
