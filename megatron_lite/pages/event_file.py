"""Reads the scalars of TensorBoard's event files, without TensorBoard.

A file is a sequence of records: 8 bytes of length, 4 of checksum, the event, 4 of checksum. An
event is a protocol buffer. This module reads four of its fields: the step (2), the summary's values
with a tag and a number (5), and the session log (7), which training/tensorboard.py writes at each
start of a run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

STEP, SUMMARY, SESSION = 2, 5, 7
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
SESSION_START = 1


class Scalar(NamedTuple):
    """One point. value: as it was written, NaN and infinity included."""

    tag: str
    step: int
    value: float


class SessionStart(NamedTuple):
    """A start of the run. Points of earlier starts from this step on do not count any more."""

    step: int


def read_events(data: bytes) -> Iterator[Scalar | SessionStart]:
    """Yields the scalars and the session starts of a file in their order.

    It ends at the first record that is cut short, as a kill leaves it. Raises ValueError if the
    bytes are no event file.
    """
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        record = data[place + 12 : place + 12 + length]
        if len(record) < length:
            return
        yield from _of_event(record)
        place += length + 16


def _of_event(record: bytes) -> Iterator[Scalar | SessionStart]:
    step, rest = 0, []
    for number, value in _fields(record):
        if number == STEP and isinstance(value, int):
            step = value
        elif number in (SUMMARY, SESSION) and isinstance(value, bytes):
            rest.append((number, value))
    for number, value in rest:
        if number == SUMMARY:
            yield from _of_summary(value, step)
        elif (1, SESSION_START) in _fields(value):
            yield SessionStart(step)


def _of_summary(summary: bytes, step: int) -> Iterator[Scalar]:
    """Yields the values of a summary (its field 1): the tag (1) and a float (2).

    Writers put a tensor (8) with one float in float_val (5) or tensor_content (4) in newer files.
    """
    for number, message in _fields(summary):
        if number != 1 or not isinstance(message, bytes):
            continue
        tag, value = "", None
        for part, content in _fields(message):
            if part == 1 and isinstance(content, bytes):
                tag = content.decode(errors="replace")
            elif part == 2 and isinstance(content, float):
                value = content
            elif part == 8 and isinstance(content, bytes):
                value = _of_tensor(content)
        if value is not None:
            yield Scalar(tag, step, value)


def _of_tensor(tensor: bytes) -> float | None:
    for number, content in _fields(tensor):
        if number == 5 and isinstance(content, float):
            return content
        if number in (4, 5) and isinstance(content, bytes) and len(content) == 4:
            return float(struct.unpack("<f", content)[0])
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yields the number and the value of each field of a protocol buffer.

    Raises ValueError if the bytes are none.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _varint(message, place)
            yield number, value
        elif kind == BYTES:
            length, place = _varint(message, place)
            if place + length > len(message):
                raise ValueError("not an event file: a field is longer than its message")
            yield number, message[place : place + length]
            place += length
        elif kind in (FIXED_32, FIXED_64):
            size, code = (4, "<f") if kind == FIXED_32 else (8, "<d")
            if place + size > len(message):
                raise ValueError("not an event file: a number is cut short")
            yield number, float(struct.unpack_from(code, message, place)[0])
            place += size
        else:
            raise ValueError(f"not an event file: a field of kind {kind}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Returns a whole number of at most 64 bits, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise ValueError("not an event file: a whole number is cut short")
