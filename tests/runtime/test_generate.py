import pytest

from runtime.generate import main, offline_config


def test_one_text_needs_one_row_and_few_rungs() -> None:
    config = offline_config("demo")
    assert config.model.path == ""
    assert config.batch_processing.max_batch_size == 1
    assert len(config.ladder.prefill_tokens) <= 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-folder", "x"], "no config.json"),
        (["demo", "x", "--max-tokens", "100000"], "the context holds"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert message in " ".join(found.err.split())


@pytest.mark.parametrize("argv", [["demo", "x", "--max-tokens", "0"], ["demo", "x", "--temperature", "nan"]])
def test_wrong_numbers_are_refused_before_anything_loads(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2


def test_the_text_is_streamed_and_repeats_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["demo", "My dear", "--max-tokens", "9", "--temperature", "1", "--seed", "5"]
    assert main(argv) == 0
    first = capsys.readouterr()
    assert first.out.strip()
    assert "9 new (length)" in " ".join(first.err.split())
    assert main(argv) == 0
    assert capsys.readouterr().out == first.out
