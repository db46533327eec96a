"""Messages and commands over the wire: what was sent comes back, and nothing else is taken for a message."""

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from runtime.engine.device_commands import (
    CompileRungs,
    KeepRungs,
    LeanRouter,
    MoveWeights,
    RunStep,
    ScorePrompt,
    SetBalanceWeight,
    SetMask,
    WriteRow,
    from_message,
    to_message,
)
from runtime.engine.host_frames import HEADER, BadFrame, body_len, from_body, to_frame
from runtime.experts.exchange_kind import ExchangeKind
from runtime.ladder.bucket import Bucket
from runtime.schedule.plan import Phase

INTS = np.arange(6, dtype=np.int32)
BUCKETS = (
    Bucket(Phase.PREFILL, 64, 4, ExchangeKind.ALL_TO_ALL, 2),
    Bucket(Phase.DECODE, 8, 8),
)
COMMANDS = [
    WriteRow(np.array(3, np.int32), 7, np.array([0.5], np.float32), INTS, ()),
    WriteRow(INTS[:2], 7, INTS.astype(np.float32), INTS, (INTS.astype(np.float32), INTS > 2, INTS)),
    SetMask(INTS[:, None], INTS[None]),
    RunStep("prefill-64x4", True, INTS.reshape(2, 3), 4),
    ScorePrompt(np.array(1, np.int32), INTS),
    MoveWeights(1, np.array([3, 2, -1, -1, 0, 3, 1, -1], np.int32)),
    SetBalanceWeight(0.25),
    LeanRouter(1, INTS.astype(np.float32)),
    CompileRungs(BUCKETS),
    KeepRungs(()),
]


def over_the_wire(message: list) -> list:
    frame = to_frame(message)
    assert body_len(frame[: HEADER.size], 1 << 20) == len(frame) - HEADER.size
    return from_body(frame[HEADER.size :])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_a_command_comes_back(command) -> None:
    back = from_message(over_the_wire(to_message(command)))
    assert type(back) is type(command)
    np.testing.assert_equal(to_message(back), [*to_message(command)])
    for sent, got in zip(to_message(command), to_message(back), strict=True):
        if isinstance(sent, np.ndarray):
            assert (sent.dtype, sent.shape) == (got.dtype, got.shape)


@given(
    hnp.arrays(st.sampled_from([np.int32, np.float32, np.bool_]), hnp.array_shapes(min_dims=0, min_side=0))
)
def test_arrays_come_back_bit_by_bit(array) -> None:
    back = over_the_wire(["x", array])[1]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(st.binary(max_size=64))
def test_random_bytes_are_no_crash(body) -> None:
    try:
        message = from_body(body)
        assert isinstance(message[0], str)
        from_message(message)
    except BadFrame:
        pass


def array_of(head: object, data: bytes) -> bytes:
    packer: Any = msgpack.packb
    return packer(["x", msgpack.ExtType(1, packer(head) + data)])


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb({"kind": 1}),
        msgpack.packb([]),
        msgpack.packb([1, 2]),
        msgpack.packb(["x"]) + b"more",
        b"\x91" * 100_000,  # a list in a list in a list
        msgpack.packb(["x", msgpack.ExtType(9, b"")]),
        array_of(["<i4", [2]], b"\0" * 4),
        array_of(["<i4", [-1]], b"\0" * 4),
        array_of(["<i4", [1 << 40]], b""),
        array_of(["|O", [1]], b"\0" * 8),
        array_of(["<i4", [1] * 9], b"\0" * 4),
        array_of(7, b""),
        msgpack.packb(["x", msgpack.ExtType(2, msgpack.packb(["decode", 0, 1, "local", 1]))]),
        msgpack.packb(["x", msgpack.ExtType(2, msgpack.packb(["nap", 1, 1, "local", 1]))]),
        msgpack.packb(["x", msgpack.ExtType(2, msgpack.packb([]))]),
    ],
)
def test_what_is_no_message_is_refused(body) -> None:
    with pytest.raises(BadFrame):
        from_body(body)


@pytest.mark.parametrize(
    "message",
    [
        ["Nothing"],
        ["MoveWeights", 1, 2, 3],
        ["MoveWeights", 1, 2, "3", True],
        ["RunStep", "name", True, [1, 2], 0],
        ["CompileRungs", ["decode-8"]],
        ["WriteRow", INTS, 1, INTS, INTS, [1, 2, 3]],
    ],
)
def test_what_is_no_command_is_refused(message) -> None:
    with pytest.raises(BadFrame, match="a command"):
        from_message(message)


@pytest.mark.parametrize("length", [0, 101, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused(length) -> None:
    with pytest.raises(BadFrame, match=f"{length} bytes; 1 to 100 are allowed"):
        body_len(struct.pack(">I", length), 100)
    with pytest.raises(BadFrame, match="at most 8"):
        to_frame(["x" * 9], 8)
