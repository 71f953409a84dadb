"""Finds ports of this host that no program listens on."""

import contextlib
import socket


def free_ports(count):
    """Returns different ports that no program listens on at the moment of the call."""
    with contextlib.ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in found]


def free_port():
    """Returns a port that no program listens on at the moment of the call."""
    return free_ports(1)[0]
