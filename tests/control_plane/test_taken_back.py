"""Changes that end otherwise than they began: a trial that cannot be ended at once, rungs that nobody wants any more."""

import pytest

from control_plane.config_store import ConfigStore, RevisionStatus
from control_plane.errors import StoreFailed
from control_plane.live_config import RETRY_S
from tests.control_plane.test_live_config import ALPHA, BY, ROWS, SPEC, Setup, setup

__all__ = ["setup"]


def full(store: ConfigStore, revision: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_bad_trial_is_taken_back_as_soon_as_the_disk_has_room(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setup.pass_time(90, itl_s=0.05)
    await setup.live.change(ALPHA, **BY, canary=SPEC)
    with monkeypatch.context() as patched:
        patched.setattr(ConfigStore, "append", full)
        await setup.pass_time(10, itl_s=0.9)
        with pytest.raises(StoreFailed):  # and not 200 with a change that still holds
            await setup.live.revert_canary(actor="cd34", reason="")
        assert setup.live.trial is not None
        assert setup.status(2) is RevisionStatus.CANARY
        assert setup.live.counts["canary_reverted"] == 0
        assert setup.events().count(("revert", "507 store_failed")) <= 2 + 10 / RETRY_S
    await setup.pass_time(int(RETRY_S) + 1, itl_s=0.9)
    assert setup.live.trial is None
    assert setup.status(2) is RevisionStatus.REVERTED
    assert setup.fake.config.batch_processing.alpha == 0.5
    assert setup.live.counts["canary_reverted"] == 1


async def test_rungs_that_were_called_off_are_not_called_applied(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.live.change(ROWS, **BY)
    await setup.live.rollback(1, **BY)
    setup.fake.end_compile()
    await setup.pass_time(1)
    assert (setup.status(2), setup.status(3)) == (RevisionStatus.REVERTED, RevisionStatus.APPLIED)


async def test_rungs_that_a_later_change_keeps_are_applied_with_it(setup: Setup) -> None:
    setup.fake.compiles_at_once = False
    await setup.live.change(ROWS, **BY)
    await setup.live.change({"ladder": {"decode_rows": [1, 64]}}, **BY)
    setup.fake.end_compile()
    await setup.pass_time(1)
    assert setup.status(2) is setup.status(3) is RevisionStatus.APPLIED
