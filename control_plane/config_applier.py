"""ConfigApplier: carries one checked change through store, engine and audit, and takes changes back.

It decides nothing and holds no lock: LiveConfig calls it for one change at a time.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson

from control_plane.audit import AuditLog
from control_plane.config_document import FILE_ONLY, checked, document, undone
from control_plane.config_state import ConfigState, fingerprint
from control_plane.config_store import MAX_OVERRIDE_BYTES, ConfigStore, Revision, RevisionStatus
from control_plane.engine_handle import EngineHandle
from control_plane.errors import InvalidConfig, StoreFailed
from control_plane.live_audit import audit_change, audit_refusal
from control_plane.merge_patch import diff, leaves, merge, same
from runtime.config import EngineConfig
from runtime.engine.change import Applied, ChangeKind, ConfigChange, FieldChange, LadderState
from runtime.engine.reconfigure import NO_START, diff_fields
from runtime.errors import InvalidRequest, RuntimeFault, Unavailable

CONFIGURE_TIMEOUT_S = 30.0  # a step, or the warming of a rung, may stand before it
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Author:
    """Who wants a change and why, for history and audit."""

    actor: str
    reason: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """Revisions that waited for rungs; `error` names the rung that failed, None when all serve."""

    numbers: tuple[int, ...]
    error: str | None


class ConfigApplier:
    """Owns the stored configuration. publish: called with the configuration in force after every change.

    `newest`, `stored` and `effective` move together, in one go after the engine has taken a change: whoever reads a
    revision with values of the one before would overwrite what came between.
    """

    def __init__(
        self,
        engine: EngineHandle,
        state: ConfigState,
        publish: Callable[[EngineConfig], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._publish, self._wall_clock = engine, publish, wall_clock
        self._file = document(state.file)
        self._ladder_number = engine.snapshot().ladder_change.number
        self.store: ConfigStore = state.store
        self.audit: AuditLog = state.audit
        found = state.store.newest
        assert found is not None, "a state starts with a revision"
        self.newest, self.stored, self.effective = found, state.config, engine.config
        self.compiling: list[int] = []  # revisions that wait for the ladder's change
        self.counts: Counter[str] = Counter()  # results of changes, for /metrics

    def document_of(self, revision: Revision) -> dict[str, Any]:
        """What that revision would be over today's file."""
        return merge(self._file, revision.overrides)

    def planned(self, target: dict[str, Any], must_start: bool = True) -> tuple[EngineConfig, ConfigChange]:
        """The configuration of a document and what it would change against `stored`. Raises InvalidConfig, Unavailable.

        must_start: what the next start would refuse is refused now; else it is a warning.
        """
        config = checked(target)
        fields = diff_fields(self.stored, config)
        for change in fields:
            if change.path in FILE_ONLY:
                raise InvalidConfig(f"{change.path} may be set in the file only.", param=change.path)
        num_bytes = len(orjson.dumps(diff(self._file, document(config))))
        if num_bytes > MAX_OVERRIDE_BYTES:
            raise InvalidConfig(
                f"What differs from the file takes {num_bytes} bytes, more than {MAX_OVERRIDE_BYTES}.",
                param="patch",
            )
        try:
            found = self._engine.plan(config, must_start)
        except InvalidRequest as fault:
            raise InvalidConfig(fault.message, param=fault.param) from None
        return config, replace(found, fields=fields)

    async def commit(
        self,
        event: str,
        config: EngineConfig,
        change: ConfigChange,
        author: Author,
        canary: dict[str, Any] | None = None,
        rolled_back_to: int | None = None,
    ) -> Revision:
        """Stores the revision, then has the engine take it; the other way round a full disk would lose what holds.

        canary: what it is on trial for. Raises StoreFailed, InvalidConfig, Unavailable, and then nothing has changed.
        """
        found = document(config)
        needs_rungs = _asks_for_rungs(change.fields) and bool(change.rungs_to_add or change.rungs_to_drop)
        in_force = RevisionStatus.CANARY if canary else RevisionStatus.APPLIED
        revision = Revision(
            number=self.store.next_number,
            time_s=self._wall_clock(),
            actor=author.actor,
            reason=author.reason,
            request_id=author.request_id,
            status=RevisionStatus.COMPILING if needs_rungs else in_force,
            overrides=diff(self._file, found),
            changes=change.fields,
            base=fingerprint(found),
            canary=canary,
            rolled_back_to=rolled_back_to,
        )
        try:
            await asyncio.to_thread(self.store.append, revision)
        except OSError as error:
            log.exception("the configuration could not be stored")
            raise StoreFailed(f"The change could not be stored: {error.strerror}.") from None
        try:
            applied = await self._configure(config)
        except BaseException:
            self.store.discard(revision.number)
            raise
        self.newest, self.stored, self.effective = revision, config, self._engine.config
        self._publish(self.effective)
        self.counts["applied"] += 1
        revision = await self._follow_ladder(revision, applied, in_force)
        await audit_change(self.audit, event, revision, str(revision.status))
        return revision

    async def take_back(
        self, numbers: Sequence[int], status: RevisionStatus, author: Author, error: str, **fields: Any
    ) -> Revision:
        """A new revision without what the given ones changed; then notes what became of those, with `fields`.

        What does not hold must not stay, so this is not refused for what the next start would say to the rest, which may
        be a later revision's: the new revision's reason warns of it. Raises what `commit` does, told and audited; their
        status then stays what it was, and the next start takes them back.
        """
        self.compiling = [n for n in self.compiling if n not in numbers]
        target = document(self.stored)
        for number in reversed(numbers):
            if revision := self.store.get(number):
                target = undone(target, revision.changes)
        result = self.newest
        try:
            config, change = self.planned(target, must_start=False)
            if change.fields:
                reason = "; ".join((*_start_troubles(change), author.reason))[:500]
                result = await self.commit("revert", config, change, replace(author, reason=reason))
        except RuntimeFault as fault:
            log.exception("revision %s could not be taken back", numbers)
            await audit_refusal(self.audit, "revert", author, {}, fault, self.newest.number)
            raise
        self.counts[str(status)] += 1
        for number in numbers:
            await self.note(number, status, error=error[:2000], **fields)
            if revision := self.store.get(number):
                await audit_change(self.audit, "outcome", revision, str(status), by=author)
        return result

    def settled(self) -> Settled | None:
        """The revisions whose ladder change has ended, once; None while there is nothing to tell."""
        ladder = self._engine.snapshot().ladder_change
        if not self.compiling or ladder.number < self._ladder_number or ladder.state is LadderState.COMPILING:
            return None
        numbers, self.compiling = self.compiling, []
        return Settled(tuple(numbers), ladder.error if ladder.state is LadderState.FAILED else None)

    def is_overtaken(self, number: int) -> bool:
        """Whether later revisions replaced every field that this one needed rungs for: those never served."""
        now, revision = dict(leaves(document(self.stored))), self.store.get(number)
        asked = [c for c in revision.changes if c.kind is ChangeKind.RECOMPILE] if revision else []
        return bool(asked) and not any(same(now.get(c.path), c.new) for c in asked)

    async def note(self, number: int, status: RevisionStatus, **fields: Any) -> Revision | None:
        """What became of a revision; a disk that is full must not stop what follows."""
        try:
            found = await asyncio.to_thread(self.store.update, number, status, **fields)
            if found is not None and number == self.newest.number:
                self.newest = found
            return found
        except OSError:
            log.exception("the status of revision %d could not be stored", number)
            return self.store.get(number)

    async def _follow_ladder(
        self, revision: Revision, applied: Applied, in_force: RevisionStatus
    ) -> Revision:
        """Whether the revision waits for rungs, as the engine tells it rather than as it was planned."""
        is_new = applied.ladder.number > self._ladder_number
        self._ladder_number = max(self._ladder_number, applied.ladder.number)
        status = in_force
        if is_new and applied.ladder.state is not LadderState.STEADY and _asks_for_rungs(revision.changes):
            self.compiling.append(revision.number)
            status = RevisionStatus.COMPILING
        if status is revision.status:
            return revision
        return await self.note(revision.number, status) or revision

    async def _configure(self, config: EngineConfig) -> Applied:
        try:
            taken = asyncio.wrap_future(self._engine.configure(config))
            return await asyncio.wait_for(asyncio.shield(taken), CONFIGURE_TIMEOUT_S)
        except InvalidRequest as fault:
            raise InvalidConfig(fault.message, param=fault.param) from None
        except TimeoutError:
            with suppress(RuntimeFault):
                self._engine.configure(self.stored)  # should it wake up, it ends with what is shown
            raise Unavailable("The engine did not take the change in time.", retry_after_s=5) from None


def _start_troubles(change: ConfigChange) -> list[str]:
    found = [warning[:240] for warning in change.warnings if warning.startswith(NO_START)]
    for warning in found:
        log.warning("what was taken back leaves a configuration with a trouble: %s", warning)
    return found


def _asks_for_rungs(fields: Sequence[FieldChange]) -> bool:
    """False for what holds at once, though rungs of an earlier revision may still be compiling."""
    return any(change.kind is ChangeKind.RECOMPILE for change in fields)
