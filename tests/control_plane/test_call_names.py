"""Names of HTTP calls: found both ways, the newest kept, and never more than so many."""

from control_plane.call_names import CALLS_OF_A_NAME, KEPT_NAMES, CallNames


def test_a_call_is_found_by_its_name_and_the_name_by_the_call() -> None:
    names = CallNames()
    names.add("mine", "cmpl-1")
    names.add("mine", "cmpl-2")
    assert names.calls_of("mine") == ("cmpl-1", "cmpl-2")
    assert (names.name_of("cmpl-2"), names.name_of("cmpl-3"), names.calls_of("yours")) == ("mine", "", ())


def test_neither_many_names_nor_one_that_is_sent_again_and_again_grow() -> None:
    names = CallNames()
    for i in range(3 * KEPT_NAMES):
        names.add("always", f"cmpl-a{i}")
        names.add(f"name-{i}", f"cmpl-b{i}")
    assert len(names.calls_of("always")) == CALLS_OF_A_NAME
    assert names.calls_of("always")[-1] == f"cmpl-a{3 * KEPT_NAMES - 1}"
    assert len(names._by_name) == KEPT_NAMES
    assert len(names._by_call) == KEPT_NAMES - 1 + CALLS_OF_A_NAME
    assert names.name_of("cmpl-b0") == ""
