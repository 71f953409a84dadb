"""The subject of a plan, made of the settings that a user gives. Standard library only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError, Values, input_faults
from megatron_lite.config.known_models import PRESETS
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import build_run, flag_of
from megatron_lite.config.setting import settings_of

from .hardware import Hardware

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT, MICRO_BATCH = "context_parallel_size", "micro_batch_size"
LOSS_CHUNK, SEQUENCE, EXCHANGE = "loss_chunk_size", "sequence_parallel", "cp_comm_type"
EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size", "moe_token_dispatcher_type")
INSTANCES = "num_distributed_optimizer_instances"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# Of virtual stages, the first by itself. The others also fix how the layers are cut.
NUMBERS = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
)
VIRTUAL = (*NUMBERS, *ENDS)
# The fields that a layout sets. A value that the user gives fixes the dimension.
SEARCHED = frozenset(
    (TENSOR, PIPELINE, CONTEXT, MICRO_BATCH, LOSS_CHUNK, SEQUENCE, EXCHANGE, INSTANCES, *VIRTUAL)
    + EXPERTS
)
DATA_PARALLEL = ("use_distributed_optimizer", "use_torch_fsdp2")
OFFLOAD = "optimizer_cpu_offload"
AWARE = "use_precision_aware_optimizer"
MEAN_SQUARE = "exp_avg_sq_dtype"
FORMATS = ("main_grads_dtype", "exp_avg_dtype", MEAN_SQUARE)
WRAPPING = "fsdp_memory_efficient_wrapping"
RESHARD = "torch_fsdp2_reshard_after_forward"
# The recompute settings that the search leaves as they are. Any other one fixes the policy.
KEPT_RECOMPUTE = ("recompute_tail_skip", "recompute_verify")
USUAL_TOKENS = 2**22  # of a step, if --global-batch-size is not given
IDS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}  # of tokenizers with files
USUAL_IDS = 128000  # of other ones
USUAL_LENGTH = 8192  # the longest --seq-length that is assumed


class Problem(NamedTuple):
    """The subject of a plan: a run, a machine, its ranks, and the settings that the user has fixed.

    base: the run with the user's settings, and with the defaults of all searched dimensions.
    fixed: the values of the dimensions that the user has fixed, by the names of their fields.
    policy: the recompute settings by field, if they are fixed too.
    host_bytes: the host memory of a rank in which a policy may keep tensors. 0: none.
    states_on_host: the most bytes of optimizer states there. None: any.
    least_context: the fewest tokens of a sequence on one rank, if the batch divides over all ranks.
    """

    base: RunConfig
    hardware: Hardware
    fixed: Mapping[str, Any] = {}
    policy: Mapping[str, Any] | None = None
    host_bytes: int = 0
    states_on_host: int | None = None
    num_ranks: int = 1
    least_context: int = 2048

    @property
    def machine(self) -> Hardware:
        """The machine with as many ranks on each node as torchrun starts: equally many."""
        most = self.hardware.ranks_per_node
        if self.num_ranks < most or self.num_ranks % most == 0:
            return self.hardware
        return replace(self.hardware, ranks_per_node=math.gcd(self.num_ranks, most))


def problem_of(
    values: Values,
    chosen: Mapping[str, Any],
    hardware: Hardware,
    *,
    host_bytes: int | None = None,
    notes: list[str],
    num_ranks: Sequence[int] = (),
) -> Problem:
    """Returns the problem.

    values: those of the model or of a whole run. Its layout and its policy do not count.
    chosen: those of flags by field, which override them.
    num_ranks: the numbers of GPUs that will be asked for, so that an assumed batch suits them.
    Adds the assumptions to `notes`. Raises InputError if something is missing or wrong.
    """
    of_policy = settings_of(RecomputeConfig).keys() - KEPT_RECOMPUTE
    values = {name: value for name, value in {**values, **chosen}.items() if name not in of_policy}
    for name in SEARCHED & values.keys():
        del values[name]
    _complete(values, chosen, notes, num_ranks)
    policy = {name: value for name, value in chosen.items() if name in of_policy}
    with input_faults():
        base = build_run(values)
        base.recompute.instead(**policy)
    if base.tokenizer.vocab_size is None:
        kind = base.tokenizer.tokenizer_type
        number = base.tokenizer.padded_vocab_size or IDS.get(kind or "", USUAL_IDS)
        base = base.with_fields({"vocab_size": number})
        notes.append(
            f"--vocab-size {number} is assumed: a plan reads no file of the {kind}, so give its "
            "number of ids"
        )
    dimensions = SEARCHED.union(DATA_PARALLEL, [WRAPPING, RESHARD, OFFLOAD, *FORMATS])
    fixed = {name: value for name, value in chosen.items() if name in dimensions}
    fixes_policy = bool(policy) or base.compiles_layers
    return Problem(
        base, hardware, fixed, policy if fixes_policy else None, host_bytes or 0, host_bytes
    )


def _complete(
    values: Values, chosen: Mapping[str, Any], notes: list[str], num_ranks: Sequence[int]
) -> None:
    """Adds the values that a plan needs and that were not given, with a note for each."""
    values.setdefault("micro_batch_size", 1)
    if not values.get("fp16") and "bf16" not in values:
        values["bf16"] = True
        notes.append("--bf16 is assumed (--no-bf16 plans in float32)")
    positions = values.get("max_position_embeddings")
    if "seq_length" not in values and positions is not None:
        values["seq_length"] = min(positions, USUAL_LENGTH)
        notes.append(f"--seq-length {values['seq_length']} is assumed")
    length = values.get("seq_length")
    if length is None:
        raise InputError("missing --seq-length: give it, or a model with --model or --hf-config")
    if length < 1:
        raise InputError(f"--seq-length must be at least 1 (got {length})")
    rotary = values.get("position_embedding_type") == "rope"
    too_short = length > (positions or 0) and "max_position_embeddings" not in chosen
    if positions is None or (rotary and too_short):
        values["max_position_embeddings"] = length
        notes.append(f"--max-position-embeddings {length} is assumed, as --seq-length")
    if values.get("global_batch_size") is None:
        fixed = chosen.get("micro_batch_size") or values["micro_batch_size"]
        values["global_batch_size"] = usual_batch(USUAL_TOKENS // length, fixed, num_ranks)
        notes.append(
            f"--global-batch-size {values['global_batch_size']} is assumed, about 4 million "
            "tokens a step"
        )
    sizes = ("num_layers", "hidden_size", "num_attention_heads")
    if missing := [flag_of(name) for name in sizes if name not in values]:
        raise InputError(
            f"missing {', '.join(missing)}: give a model with --model ({', '.join(PRESETS)}), "
            "--hf-config FILE or --config-json FILE, or give its flags"
        )


def usual_batch(samples: int, micro_batch_size: int, num_ranks: Sequence[int]) -> int:
    """Returns a number of samples of at most about `samples` that decides no layout.

    It is a power of two times 1, 3, 5 or 7, times the odd parts of the numbers of ranks and of the
    micro-batch, so that every number of data-parallel ranks divides it.
    """
    odd = _odd(micro_batch_size) * math.lcm(*map(_odd, num_ranks))
    if odd > samples:  # too many ranks for one batch that suits them all
        odd = _odd(micro_batch_size)
    rest = max(1, samples // odd)
    unit = 1 << max(0, rest.bit_length() - 3)
    return max(micro_batch_size, odd * (rest // unit * unit))


def _odd(number: int) -> int:
    """Returns the largest odd divisor."""
    number = max(1, number)
    return number // (number & -number)
