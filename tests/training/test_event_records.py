"""The records of event files equal TensorBoard's own, byte for byte."""

from __future__ import annotations

import io
import math

import pytest

from megatron_lite.training.event_records import scalar_record, start_record, version_record

event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
SECONDS = 1_700_000_000.125


def theirs(**fields: object) -> bytes:
    """The record that TensorBoard writes."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    RecordWriter(file).write(event_pb2.Event(wall_time=SECONDS, **fields).SerializeToString())
    return file.getvalue()


def test_the_first_records_of_a_file_equal_tensorboards() -> None:
    assert version_record(SECONDS) == theirs(file_version="brain.Event:2")
    for step in (0, 1, 300):
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        assert start_record(SECONDS, step) == theirs(step=step, session_log=session)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.5, 1e-45, math.inf, -math.inf, math.nan])
def test_a_point_equals_tensorboards(value: float) -> None:
    for step, name in ((0, "lm loss"), (127, "a" * 130), (2**40 + 3, "größe")):
        point = summary_pb2.Summary.Value(tag=name, simple_value=value)
        assert scalar_record(SECONDS, step, name, value) == theirs(
            step=step, summary=summary_pb2.Summary(value=[point])
        )


def test_a_value_beyond_float32_is_infinite() -> None:
    assert scalar_record(SECONDS, 1, "x", -1e300) == scalar_record(SECONDS, 1, "x", -math.inf)
