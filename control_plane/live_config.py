"""LiveConfig: the one place where the configuration of a serving engine changes. On the event loop's thread.

Changes come one after another under a lock. What is shown is what is in force: a change whose rungs cannot be compiled,
or which loses its trial, is taken back by a revision of its own.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import orjson

from control_plane.audit import AuditLog
from control_plane.canary import (
    CanarySpec,
    Measured,
    Outcome,
    Sample,
    SampleRing,
    Trial,
    Verdict,
    judge,
    measure,
    sample,
)
from control_plane.config_applier import Author, ConfigApplier
from control_plane.config_document import document
from control_plane.config_state import SERVER, ConfigState
from control_plane.config_store import MAX_OVERRIDE_BYTES, ConfigStore, Revision, RevisionStatus
from control_plane.engine_handle import EngineHandle
from control_plane.errors import ChangeLocked, InvalidConfig, NotFound, StaleRevision
from control_plane.live_audit import audit_change, audit_refusal
from control_plane.merge_patch import is_too_deep, merge
from runtime.config import EngineConfig
from runtime.engine.change import ChangeKind, ConfigChange, FieldChange
from runtime.engine.reconfigure import diff_fields
from runtime.errors import RuntimeFault

FLUSH_S = 60.0
RETRY_S = 5.0
log = logging.getLogger(__name__)


class LiveConfig:
    """Plans, applies, tries, takes back. `tick` must be called several times a second.

    publish: called with the configuration in force after every change. clock: monotonic seconds; wall_clock: Unix.
    """

    def __init__(
        self,
        engine: EngineHandle,
        state: ConfigState,
        publish: Callable[[EngineConfig], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._applier = ConfigApplier(engine, state, publish, wall_clock)
        self._lock = asyncio.Lock()
        self._ring = SampleRing()
        self._flushed_s = clock()
        self._retry_s = clock()  # when a trial that could not be ended is looked at again
        self.trial: Trial | None = None

    # -- what is -------------------------------------------------------------------------------------------------

    @property
    def store(self) -> ConfigStore:
        return self._applier.store

    @property
    def audit(self) -> AuditLog:
        return self._applier.audit

    @property
    def counts(self) -> Counter[str]:
        """Results of changes: applied, unchanged, failed, reverted, and the codes of refusals."""
        return self._applier.counts

    @property
    def newest(self) -> Revision:
        return self._applier.newest

    @property
    def revision(self) -> int:
        return self.newest.number

    @property
    def effective(self) -> EngineConfig:
        """What is in force: fields of kind `restart` as at the start."""
        return self._applier.effective

    @property
    def stored(self) -> EngineConfig:
        """What the next start will serve, if the file stays as it is."""
        return self._applier.stored

    @property
    def pending_restart(self) -> tuple[str, ...]:
        """Fields that are stored and not yet in force."""
        found = diff_fields(self.effective, self.stored)
        return tuple(change.path for change in found if change.kind is ChangeKind.RESTART)

    def history(self, before: int | None, limit: int) -> list[Revision]:
        """Up to `limit` revisions with numbers below `before`, newest first; not one that is only just being made."""
        return self.store.page(min(before or self.revision + 1, self.revision + 1), limit)

    def document_of(self, revision: Revision) -> dict[str, Any]:
        """What a revision would be over today's file."""
        return self._applier.document_of(revision)

    def verdict(self, trial: Trial) -> Verdict:
        """How a trial stands now."""
        return judge(trial, self._sample())

    def left_s(self, trial: Trial) -> float | None:
        """Seconds until a trial is judged; None while it waits for its rungs."""
        return None if trial.end_s is None else max(0.0, trial.end_s - self._clock())

    # -- changes -------------------------------------------------------------------------------------------------

    async def plan(self, patch: dict[str, Any], canary: CanarySpec | None = None) -> ConfigChange:
        """What `change` would do; nothing happens. Raises InvalidConfig, Unavailable."""
        change = self._applier.planned(self._patched(patch))[1]
        if canary is not None:
            self._check_canary(canary, change.fields)
        return change

    async def change(
        self,
        patch: dict[str, Any],
        *,
        if_match: int | None,
        actor: str,
        reason: str,
        request_id: str = "",
        canary: CanarySpec | None = None,
    ) -> Revision:
        """Applies an RFC 7396 patch over `stored`; null gives a field its default back.

        Returns the new revision, or the current one when nothing differs. if_match: the revision that the patch was made
        for; None: whatever is current. Raises StaleRevision, InvalidConfig, ChangeLocked, StoreFailed, Unavailable, and
        then nothing has changed.
        """
        author = Author(actor, reason, request_id)
        return await self._guarded("change", author, if_match, patch, lambda: self._patched(patch), canary)

    async def rollback(
        self, revision: int, *, if_match: int | None, actor: str, reason: str, request_id: str = ""
    ) -> Revision:
        """A new revision with an old one's overrides. Raises as `change` does, and NotFound."""

        def target() -> dict[str, Any]:
            old = self.store.get(revision)
            if old is None:
                raise NotFound(f"Revision {revision} is not kept.", param="revision")
            return self._applier.document_of(old)

        author = Author(actor, reason, request_id)
        return await self._guarded("rollback", author, if_match, {}, target, None, rolled_back_to=revision)

    async def accept_canary(self, *, actor: str, reason: str, request_id: str = "") -> Revision:
        """Ends the trial in favour of the change. Raises NotFound when there is none."""
        return await self._end_by_hand(Outcome.ACCEPTED, Author(actor, reason, request_id))

    async def revert_canary(self, *, actor: str, reason: str, request_id: str = "") -> Revision:
        """Ends the trial and takes the change back. Raises NotFound when there is none."""
        return await self._end_by_hand(Outcome.REVERTED, Author(actor, reason, request_id))

    async def tick(self) -> None:
        """Samples the engine, and ends what was compiling or on trial when it is time."""
        now_s = self._clock()
        self._ring.add(sample(self._engine.snapshot(), now_s))
        if now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            await asyncio.to_thread(self.audit.flush_refused)
        if self._applier.compiling or self.trial:
            await _to_the_end(self._watch())

    # -- one change ----------------------------------------------------------------------------------------------

    def _patched(self, patch: dict[str, Any]) -> dict[str, Any]:
        if is_too_deep(patch):
            raise InvalidConfig("The patch is nested too deeply.", param="patch")
        if (
            num_bytes := len(orjson.dumps(patch))
        ) > MAX_OVERRIDE_BYTES:  # before any of its values is looked at
            raise InvalidConfig(
                f"The patch takes {num_bytes} bytes, more than {MAX_OVERRIDE_BYTES}.", param="patch"
            )
        return merge(document(self.stored), patch)

    async def _guarded(
        self,
        event: str,
        author: Author,
        if_match: int | None,
        patch: dict[str, Any],
        target: Callable[[], dict[str, Any]],
        canary: CanarySpec | None = None,
        rolled_back_to: int | None = None,
    ) -> Revision:
        """From check to audit, under the lock."""

        async def attempt() -> Revision:
            async with self._lock:
                try:
                    self._require_turn(if_match)
                    config, change = self._applier.planned(target())
                    if canary is not None:
                        return await self._try(config, change, author, canary)
                    if not change.fields:
                        self.counts["unchanged"] += 1
                        return self.newest
                    return await self._applier.commit(
                        event, config, change, author, rolled_back_to=rolled_back_to
                    )
                except RuntimeFault as fault:
                    self.counts[fault.code] += 1
                    await audit_refusal(self.audit, event, author, patch, fault, self.revision)
                    raise

        return await _to_the_end(attempt())

    def _require_turn(self, if_match: int | None) -> None:
        if if_match is not None and if_match != self.revision:
            raise StaleRevision(
                f"Revision {if_match} is not the current one, which is {self.revision}; read it and try again.",
                self.revision,
            )
        if self.trial is not None:
            raise ChangeLocked(
                f"Revision {self.trial.revision} is on trial; accept it, revert it or wait for its end."
            )

    async def _try(
        self, config: EngineConfig, change: ConfigChange, author: Author, spec: CanarySpec
    ) -> Revision:
        before = self._check_canary(spec, change.fields)
        facts = {"spec": asdict(spec), "before": asdict(before)}
        revision = await self._applier.commit("change", config, change, author, facts)
        is_waiting = revision.status is RevisionStatus.COMPILING
        self.trial = Trial(revision.number, spec, before, None if is_waiting else self._sample())
        return revision

    def _check_canary(self, spec: CanarySpec, fields: Sequence[FieldChange]) -> Measured:
        """What the metric was until now. Raises InvalidConfig where a trial could tell nothing."""
        if not fields:
            raise InvalidConfig("The patch changes nothing that could be tried.", param="canary")
        if late := [change.path for change in fields if change.kind is ChangeKind.RESTART]:
            raise InvalidConfig(f"{late[0]} needs a restart and cannot be tried before.", param="canary")
        now = self._sample()
        before = measure(spec.metric, self._ring.since(now.time_s - spec.guard_period_s), now)
        if before.num_seen < spec.min_requests or before.value is None:
            raise InvalidConfig(
                f"{spec.metric} was seen {before.num_seen} times in the last {before.span_s:.0f} s; a trial needs "
                f"min_requests of {spec.min_requests} to compare with.",
                param="canary.min_requests",
            )
        return before

    def _sample(self) -> Sample:
        return sample(self._engine.snapshot(), self._clock())

    # -- what ends later -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        async with self._lock:
            await self._watch_ladder()
            await self._watch_trial()

    async def _watch_ladder(self) -> None:
        settled = self._applier.settled()
        if settled is None:
            return
        if settled.error is not None:
            if self.trial is not None and self.trial.revision in settled.numbers:
                self.trial = None
            names = ", ".join(map(str, settled.numbers))
            author = Author(SERVER, f"revision {names} is taken back: {settled.error}")
            with suppress(RuntimeFault):  # told; the next start takes them back
                await self._applier.take_back(settled.numbers, RevisionStatus.FAILED, author, settled.error)
            return
        for number in settled.numbers:
            is_overtaken = self._applier.is_overtaken(number)
            status = RevisionStatus.REVERTED if is_overtaken else RevisionStatus.APPLIED
            if self.trial is not None and self.trial.revision == number:
                self.trial = replace(self.trial, start=self._sample())
                status = RevisionStatus.CANARY
            if revision := await self._applier.note(number, status):
                await audit_change(self.audit, "compiled", revision, str(status))

    async def _watch_trial(self) -> None:
        if self.trial is None or self._clock() < self._retry_s:
            return
        verdict = self.verdict(self.trial)
        if verdict.outcome is Outcome.EXTENDED:
            self.trial = replace(self.trial, is_extended=True)
            if revision := self.store.get(self.trial.revision):
                await audit_change(self.audit, "canary", revision, verdict.reason)
        elif verdict.outcome is not Outcome.RUNNING:
            try:
                await self._end_trial(self.trial, verdict, Author(SERVER, verdict.reason))
            except RuntimeFault:  # told; the trial goes on until the change can be taken back
                self._retry_s = self._clock() + RETRY_S

    async def _end_by_hand(self, outcome: Outcome, author: Author) -> Revision:
        async def end() -> Revision:
            async with self._lock:
                if self.trial is None:
                    raise NotFound("No change is on trial.")
                reason = author.reason or f"{outcome} by hand"
                verdict = replace(self.verdict(self.trial), outcome=outcome, reason=reason)
                return await self._end_trial(self.trial, verdict, replace(author, reason=reason))

        return await _to_the_end(end())

    async def _end_trial(self, trial: Trial, verdict: Verdict, author: Author) -> Revision:
        canary = {
            "spec": asdict(trial.spec),
            "before": asdict(trial.before),
            "since": asdict(verdict.since),
            "worse_percent": verdict.worse_percent,
            "outcome": verdict.outcome.value,
            "reason": verdict.reason,
        }
        if verdict.outcome is Outcome.ACCEPTED:
            is_waiting = trial.revision in self._applier.compiling
            status = RevisionStatus.COMPILING if is_waiting else RevisionStatus.APPLIED
            revision = await self._applier.note(trial.revision, status, canary=canary) or self.newest
            self._forget_trial(verdict)
            await audit_change(self.audit, "canary", revision, "accepted", by=author)
            return revision
        author = replace(author, reason=f"canary of revision {trial.revision} reverted: {author.reason}")
        revision = await self._applier.take_back(
            [trial.revision], RevisionStatus.REVERTED, author, verdict.reason, canary=canary
        )
        self._forget_trial(verdict)
        return revision

    def _forget_trial(self, verdict: Verdict) -> None:
        self.trial = None
        self.counts[f"canary_{verdict.outcome}"] += 1


async def _to_the_end[T](work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that goes on when its caller is cancelled: half a change must not be left."""
    task: Awaitable[T] = asyncio.ensure_future(work)
    return await asyncio.shield(task)
