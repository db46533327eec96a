from pathlib import Path

import pytest

from runtime.bench.__main__ import main


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trace", "--trace", "absent.csv"], "absent.csv"),
        (["trace", "--trace", "absent.csv", "--target-busy", "2"], "between 0 and 1"),
        (["offline", "--model", "no-such-folder"], "no-such-folder"),
        (["offline", "--output", "1"], "--output of 2 or more"),
        (["offline", "--set", "nonsense"], "write KEY=VALUE"),
        (
            ["offline", "--set", "ladder.max_prefil_tokens=4"],
            "nearest known key is ladder.max_prefill_tokens",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}'
    )
    if argv[0] == "offline" and "--model" not in argv:
        argv = [*argv, "--model", str(tmp_path)]
    assert main([*argv]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
