"""The watch thread lives on whatever the process does."""

import os
import resource
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_lite.supervision import watch
from megatron_lite.supervision.exits import Pulse
from megatron_lite.supervision.watch import Watch
from tests.support.ports import free_port


def test_the_watch_works_with_more_than_1024_open_descriptors(monkeypatch):
    """select.select refuses a descriptor of 1024 or more, and the thread would end in silence."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1400:
        pytest.skip("the hard limit of open descriptors is too low")
    store = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
    monkeypatch.setattr(watch, "default_store", lambda: store)
    ended = threading.Event()
    monkeypatch.setattr(Watch, "leave", lambda self, verdict: ended.set())
    resource.setrlimit(resource.RLIMIT_NOFILE, (1400, limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        parallel = SimpleNamespace(rank=1, world_size=2)
        with Watch(
            parallel, Pulse(), timeout=60.0, graceful=False, owns_store=True, program="program"
        ) as entered:
            assert entered._waking >= 1024
            store.set("verdict", '[1, 1, "the end"]')
            assert ended.wait(20.0)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
