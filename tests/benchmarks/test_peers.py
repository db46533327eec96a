from benchmarks.peers import case_name, paired


def entry(ours: float, theirs: float) -> dict:
    return {"ours": {"rates": {"decode 8 x 128": ours}}, "vllm": {"rates": {"decode 8 x 128": theirs}}}


def test_ratios_are_taken_within_a_round_so_that_drift_drops_out() -> None:
    # the machine became twice as slow between the rounds; the ratio of medians would say 0.625
    found = paired([entry(100.0, 80.0), entry(50.0, 40.0), entry(48.0, 80.0)])
    assert found == [
        {
            "case": "decode 8 x 128",
            "ours_tokens_s": 50.0,
            "vllm_tokens_s": 80.0,
            "ratio": 1.25,
            "ratios": [1.25, 1.25, 0.6],
        }
    ]


def test_cases_of_both_sides_have_the_same_names() -> None:
    assert case_name("decode", {"concurrency": 8, "input": 128, "output": 64}) == "decode 8 x 128"
