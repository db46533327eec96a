"""Messages between hosts as bytes: a length, then msgpack. Imports no JAX; nothing that is read is ever executed.

A message is a list whose first entry names its kind. Arrays and buckets travel as msgpack extensions:

    length [4, big-endian] | msgpack of [kind, field, ...]
"""

import math
import struct
from typing import Any

import msgpack
import numpy as np

from runtime.experts.exchange_kind import ExchangeKind
from runtime.ladder.bucket import Bucket
from runtime.schedule.plan import Phase

HEADER = struct.Struct(">I")
MAX_REPORT_BYTES = 1 << 20  # of a follower's message
MAX_COMMAND_BYTES = 1 << 28  # of the leader's: row vectors of a whole vocabulary are the largest
_ARRAY, _BUCKET = 1, 2
_DTYPES = {np.dtype(t).str: np.dtype(t) for t in (np.int32, np.float32, np.bool_)}
MAX_DIMENSIONS = 4


class BadFrame(ValueError):
    """What came is no message of ours."""


def to_frame(message: list[Any], max_bytes: int = MAX_COMMAND_BYTES) -> bytes:
    """Raises BadFrame for what the other side would refuse."""
    body = _pack(message)
    if len(body) > max_bytes:
        raise BadFrame(f"a frame of {len(body)} bytes; at most {max_bytes} are allowed")
    return HEADER.pack(len(body)) + body


def body_len(header: bytes, max_bytes: int) -> int:
    """Bytes that follow the header. Raises BadFrame when they are none or too many."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= max_bytes:
        raise BadFrame(f"a frame of {length} bytes; 1 to {max_bytes} are allowed")
    return length


def from_body(body: bytes, takes_arrays: bool = True) -> list[Any]:
    """The message. Raises BadFrame for anything but a list that begins with a text.

    takes_arrays: False where arrays and buckets are refused too.
    """
    try:
        message = msgpack.unpackb(body, ext_hook=_shorten if takes_arrays else _refuse, strict_map_key=True)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, RecursionError) as error:
        raise BadFrame(f"bytes that are no message: {str(error)[:120]}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise BadFrame(f"a {type(message).__name__} where a message should be")
    return message


def _pack(value: list[Any]) -> bytes:
    packer: Any = msgpack.packb  # whose types say that it may yield nothing
    return packer(value, default=_extend)


def _extend(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = _pack([value.dtype.str, value.shape])
        return msgpack.ExtType(_ARRAY, head + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Bucket):
        fields = [value.phase.value, value.tokens, value.rows, value.exchange.value, value.num_halves]
        return msgpack.ExtType(_BUCKET, _pack(fields))
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _shorten(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        return _array(data)
    if code == _BUCKET:
        phase, tokens, rows, exchange, num_halves = msgpack.unpackb(data)
        if not all(isinstance(n, int) and 0 < n <= 1 << 24 for n in (tokens, rows, num_halves)):
            raise ValueError("a bucket whose sizes are no sizes")
        return Bucket(Phase(phase), tokens, rows, ExchangeKind(exchange), num_halves)
    raise ValueError(f"extension {code} is not known")


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"extension {code} is not expected here")


def printable(text: object, limit: int) -> str:
    """What another process sent, as part of one line of a log."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:limit])


def _array(data: bytes) -> np.ndarray:
    head = msgpack.Unpacker(max_buffer_size=MAX_COMMAND_BYTES)
    head.feed(data)
    name, shape = head.unpack()
    dtype, values = _DTYPES[name], memoryview(data)[head.tell() :]
    if len(shape) > MAX_DIMENSIONS or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError("an array whose shape is no shape")
    if math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"an array of {shape} {name} in {len(values)} bytes")
    return np.frombuffer(values, dtype).reshape(shape)
