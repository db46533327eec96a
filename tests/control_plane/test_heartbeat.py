"""Liveness by the step counter."""

from control_plane.heartbeat import Heartbeat
from tests.control_plane.fake_engine import FakeEngine


def test_only_queued_work_without_steps_is_a_stall(engine: FakeEngine) -> None:
    now = 0.0
    heartbeat = Heartbeat(10, clock=lambda: now)
    assert heartbeat.observe(engine.snapshot(), 0)
    now = 100  # idle for long, then work arrives
    assert heartbeat.observe(engine.snapshot(), 1)
    now = 109
    assert heartbeat.observe(engine.snapshot(), 1)
    now = 111
    assert not heartbeat.observe(engine.snapshot(), 1)
    engine.num_steps += 1
    assert heartbeat.observe(engine.snapshot(), 1)
    now = 200
    assert heartbeat.observe(engine.snapshot(), 0)
