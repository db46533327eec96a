"""ConfigState: the configuration a server starts with, from the YAML file and what operators changed before.

Opened before the engine is built, so that changes that need a restart take hold. Whatever is stored, a server starts.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from control_plane.audit import AuditLog
from control_plane.config_document import FILE_ONLY, checked, document, undone
from control_plane.config_store import ConfigStore, Revision, RevisionStatus
from control_plane.errors import InvalidConfig
from control_plane.merge_patch import diff, leaves, merge
from control_plane.whole_files import LockedFolder
from runtime.config import EngineConfig
from runtime.engine.reconfigure import diff_fields

SERVER = "server"  # the actor of what no operator did
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConfigState:
    """file: what YAML and command line say. config: with the stored overrides on top, what is served.

    folder: None where nothing survives a restart.
    """

    file: EngineConfig
    config: EngineConfig
    store: ConfigStore
    audit: AuditLog
    folder: LockedFolder | None = None

    def close(self) -> None:
        """Writes what is only counted yet and lets another server have the folder."""
        with suppress(OSError):
            self.audit.flush_refused()
        if self.folder is not None:
            self.folder.close()


def state_folder(config: EngineConfig) -> Path | None:
    """Where versions and audit are kept; None for `off` and for a port that is another one each time."""
    server = config.server
    if server.state_dir == "off":
        return None
    if server.state_dir:
        return Path(server.state_dir).expanduser()
    return Path("~/.local/state/moe-ladder").expanduser() / str(server.port) if server.port else None


def in_memory(file: EngineConfig) -> ConfigState:
    """A state that ends with the process."""
    return _start(file, ConfigStore(None), AuditLog(None), None, time.time)


def open_state(file: EngineConfig, clock: Callable[[], float] = time.time) -> ConfigState:
    """The state in `state_folder(file)`, repaired. clock: Unix seconds.

    Raises FolderLocked, and OSError where a folder that the file names cannot be used; without the default folder
    nothing survives, but the server starts.
    """
    path = state_folder(file)
    if path is None:
        return _start(file, ConfigStore(None), AuditLog(None, clock), None, clock)
    folder: LockedFolder | None = None
    try:
        folder = LockedFolder(path)
        return _start(file, ConfigStore(path), AuditLog(path, clock), folder, clock)
    except BaseException as error:
        if folder is not None:
            folder.close()
        if file.server.state_dir or not isinstance(error, OSError):
            raise
        log.warning("%s cannot be used (%s): changes will not survive a restart", path, error.strerror)
        return _start(file, ConfigStore(None), AuditLog(None, clock), None, clock)


def fingerprint(found: dict[str, Any]) -> str:
    """SHA-256 of a document."""
    return hashlib.sha256(orjson.dumps(found, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _start(
    file: EngineConfig,
    store: ConfigStore,
    audit: AuditLog,
    folder: LockedFolder | None,
    clock: Callable[[], float],
) -> ConfigState:
    for name in store.damaged:
        audit.append("damaged", actor=SERVER, detail=f"{name} could not be read and was set aside")
    newest = store.newest
    if newest is not None and newest.number > audit.last_revision > 0:
        text = "the server ended between storing this revision and writing it down here"
        audit.append(
            "recovered", actor=newest.actor, revision=newest.number, reason=newest.reason, detail=text
        )
    stored, undoing = _unproven_undone(file, store, newest.overrides if newest else {})
    config, error = _fitting(file, stored)
    found = document(config)
    if newest is None or newest.base != fingerprint(found):
        reason = (
            error
            or undoing
            or ("first start" if newest is None else "the file, or what a version makes of it, has changed")
        )
        previous = _fitting(file, newest.overrides)[0] if newest is not None and not error else config
        revision = Revision(
            number=store.next_number,
            time_s=clock(),
            actor=SERVER,
            reason=reason[:500],
            overrides=diff(document(file), found),
            changes=diff_fields(previous, config),
            base=fingerprint(found),
            error=error[:2000],
        )
        store.append(revision)
        audit.append(
            "start", actor=SERVER, revision=revision.number, reason=revision.reason, result="applied"
        )
    return ConfigState(file, config, store, audit, folder)


def _unproven_undone(
    file: EngineConfig, store: ConfigStore, overrides: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """The overrides without what was still compiling or on trial when the server ended, and a sentence about that."""
    base = document(file)
    found = merge(base, overrides)
    reason = ""
    for revision in store.page(None, 1 << 30):
        if revision.status in (RevisionStatus.COMPILING, RevisionStatus.CANARY):
            log.warning("revision %d was %s when the server ended: undone", revision.number, revision.status)
            error = f"the server ended while it was {revision.status}"
            reason = reason or f"revision {revision.number} was not proven: {error}"
            store.update(revision.number, RevisionStatus.REVERTED, error=error)
            found = undone(found, revision.changes)
    return diff(base, found), reason


def _fitting(file: EngineConfig, overrides: dict[str, Any]) -> tuple[EngineConfig, str]:
    """The file's configuration with the overrides, or without them and why they do not fit."""
    if not overrides:
        return file, ""
    try:
        if stray := FILE_ONLY & {path for path, _ in leaves(overrides)}:
            raise InvalidConfig(f"{min(stray)} may be set in the file only")
        return checked(merge(document(file), overrides)), ""
    except InvalidConfig as fault:
        log.error("the stored changes do not fit the file, which is served as it is: %s", fault.message)
        return file, f"the stored changes do not fit the file, which is served as it is: {fault.message}"
