"""Flags are added once, and the operator's own stay."""

import os

import pytest

from runtime.xla_flags import DOT_MERGER, check_overlap_flags, set_xla_flags

NAME = "--xla_cpu_prefer_vector_width"


def test_missing_flags_are_added_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    set_xla_flags()
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=/x {NAME}=512 {DOT_MERGER}=0"


def test_the_environment_wins(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{NAME}=256")
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == f"{NAME}=256 {DOT_MERGER}=0"


def test_overlap_needs_the_dot_merger_off(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{DOT_MERGER}=64")
    set_xla_flags()
    with pytest.raises(ValueError, match=f"{DOT_MERGER} is 64"):
        check_overlap_flags()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ValueError, match="not set"):
        check_overlap_flags()
    set_xla_flags()
    check_overlap_flags()
