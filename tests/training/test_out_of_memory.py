"""Runs that do not fit: refused at the start, ended by their limit, or out of memory in a step.
What is said then is compared with what a run takes."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.units import size
from megatron_lite.memory.predict.states import parameter_count, rank_states
from megatron_lite.memory.predict.step_peak import step_peak
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training import build_trainer as build
from megatron_lite.training import out_of_memory as capacity
from megatron_lite.training.out_of_memory import (
    advice,
    is_out_of_memory,
    memory_bytes,
    memory_limited,
)
from tests.support.changes import with_settings
from tests.support.commands import MOCK, SMALL_RUN, run_command
from tests.support.programs import program
from tests.support.rank_faults import first_step_fails
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run

CPU = torch.device("cpu")
peak_of = partial(step_peak, device="cpu")
SIZE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 4096 --micro-batch-size 8 --global-batch-size 8 "
    "--mock-data --lr 1e-3 --train-iters 1 --eval-iters 0 --distributed-backend gloo"
)


def test_errors_of_failed_allocations_are_known():
    texts = (
        "DefaultCPUAllocator: can't allocate memory: you tried",
        "std::bad_alloc",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    )
    failed = MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), *map(RuntimeError, texts)
    others = RuntimeError("shapes cannot be multiplied"), ValueError("not enough memory")
    assert [*map(is_out_of_memory, (*failed, *others))] == [True] * 6 + [False] * 2


def message_of(config):
    peak = peak_of(config, 0)
    alone = SimpleNamespace(world_size=1, device=CPU)
    return advice(config, peak, alone, when="in iteration 3 on rank 0")


def large_run(**training):
    return tiny_run(
        num_layers=8, hidden_size=64, micro_batch_size=64, global_batch_size=64, **training
    )


def test_the_message_has_the_peak_what_holds_it_and_a_policy_that_fits():
    config = large_run()
    whole = peak_of(config, 0)
    limit = int(0.9 * whole.num_bytes)
    text = message_of(large_run(memory_limit=f"{limit}B"))
    assert "\n" not in text and "in iteration 3 on rank 0" in text
    assert f"by --memory-limit {limit}B" in text and whole.moment in text
    for term in sorted(whole.terms, key=lambda term: -term.num_bytes)[:3]:
        assert term.name in text
    policy = re.search(r"--recompute-policy '?([^']*)'? \(docs/memory.md\)", text)
    assert policy is not None, text
    fits = with_settings(config, recompute_policy=policy[1])
    assert peak_of(fits, 0).num_bytes <= limit < whole.num_bytes


@pytest.mark.parametrize("share, near", [(1.01, True), (1.1, False)])
def test_a_prediction_just_below_the_memory_is_not_blamed_on_something_else(share, near):
    whole = peak_of(large_run(), 0)
    text = message_of(large_run(memory_limit=f"{int(share * whole.num_bytes)}B"))
    assert ("within 2% of that" in text and "--recompute-policy" in text) == near
    assert ("something else takes memory" in text) == (not near)


def test_the_message_says_so_if_no_policy_fits():
    assert "no way to fit: no recompute policy fits" in message_of(large_run(memory_limit="1MiB"))


def test_memory_that_runs_out_on_one_rank_is_an_input_error_there(monkeypatch):
    first_step_fails(monkeypatch, RuntimeError("DefaultCPUAllocator: can't allocate memory"))

    def work(rank, world_size):
        with pytest.raises(InputError) as fault:
            run_to_end(tiny_run(tp_size=2, memory_limit="1MiB"))
        return str(fault.value)

    texts = run_ranks(work, 2)
    assert all(f"in iteration 1 on rank {rank}" in text for rank, text in enumerate(texts))


def test_the_limit_holds_within_the_block_and_not_after_it():
    def work(rank, world_size):
        with memory_limited(tiny_run(memory_limit="64MiB"), CPU):
            torch.ones(32 * 2**20, dtype=torch.uint8)
            with pytest.raises(RuntimeError) as fault:
                torch.empty(2**30, dtype=torch.uint8)
        torch.empty(2**30, dtype=torch.uint8)
        return is_out_of_memory(fault.value)

    assert run_ranks(work, 1) == [True]


@pytest.mark.long
def test_a_run_beyond_its_limit_ends_with_one_line_and_status_2():
    """A process of its own: a fork would have what this process has freed, beyond its limit."""
    run = run_command(*SIZE.split(), "--memory-limit", "700MiB")
    assert run.returncode == 2 and "Traceback" not in run.stderr, run
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("pretrain_gpt.py: "))
    assert "out of memory" in line and "The fastest setting that fits: --recompute-policy" in line


def test_the_second_step_is_measured_and_compared(monkeypatch, capsys, tmp_path):
    config = large_run(train_iters=4, eval_iters=0)
    run_to_end(
        with_settings(
            config, log_peak_memory=True, machine="cpu", metrics_jsonl=f"{tmp_path}/metrics.jsonl"
        )
    )
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("peak of a step"))
    share = re.search(r"\((\d+\.\d)% of it\)", line)
    assert share is not None and 95.0 < float(share[1]) < 105.0, line
    summary = out.partition("finished at iteration 4 of 4")[2]
    assert f"  peak         {line.partition(': ')[2]}\n" in summary
    assert re.search(r"  step time    .* ms predicted for cpu \(", summary)
    assert (tmp_path / "metrics.jsonl.summary.json").exists()


@pytest.mark.runs
@pytest.mark.parametrize(
    "policy, contiguous", [("*:none@host(core_attn+linear_fc1)", False), ("*:full", True)]
)
def test_the_measured_peak_has_the_buffers_that_outlive_a_step(policy, contiguous):
    """The buffers of @host and the arena are 22 % and 10 % of these peaks."""
    config = tiny_run(
        num_layers=4,
        max_position_embeddings=64,
        attention_dropout=0.0,
        micro_batch_size=8,
        global_batch_size=16,
        train_iters=2,
        eval_iters=0,
        seq_length=64,
        log_peak_memory=True,
        recompute_policy=policy,
        contiguous_saved_activations=contiguous,
    )
    found = run_to_end(config).peak
    assert found is not None
    assert found.predicted / found.measured == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    "limits, expected",
    [(["max"], 3 << 30), (["1048576"], 1 << 20), ([str(1 << 62)], 3 << 30), ([], 3 << 30)],
)
def test_the_limit_of_the_control_group_counts_where_it_is_lower(
    tmp_path, monkeypatch, limits, expected
):
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {2 << 20} kB\nMemFree: 1 kB\nSwapTotal: {1 << 20} kB\n"
    )
    for limit in limits:
        (tmp_path / "memory.max").write_text(limit + "\n")
    monkeypatch.setattr(capacity, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(capacity, "CGROUP_LIMITS", [tmp_path / "memory.max"])
    assert memory_bytes(CPU) == expected


@pytest.mark.parametrize(
    "flags", ["--hidden-size 1000000", "--num-layers 4000 --hidden-size 16384"]
)
def test_sizes_beyond_memory_end_the_program_with_status_2_and_one_line(tmp_path, flags):
    """Before --save is taken, and however many layers there are to list."""
    more = f"--tensor-model-parallel-size 2 --save {tmp_path}/save {flags}"
    with program([*SMALL_RUN, *MOCK, *more.split()], ranks=2) as run:
        run.ends(2, 2)
        (line,) = run.messages()
        assert "error: the model does not fit: " in line and "for the 2 ranks there" in line
        assert "Traceback" not in run.everything()
    assert not (tmp_path / "save").exists()


def _start(config, memory, monkeypatch):
    monkeypatch.setattr(capacity, "memory_bytes", lambda device: memory)
    monkeypatch.setattr(capacity, "least_bytes", lambda *_: 0)  # the states alone fit
    with parallel_state(config.parallel, seed=1) as parallel:
        build.build_trainer(config, parallel)


@pytest.mark.parametrize(
    "training", [dict(micro_batch_size=64, global_batch_size=64), dict(micro_batch_size=4)]
)
def test_a_predicted_peak_beyond_the_memory_is_refused_without_a_flag(training, monkeypatch):
    """Whatever holds it. The margin is half of each estimate: a run that fits always starts."""
    config = tiny_run(**training, learning_rate=0.001)
    peak = peak_of(config, 0)
    for memory in (peak.num_bytes, None):
        _start(config, memory, monkeypatch)
    with pytest.raises(InputError) as fault:
        _start(config, peak.num_bytes // 2, monkeypatch)
    for text in (size(peak.num_bytes), size(peak.num_bytes // 2), peak.moment):
        assert text in str(fault.value)
    assert "--allow-predicted-out-of-memory starts the run all the same" in str(fault.value)
    allowed = with_settings(config, allow_predicted_out_of_memory=True)
    _start(allowed, peak.num_bytes // 2, monkeypatch)


def test_the_peaks_of_the_ranks_of_one_host_are_added():
    def work(rank, world_size, memory):
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(InputError) as fault:
            _start(config, memory, monkeypatch)
        return str(fault.value)

    config = tiny_run(micro_batch_size=2, learning_rate=0.001)
    peak = peak_of(config, 0, dp_size=2)
    for text in run_ranks(work, 2, peak.num_bytes * 5 // 4):
        assert "the run does not fit. A step of this rank needs" in text
        assert "for the 2 ranks there" in text


def test_optimizer_states_beyond_the_memory_of_the_host_are_refused_before_the_start(monkeypatch):
    """Those of all ranks of a host together; the device has room."""
    run = tiny_run(learning_rate=0.001, optimizer_cpu_offload=True)
    with parallel_state(run.parallel, seed=1) as parallel:
        needed = rank_states(run, 0, dp_cp_size=1).on_host
        # main weights and two moments, and two buffers of the largest parameter each way
        assert needed > 3 * 4 * parameter_count(run.model, run.tokenizer.rows(1))
        rows = [(host, needed) for host in "aab"]
        monkeypatch.setattr(
            type(parallel), "gathered", lambda self, own: rows if own in rows else [own]
        )
        monkeypatch.setattr(capacity.socket, "gethostname", lambda: "a")
        monkeypatch.setattr(capacity, "memory_bytes", lambda device: 2 * needed)
        capacity.check_fits(run, parallel)
        monkeypatch.setattr(capacity, "memory_bytes", lambda device: 2 * needed - 1)
        with pytest.raises(
            InputError, match=r"--optimizer-cpu-offload .* --optimizer-offload-fraction \(got 1.0\)"
        ):
            capacity.check_fits(run, parallel)
