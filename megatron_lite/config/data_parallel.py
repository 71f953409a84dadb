"""How data-parallel ranks share out gradients, optimizer states and weights, and when they talk about them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.checks import flag, require_at_least

OVERLAP_FLAGS = ("overlap_grad_reduce", "overlap_param_gather")


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """What each data-parallel rank holds of a model, and how gradients are summed.

        neither flag                  weights, gradients and optimizer states, all whole
        use_distributed_optimizer     1/d of the optimizer states and float32 master weights (ZeRO-1)
        use_torch_fsdp2               1/d of everything; a layer is whole while it is computed (FSDP2)

    ddp_bucket_size: how many parameters are reduced at a time under overlap_grad_reduce; None: 40 million, or 1 million for each
    rank if that is more. grad_reduce_in_bf16: ranks exchange bf16 gradients; each still sums its micro-batches in float32.
    """

    overlap_grad_reduce: bool = False
    ddp_bucket_size: int | None = None
    grad_reduce_in_bf16: bool = False
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    use_torch_fsdp2: bool = False
    torch_fsdp2_reshard_after_forward: bool = True
    fsdp_memory_efficient_wrapping: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "ddp_bucket_size")
        if self.use_torch_fsdp2 and self.use_distributed_optimizer:
            raise ValueError("--use-torch-fsdp2 shares out the optimizer states too: leave --use-distributed-optimizer out")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("--overlap-param-gather needs --use-distributed-optimizer: otherwise no weights are gathered after "
                             "a step" + (" (--use-torch-fsdp2 gathers each layer beside the one before it anyway)"
                                         if self.use_torch_fsdp2 else ""))
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("--overlap-param-gather needs --overlap-grad-reduce: both work on the same buckets")
        for field, default in (("torch_fsdp2_reshard_after_forward", True), ("fsdp_memory_efficient_wrapping", False)):
            if getattr(self, field) != default and not self.use_torch_fsdp2:
                spelling = "--torch-fsdp2-no-reshard-after-forward" if default else flag(field)
                raise ValueError(f"{spelling} needs --use-torch-fsdp2")

    def bucket_size(self, data_size: int) -> int | None:
        """Parameters reduced at a time over `data_size` ranks; None: all at once, after the last backward."""
        if not self.overlap_grad_reduce:
            return None
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * data_size)

    def notices(self, data_size: int | None = None) -> list[str]:
        """A line for each setting that does nothing. data_size: ranks that share the work, once the launch has told."""
        notices = []
        if data_size is None:
            if self.use_torch_fsdp2 and self.overlap_grad_reduce:
                notices.append("--overlap-grad-reduce has no effect under --use-torch-fsdp2, which overlaps always")
            if self.ddp_bucket_size is not None and (self.use_torch_fsdp2 or not self.overlap_grad_reduce):
                reason = "under --use-torch-fsdp2, which reduces layer by layer" if self.use_torch_fsdp2 else \
                         "without --overlap-grad-reduce: everything is reduced at once"
                notices.append(f"--ddp-bucket-size {self.ddp_bucket_size} has no effect {reason}")
        elif data_size == 1:
            given = [name for name in (*OVERLAP_FLAGS, "grad_reduce_in_bf16", "use_distributed_optimizer", "use_torch_fsdp2")
                     if getattr(self, name)]
            notices += [f"{flag(name)} has no effect at data-parallel size 1: nothing is shared out or summed" for name in given]
        return notices
