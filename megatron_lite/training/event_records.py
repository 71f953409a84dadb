"""The records of TensorBoard's event files, written without TensorBoard.

A record is the length of its event (8 bytes), a checksum of the length, the event, and a checksum
of the event. An event is a protocol buffer; `pages/event_file.py` reads the same fields. Importing
TensorBoard's own writer took more than a second of every start.
"""

from __future__ import annotations

import struct

WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7  # fields of an event
SESSION_START = 1
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5  # kinds of fields
CRC32C = 0x82F63B78  # Castagnoli's polynomial, bits reversed


def version_record(wall_time: float) -> bytes:
    """Returns the first record of a file. wall_time: seconds since 1970."""
    return _record(_wall_time(wall_time) + _bytes(FILE_VERSION, b"brain.Event:2"))


def start_record(wall_time: float, step: int) -> bytes:
    """Returns the record of a start: earlier points from this step on do not count any more."""
    session = _bytes(SESSION_LOG, _number(1, SESSION_START))
    return _record(_wall_time(wall_time) + _number(STEP, step) + session)


def scalar_record(wall_time: float, step: int, name: str, value: float) -> bytes:
    """Returns the record of one point, as a float32. A value beyond float32 becomes infinite."""
    point = _bytes(1, name.encode()) + _key(2, FIXED_32) + _float32(value)
    return _record(_wall_time(wall_time) + _number(STEP, step) + _bytes(SUMMARY, _bytes(1, point)))


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _wall_time(seconds: float) -> bytes:
    return _key(WALL_TIME, FIXED_64) + struct.pack("<d", seconds)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _number(field: int, value: int) -> bytes:
    """Returns a field with a whole number from 0 on. A zero is left out, as the format asks."""
    return _key(field, VARINT) + _varint(value) if value else b""


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(content)) + content


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _varint(value: int) -> bytes:
    """Returns a whole number in groups of 7 bits, the lowest first."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _table() -> tuple[int, ...]:
    rows = []
    for row in range(256):
        for _ in range(8):
            row = row >> 1 ^ (CRC32C if row & 1 else 0)
        rows.append(row)
    return tuple(rows)


TABLE = _table()


def _checksum(content: bytes) -> bytes:
    """Returns the CRC-32C, masked as the format asks: rotated, and a constant added."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
