"""Flags are added once, and the operator's own stay."""

import os

from runtime.xla_flags import set_xla_flags

NAME = "--xla_cpu_prefer_vector_width"


def test_missing_flags_are_added_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    set_xla_flags()
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=/x {NAME}=512"


def test_the_environment_wins(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{NAME}=256")
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == f"{NAME}=256"
