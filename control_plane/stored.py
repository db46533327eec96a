"""Chat completions kept on request (`store: true`), in memory, bounded, each visible to its own key only."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from control_plane.errors import NotFound

MAX_STORED = 256
MAX_STORED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """One kept completion as it was answered. `name` is the caller's X-Request-Id, a second way to find it."""

    key_id: str
    name: str | None
    completion: dict[str, Any]
    num_bytes: int


class StoredCompletions:
    """Oldest out first when there are too many or they are too large."""

    def __init__(self, max_count: int = MAX_STORED, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._items: OrderedDict[str, Stored] = OrderedDict()
        self._num_bytes = 0
        self._max_count = max_count
        self._max_bytes = max_bytes

    def add(
        self, completion: dict[str, Any], *, key_id: str, name: str | None, metadata: Mapping[str, str]
    ) -> None:
        kept = completion | {"metadata": dict(metadata)}
        item = Stored(key_id, name, kept, len(orjson.dumps(kept)))
        if item.num_bytes > self._max_bytes:
            return
        self._items[completion["id"]] = item
        self._num_bytes += item.num_bytes
        while len(self._items) > self._max_count or self._num_bytes > self._max_bytes:
            self._num_bytes -= self._items.popitem(last=False)[1].num_bytes

    def get(self, completion_id: str, key_id: str) -> dict[str, Any]:
        """The completion with this id, or the newest whose call had this X-Request-Id. Raises NotFound."""
        return self._find(completion_id, key_id).completion

    def list(
        self,
        key_id: str,
        *,
        after: str | None,
        limit: int,
        descending: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> dict[str, Any]:
        """A page of the key's completions in OpenAI's shape."""
        found = [
            item.completion
            for item in self._items.values()
            if item.key_id == key_id
            and (model is None or item.completion["model"] == model)
            and metadata.items() <= item.completion["metadata"].items()
        ]
        if descending:
            found.reverse()
        ids = [completion["id"] for completion in found]
        start = ids.index(after) + 1 if after in ids else 0
        page = found[start : start + limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(found),
        }

    def update(self, completion_id: str, key_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        completion = self._find(completion_id, key_id).completion
        completion["metadata"] = dict(metadata)
        return completion

    def remove(self, completion_id: str, key_id: str) -> dict[str, Any]:
        item = self._find(completion_id, key_id)
        del self._items[item.completion["id"]]
        self._num_bytes -= item.num_bytes
        return {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}

    def _find(self, completion_id: str, key_id: str) -> Stored:
        item = self._items.get(completion_id)
        if item is None:
            item = next((i for i in reversed(self._items.values()) if i.name == completion_id), None)
        if item is None or item.key_id != key_id:
            raise NotFound("There is no stored completion with this id.", param="completion_id")
        return item
