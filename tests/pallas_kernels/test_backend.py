"""The choice of a backend: order, objections, the off switch."""

import pytest

from pallas_kernels import backend
from pallas_kernels.backend import Backend, choose_backend, disabled_backends

TABLE = (
    Backend("native", "fast", lambda: None),
    Backend("xla", "portable", lambda: None),
)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_LADDER_DISABLE_BACKENDS", raising=False)
    monkeypatch.setattr(backend, "BACKENDS", TABLE)


def test_the_first_that_runs_is_taken() -> None:
    assert choose_backend(("xla", "native")).name == "native"
    assert choose_backend(("xla",)).name == "xla"


def test_operands_that_do_not_fit_pass_a_backend_over() -> None:
    choice = choose_backend(("native", "xla"), unfit={"native": "takes bfloat16, got float32"})
    assert choice.name == "xla"
    assert choice.reason.endswith("; not native: takes bfloat16, got float32")
    with pytest.raises(NotImplementedError, match="native: takes bfloat16, got float32"):
        choose_backend(("native", "xla"), "native", unfit={"native": "takes bfloat16, got float32"})


def test_the_environment_switches_a_backend_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LADDER_DISABLE_BACKENDS", " native, ")
    choice = choose_backend(("native", "xla"))
    assert (choice.name, "switched off by MOE_LADDER_DISABLE_BACKENDS" in choice.reason) == ("xla", True)
    with pytest.raises(NotImplementedError, match="switched off"):
        choose_backend(("native", "xla"), "native")


def test_a_backend_switched_off_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking may compile."""

    def fail() -> str | None:
        raise AssertionError

    monkeypatch.setattr(backend, "BACKENDS", (Backend("native", "fast", fail), TABLE[1]))
    monkeypatch.setenv("MOE_LADDER_DISABLE_BACKENDS", "native")
    assert choose_backend(("native", "xla")).name == "xla"
    assert choose_backend(("native", "xla"), "xla").name == "xla"


def test_an_unknown_name_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LADDER_DISABLE_BACKENDS", "nativ")
    with pytest.raises(ValueError, match=r"'nativ', which is not one of \('native', 'xla'\)"):
        disabled_backends()
