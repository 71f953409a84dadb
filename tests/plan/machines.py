"""Machines for tests of the time model."""

from dataclasses import replace

from megatron_lite.plan.hardware import Flash, Hardware, Link, Matmuls, Mode

FREE = Link(latency_s=0.0, bandwidth=1e24)


def flash(efficiency):
    """Returns the same share of the peak for every flash kernel."""
    return Flash(
        forward_efficiency=efficiency,
        backward_efficiency=efficiency,
        deterministic_forward_efficiency=efficiency,
        deterministic_backward_efficiency=efficiency,
    )


def ideal(peak_flops=1e12, device="cuda"):
    """Returns a machine on which only matmuls take time, at their peak."""
    rates = Matmuls(peak_flops=peak_flops, max_efficiency=1.0, half_dimension=0.0, flash=flash(1.0))
    mode = Mode(launch_s=0.0, replay_s=0.0, memory_efficiency=1.0)
    return Hardware(
        name="ideal",
        device=device,
        ranks_per_node=8,
        memory_bytes=1 << 40,
        memory_bandwidth=1e24,
        memory_efficiency=1.0,
        multiprocessors=1,
        tile_m=1,
        tile_n=1,
        tile_s=0.0,
        kernel_s=0.0,
        bf16=rates,
        fp32=rates,
        eager=mode,
        compiled=mode,
        captured=mode,
        loss_traffic=1.0,
        fused_accumulation=False,
        overlap=1.0,
        band=0.1,
        band_of_several=0.2,
        inside=FREE,
        between=FREE,
        host_bandwidth=1e24,
        host_memory_bandwidth=1e24,
        shares_cores=False,
        sources={},
    )


def talking(latency_s, bandwidth):
    """Returns an ideal machine whose collectives take time, and hide none of it."""
    link = Link(latency_s=latency_s, bandwidth=bandwidth)
    return replace(ideal(), inside=link, between=link, shares_cores=True)
