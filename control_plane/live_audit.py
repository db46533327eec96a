"""The audit's lines about configuration changes: bounded, without secrets, and never in the way of the change."""

import asyncio
import logging
import re
from typing import Any, Protocol

import orjson

from control_plane.audit import AuditLog
from control_plane.config_document import SECRETS
from control_plane.config_store import Revision
from control_plane.errors import clean
from control_plane.merge_patch import is_too_deep, leaves
from runtime.engine.change import FieldChange
from runtime.errors import RuntimeFault

MAX_VALUE_CHARS = 500
MAX_PATHS = 64
_INPUT = re.compile(r" \(got .*?\)(?=;|$)", re.DOTALL)
log = logging.getLogger(__name__)


class Who(Protocol):
    """Who wanted it and why."""

    @property
    def actor(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def request_id(self) -> str: ...


async def audit_change(
    audit: AuditLog, event: str, revision: Revision, result: str, by: Who | None = None
) -> None:
    """A line about a revision. `by`: who decided on it later; None: its author, and the revision is new."""
    who = by or revision
    key = "revision" if event in ("change", "rollback", "revert") else "about"
    facts: dict[str, Any] = {
        key: revision.number,
        "actor": who.actor,
        "reason": who.reason,
        "request_id": who.request_id,
        "result": result,
    }
    if key == "revision":
        facts["changes"] = [_change(change) for change in revision.changes]
        if revision.rolled_back_to is not None:
            facts["rolled_back_to"] = revision.rolled_back_to
    if revision.canary is not None:
        facts["canary"] = revision.canary
    if revision.error:
        facts["error"] = revision.error
    await _write(audit.append, event, facts)


async def audit_order(
    audit: AuditLog, event: str, author: dict[str, str], order: dict[str, Any], result: str
) -> None:
    """A line about an order that is no change of the configuration."""
    facts = author | {"result": result, "order": _bounded(order)}
    await _write(audit.append if result == "done" else audit.append_refused, event, facts)


async def audit_refusal(
    audit: AuditLog, event: str, who: Who, patch: dict[str, Any], fault: RuntimeFault, current: int
) -> None:
    """A line about a try that changed nothing: which fields it named, not with which values."""
    paths = [] if is_too_deep(patch) else [path[:128] for path, _ in leaves(patch)]
    facts = {
        "actor": who.actor,
        "reason": who.reason,
        "request_id": who.request_id,
        "result": f"{fault.status} {fault.code}",
        "error": clean(_INPUT.sub("", fault.message), MAX_VALUE_CHARS),
        "fields": paths[:MAX_PATHS],
        "about": current,
    }
    await _write(audit.append_refused, event, facts)


def _change(change: FieldChange) -> dict[str, Any]:
    if change.path in SECRETS:
        return {"path": change.path, "kind": change.kind, "old": "<redacted>", "new": "<redacted>"}
    return {
        "path": change.path,
        "kind": change.kind,
        "old": _bounded(change.old),
        "new": _bounded(change.new),
    }


def _bounded(value: Any) -> Any:
    text = orjson.dumps(value).decode()
    return value if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


async def _write(write: Any, event: str, facts: dict[str, Any]) -> None:
    """A change that has happened is not undone because its line could not be written; the log says so loudly."""
    try:
        await asyncio.to_thread(write, event, **facts)
    except OSError:
        log.exception("the audit could not be written: %s %s", event, facts.get("result"))
