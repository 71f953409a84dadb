"""How the work is split over ranks: the parallel groups, and what data-parallel ranks share out."""

import math

from .setting import Settings, count, setting, switch

OTHER_EXPERTS = dict(
    excludes="use_torch_fsdp2 cuda_graph_impl=full_iteration",
    why="ranks hold different experts, and exchange as many rows as their routers choose; use "
    "--use-distributed-optimizer, and other graphs",
)
FSDP_OVERLAPS = "use_torch_fsdp2: it always overlaps, layer by layer"
PIPELINE = "pipeline_model_parallel_size>1"
CP_COMM_TYPES = ("p2p", "allgather", "a2a")


class ParallelConfig(Settings):
    """The sizes of the parallel groups, and how their ranks communicate.

    The data-parallel size is the number of ranks divided by the product of all other sizes.

    sequence_parallel: whether norms and dropout are split over the tensor-parallel ranks along the
        sequence. It is turned off at tensor-parallel size 1.
    num_layers_per_virtual_pipeline_stage, num_virtual_stages_per_pipeline_rank: two ways to give
        each pipeline rank several virtual stages. At most one may be set.
    decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers: the layers of the first and
        the last pipeline rank. The other ranks share the rest equally (config/stages.py).
    pipeline_model_parallel_layout: what each stage holds, in the order of the model.
    overlap_p2p_comm: whether a stage receives its next input while it computes.
    expert_model_parallel_size: the number of neighbouring ranks of a pipeline stage over which the
        experts are spread. It divides the ranks of the stage, data- and context-parallel ones too.
    cp_comm_type: how context-parallel ranks exchange keys and values: around a ring ("p2p"), all
        at once ("allgather"), or as heads ("a2a"). A tuple has a value for each layer of the model.
    num_distributed_optimizer_instances: the number of groups of data-parallel ranks (with the
        context-parallel ones) that each share out all states. Ranks of the same number in their
        groups hold the same share.
    distributed_backend: "auto" is nccl on CUDA and gloo elsewhere. "gloo" also keeps the run on the
        CPU.
    distributed_timeout_minutes: the limit for one collective.
    distributed_timeout_seconds_after_init: the limit from the second iteration on, if given.
    """

    tensor_model_parallel_size: int = count("ranks that share each layer", 1)
    sequence_parallel: bool = switch(
        "split norms and dropout over the tensor-parallel ranks, along the sequence",
        without="tensor_model_parallel_size>1: it splits the sequence over these ranks, and is "
        "turned off",
    )
    pipeline_model_parallel_size: int = count(
        "ranks that share the layers, one behind the other", 1
    )
    num_layers_per_virtual_pipeline_stage: int | None = count(
        "several stages of so many layers on each pipeline rank",
        needs=PIPELINE,
        why="only a pipeline has stages",
    )
    num_virtual_stages_per_pipeline_rank: int | None = count(
        "the same, by their number",
        needs=PIPELINE,
        excludes="num_layers_per_virtual_pipeline_stage",
        why="both give the number of virtual stages",
    )
    decoder_first_pipeline_num_layers: int | None = count(
        "layers of the first pipeline rank, if not as many as of the others", needs=PIPELINE
    )
    decoder_last_pipeline_num_layers: int | None = count(
        "layers of the last pipeline rank", needs=PIPELINE
    )
    pipeline_model_parallel_layout: str | None = setting(
        "what each stage holds, as Megatron writes it: E embedding, t layer, L loss, | between "
        "stages, x*n and (..)*n repeat: Et*3|(tt|)*2L; it decides the number of virtual stages too",
        needs=PIPELINE,
        excludes="num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
        why="both cut the layers into stages",
    )
    overlap_p2p_comm: bool = setting(
        "receive what a stage needs only when it needs it",
        True,
        name="--no-overlap-p2p-communication",
        without=PIPELINE,
    )
    context_parallel_size: int = count("ranks that share each sequence", 1)
    cp_comm_type: str | tuple[str, ...] = setting(
        "how context-parallel ranks exchange keys and values: around a ring, or all at once; a2a: "
        "they exchange heads, and attend to whole sequences; one for all layers, or one for each",
        "p2p",
        nargs="+",
        choices=CP_COMM_TYPES,
        megatron={"a2a+p2p": "p2p", "all_gather": "allgather"},
        needs="context_parallel_size>1",
    )
    expert_model_parallel_size: int = count(
        "ranks over which the experts of each layer are spread",
        1,
        needs="num_experts",
        **OTHER_EXPERTS,
    )
    expert_tensor_parallel_size: int | None = count(
        "ranks that share each expert, a divisor of what is derived: --tensor-model-parallel-size",
        without="num_experts",
        excludes=OTHER_EXPERTS["excludes"],
    )
    moe_token_dispatcher_type: str = setting(
        "how tokens reach other experts: all go to each rank, or each row to its expert's",
        "allgather",
        choices="allgather alltoall",
        megatron={"flex": "alltoall", "alltoall_seq": "alltoall"},
        without="expert_model_parallel_size>1",
    )
    plan_moe_imbalance: float = setting(
        "in predictions and dry runs, the fullest expert-parallel rank has so many times the rows "
        "of a balanced choice",
        1.0,
        least=1.0,
        upto="expert_model_parallel_size",
        why="no rank has more rows than all",
    )
    num_distributed_optimizer_instances: int = count(
        "groups of data-parallel ranks that each share out all states; gradients are summed within "
        "a group, then over groups (HSDP)",
        1,
        needs="use_distributed_optimizer|use_torch_fsdp2",
        why="otherwise every rank holds all states",
    )
    distributed_backend: str = setting(
        "auto: nccl on CUDA, else gloo; gloo keeps the run on the CPU",
        "auto",
        choices="auto nccl gloo",
    )
    distributed_timeout_minutes: int = count(
        "time after which a collective gives up, and the run with it", 10
    )
    distributed_timeout_seconds_after_init: int | None = count(
        "the same from the second iteration on; it must cover the writing of a checkpoint, for "
        "which ranks wait"
    )

    def __post_init__(self) -> None:
        # The value 1 means no virtual stages, and is legal without a pipeline too.
        if self.num_virtual_stages_per_pipeline_rank == 1:
            object.__setattr__(self, "num_virtual_stages_per_pipeline_rank", None)
        if self.expert_tensor_parallel_size == self.tensor_model_parallel_size:
            object.__setattr__(self, "expert_tensor_parallel_size", None)
        super().__post_init__()
        if isinstance(self.cp_comm_type, tuple) and len(self.exchanges) == 1:
            object.__setattr__(self, "cp_comm_type", self.cp_comm_type[0])
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            object.__setattr__(self, "sequence_parallel", False)

    @property
    def timeout_seconds(self) -> float:
        """The limit in seconds for one collective after the first iteration."""
        return (
            self.distributed_timeout_seconds_after_init or 60.0 * self.distributed_timeout_minutes
        )

    @property
    def sequence_parts(self) -> int:
        """The number that --seq-length must be a multiple of.

        Each of several context-parallel ranks holds two spans of the sequence. Sequence
        parallelism splits each span over the t tensor-parallel ranks.
        """
        spans = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return spans * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def exchanges(self) -> frozenset[str]:
        """The ways in which the context-parallel ranks of any layer exchange keys and values."""
        kinds = self.cp_comm_type
        return frozenset([kinds] if isinstance(kinds, str) else kinds)

    @property
    def expert_tensor_parallel(self) -> int:
        """The number of ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def spreads_experts(self) -> bool:
        """Tells whether the parameters of experts have other groups of ranks than all others."""
        return (
            self.expert_model_parallel_size > 1
            or self.expert_tensor_parallel != self.tensor_model_parallel_size
        )

    @property
    def model_ranks(self) -> int:
        """The fewest ranks of a run: t c p, or more if experts are spread over more."""
        stage = self.tensor_model_parallel_size * self.context_parallel_size
        experts = self.expert_model_parallel_size * self.expert_tensor_parallel
        return self.pipeline_model_parallel_size * math.lcm(stage, experts)

    def data_parallel_size(self, world_size: int) -> int:
        """Returns the world size divided by the number of ranks of one model, t x c x p.

        Raises ValueError if it does not divide. The message shows the arithmetic.
        """
        axes = {
            "--tensor-model-parallel-size": self.tensor_model_parallel_size,
            "--context-parallel-size": self.context_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_model_parallel_size,
        }
        ranks = math.prod(axes.values())
        if world_size % ranks:
            named = [f"{name} {size}" for name, size in axes.items() if size > 1]
            raise ValueError(
                f"world size {world_size} is not a multiple of {' x '.join(named)}"
                f"{f' = {ranks}' if len(named) > 1 else ''}: start a multiple of {ranks} processes "
                "(torchrun --nproc_per_node, srun --ntasks)"
            )
        stage = world_size // self.pipeline_model_parallel_size
        unit = self.expert_model_parallel_size * self.expert_tensor_parallel
        if stage % unit:
            raise ValueError(
                f"a pipeline stage has {stage} ranks, which is not a multiple of "
                f"--expert-model-parallel-size {self.expert_model_parallel_size} x "
                f"--expert-tensor-parallel-size {self.expert_tensor_parallel} = {unit}: start more "
                "processes, or spread the experts over fewer ranks"
            )
        instances = self.num_distributed_optimizer_instances
        for number, kind in (
            (stage // self.tensor_model_parallel_size, "data-parallel ranks"),
            (stage // unit, "ranks with the same experts"),
        ):
            if number % instances:
                raise ValueError(
                    f"--num-distributed-optimizer-instances {instances} does not divide the "
                    f"{number} {kind} (context-parallel ones count): give a divisor"
                )
        return world_size // ranks


def exchange_of(kinds: str | tuple[str, ...], layer: int) -> str:
    """Returns the --cp-comm-type of a layer, which counts from 0 in the whole model."""
    return kinds if isinstance(kinds, str) else kinds[layer]


def no_flash_across_ranks(attention_dropout: float, reset_attention_mask: bool) -> str | None:
    """Returns the flag with which flash attention over context-parallel ranks cannot work, if any.

    Across ranks its kernels have no dropout. Under --reset-attention-mask the keys of another rank
    that a query reads differ from sample to sample.
    """
    if attention_dropout > 0.0:
        return f"--attention-dropout {attention_dropout}"
    return "--reset-attention-mask" if reset_attention_mask else None


class DataParallelConfig(Settings):
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
        "sum gradients over the data-parallel ranks bucket by bucket, beside backward",
        unless=FSDP_OVERLAPS,
    )
    ddp_bucket_size: int | None = count(
        "parameters of a bucket; derived: 40 million, or 1 million per data-parallel rank",
        without="overlap_grad_reduce: everything is reduced at once",
        unless=FSDP_OVERLAPS,
    )
    grad_reduce_in_bf16: bool = switch(
        "exchange gradients in bfloat16 (each rank sums its micro-batches in float32)",
        needs="bf16",
        why="gradients of float32 weights are exchanged in float32",
    )
    use_distributed_optimizer: bool = switch(
        "optimizer states and master weights over the data-parallel ranks (ZeRO-1)"
    )
    overlap_param_gather: bool = switch(
        "gather the updated weights beside the next forward",
        needs="use_distributed_optimizer overlap_grad_reduce",
        why="it gathers what ZeRO-1 shares out, in the buckets of the reduction",
    )
    use_torch_fsdp2: bool = switch(
        "weights, gradients and optimizer states over the data-parallel ranks, layer by layer",
        excludes="use_distributed_optimizer",
        why="FSDP2 shares out the optimizer states too",
    )
    torch_fsdp2_reshard_after_forward: bool = setting(
        "keep a layer's weights from its forward until its backward",
        True,
        name="--torch-fsdp2-no-reshard-after-forward",
        needs="use_torch_fsdp2",
    )
    fsdp_memory_efficient_wrapping: bool = switch(
        "gather token embedding and output projection by themselves, when needed",
        needs="use_torch_fsdp2",
    )

    @property
    def shares_out(self) -> bool:
        """Tells whether each data-parallel rank holds a part of the states, not all."""
        return self.use_distributed_optimizer or self.use_torch_fsdp2

    def bucket_size(self, dp_cp_size: int) -> int | None:
        """Returns the number of parameters of a bucket that is reduced over `dp_cp_size` ranks.

        Returns None without overlap: all gradients are reduced at once, after the last backward.
        """
        if not self.overlap_grad_reduce:
            return None
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * dp_cp_size)
