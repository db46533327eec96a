import pytest

from benchmarks.readme_tree import BEGIN, END, MAX_PHRASE, phrase, with_tree


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Ladder: the set of shapes. Imports no JAX.", "Ladder: the set of shapes"),
        ("`make demo`: starts the server, then stops it.\n\nMore.", "Starts the server, then stops it"),
        ("Reads config.json and *.safetensors. Never twice.", "Reads config.json and *.safetensors"),
        ("Two\nlines here", "Two lines here"),
    ],
)
def test_a_phrase_is_the_first_sentence(docstring: str, expected: str) -> None:
    assert phrase(f'"""{docstring}"""\nx = 1\n') == expected


def test_a_long_sentence_is_cut_at_a_word() -> None:
    found = phrase(f'"""{"word " * 60}"""')
    assert len(found) <= MAX_PHRASE + 4
    assert found.endswith("word ...")
    assert phrase("x = 1\n") == ""


def test_only_what_is_between_the_marks_changes() -> None:
    page = f"head\n{BEGIN}old\n{END}tail\n"
    found = with_tree(page)
    assert found.startswith(f"head\n{BEGIN}```\nruntime/")
    assert found.endswith(f"```\n{END}tail\n")
    assert with_tree(found) == found
    with pytest.raises(ValueError, match="lacks the marks"):
        with_tree("nothing here")
