"""Says how gradients, optimizer states and weights are sharded over data-parallel ranks.

It also holds the settings that decide when the ranks exchange them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.checks import flag
from megatron_lite.config.setting import check_settings, setting, switch


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """The part of a model that each of n data-parallel ranks holds, and how gradients are summed.

        neither flag                 whole weights, gradients and optimizer states
        use_distributed_optimizer    whole weights and gradients, 1/n of the optimizer states and
                                     float32 master weights (ZeRO-1)
        use_torch_fsdp2              1/n of everything; a layer's weights are whole while the layer
                                     computes (FSDP2)

    overlap_grad_reduce: whether gradients are reduced bucket by bucket, beside backward.
    ddp_bucket_size: the number of parameters of a bucket under overlap_grad_reduce. None: 40
        million, or 1 million for each rank if that is more.
    grad_reduce_in_bf16: whether ranks exchange gradients in bfloat16. Each rank still sums the
        gradients of its micro-batches in float32.
    overlap_param_gather: whether updated weights are gathered beside the next forward.
    torch_fsdp2_reshard_after_forward: whether a layer's gathered weights are freed after its
        forward. If not, they stay until its backward.
    fsdp_memory_efficient_wrapping: whether the token embedding and the output projection are
        gathered by themselves, when they are needed.
    """

    overlap_grad_reduce: bool = switch(
        "sum gradients over the data-parallel ranks bucket by bucket, beside backward"
    )
    ddp_bucket_size: int | None = setting(
        "parameters of a bucket; derived: 40 million, or 1 million per data-parallel rank", least=1
    )
    grad_reduce_in_bf16: bool = switch(
        "exchange gradients in bfloat16 (each rank sums its micro-batches in float32)"
    )
    use_distributed_optimizer: bool = switch(
        "optimizer states and master weights over the data-parallel ranks (ZeRO-1)"
    )
    overlap_param_gather: bool = switch("gather the updated weights beside the next forward")
    use_torch_fsdp2: bool = switch(
        "weights, gradients and optimizer states over the data-parallel ranks, layer by layer"
    )
    torch_fsdp2_reshard_after_forward: bool = setting(
        "keep a layer's weights from its forward until its backward",
        True,
        name="--torch-fsdp2-no-reshard-after-forward",
    )
    fsdp_memory_efficient_wrapping: bool = switch(
        "gather token embedding and output projection by themselves, when needed"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.use_torch_fsdp2 and self.use_distributed_optimizer:
            raise ValueError(
                "--use-torch-fsdp2 shares out the optimizer states too: leave "
                "--use-distributed-optimizer out"
            )
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            anyway = " (--use-torch-fsdp2 gathers each layer beside the one before it anyway)"
            raise ValueError(
                "--overlap-param-gather needs --use-distributed-optimizer: otherwise no weights "
                f"are gathered after a step{anyway if self.use_torch_fsdp2 else ''}"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError(
                "--overlap-param-gather needs --overlap-grad-reduce: both work on the same buckets"
            )
        for field, default in (
            ("torch_fsdp2_reshard_after_forward", True),
            ("fsdp_memory_efficient_wrapping", False),
        ):
            if getattr(self, field) != default and not self.use_torch_fsdp2:
                spelling = "--torch-fsdp2-no-reshard-after-forward" if default else flag(field)
                raise ValueError(f"{spelling} needs --use-torch-fsdp2")

    def bucket_size(self, dp_cp_size: int) -> int | None:
        """Returns the number of parameters of a bucket that is reduced over `dp_cp_size` ranks.

        Returns None without overlap: all gradients are reduced at once, after the last backward.
        """
        if not self.overlap_grad_reduce:
            return None
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * dp_cp_size)
