"""Settings of every test: one thread before any fork, and no CUDA outside the tests marked
`gpu`."""

import functools
import gc
import os
import pathlib
import signal
import sys

# Inductor reads it when it is imported. Its threads that compile would not survive the forks: a
# rank would wait for them for ever.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# From 3.14 on argparse colours its help where FORCE_COLOR is set, as some CI systems do. The tests
# measure the width of a help.
os.environ["PYTHON_COLORS"] = "0"

import pytest
import torch

import arguments
from megatron_lite.cli import flags
from tests.support.pairs import FULL_GRIDS
from tests.support.ranks import IS_LONG

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # benchmarks/gpu.sh runs tests/gpu also where nothing but pytest is installed
    settings = None

# run_ranks forks this process. A fork hangs in its first parallel loop once the parent has started
# OpenMP's threads.
torch.set_num_threads(1)

# Started in the background, or by nohup, these tests would hand ignored signals on to the programs
# that they start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


# Building the parser of 900 flags takes ten milliseconds, and thousands of tests parse a command
# line. Parsing leaves the parser as it is.
arguments.build_parser = flags.build_parser = functools.cache(arguments.build_parser)

# Hypothesis: no limit in seconds may fail a test on a slow machine.
if settings is not None:
    settings.register_profile(
        "ours",
        max_examples=80 if FULL_GRIDS else 20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("ours")

if sys.version_info < (3, 11):  # there pathlib has its own references to what tests exchange

    def late(name):
        return staticmethod(lambda *given, **named: getattr(os, name)(*given, **named))

    for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
        setattr(pathlib._NormalAccessor, name, late(name))

OF_RUNS = {"checkpointing", "description", "faults", "memory", "recompute", "training"}

# A CPU with AMX whose instructions ATEN_CPU_CAPABILITY limits to AVX2: torch's own bf16 attention
# then raises this, so nothing of a bf16 run with flash attention can be tested there.
NO_BF16_ATTENTION = "pack_vnni2 is only supported when avx512 is supported"


@functools.cache
def _torch_lacks_bf16_attention():
    query = torch.ones(1, 1, 64, 4, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    except RuntimeError as error:
        return NO_BF16_ATTENTION in str(error)
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skips a test for torch's own missing kernel, where plain torch fails in the same way."""
    try:
        return (yield)
    except Exception as error:
        if NO_BF16_ATTENTION in str(error) and _torch_lacks_bf16_attention():
            pytest.skip(f"plain torch refuses bf16 attention here: {NO_BF16_ATTENTION}")
        raise


def pytest_configure(config):
    """`pytest -m gpu` sees the GPUs. Any other run hides them: CUDA does not survive the forks, and
    the CPU is the subject."""
    if config.getoption("markexpr", default="").strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish():
    """Takes what was imported and collected out of the garbage collector's hands: looking through
    it takes a second each time, and in a forked rank it copies every page."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_left_is_out_of_the_collectors_hands():
    """Else a collection takes seconds after some thousand tests, and measuring code calls many."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def two_actions(monkeypatch):
    """Fits that choose between keeping everything and nothing, which takes a third of the time."""
    monkeypatch.setattr("megatron_lite.fit.measurement.CANDIDATES", ("none",))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tells run_ranks whether the test is `long` or `weekly`, or of whole runs. Such a test has the
    same collectives as others of the default run."""
    further = item.get_closest_marker("long") or item.get_closest_marker("weekly")
    os.environ[IS_LONG] = "1" if further or item.path.parent.name in OF_RUNS else "0"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases of tests with the mark `runs`, and skips those marked `gpu` without a GPU."""
    by_test = {}
    for item in items:
        if item.get_closest_marker("runs"):
            by_test.setdefault((item.path, item.originalname), []).append(item)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device (benchmarks/gpu.sh)"))
    for cases in by_test.values():
        numbers = {"daily": 1, "ci": 2, **cases[0].get_closest_marker("runs").kwargs}
        for kind, number in (
            ("weekly", len(cases)),
            ("long", numbers["ci"]),
            ("", numbers["daily"]),
        ):
            for index in range(min(number, len(cases))):  # evenly among the cases
                item = cases[index * len(cases) // min(number, len(cases))]
                item.own_markers[:] = [
                    mark for mark in item.own_markers if mark.name not in ("long", "weekly")
                ]
                if kind:
                    item.add_marker(kind)
