"""Every flag that changes the memory of a rank moves the predicted peak in the measured direction.

A flip is a pair of runs that differ in one setting. Both are measured in a real step, and both are
predicted. The table has a flip for each field of the configuration, or the reason why the field
needs none, so that a new field fails a test until somebody has decided.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import pytest

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo  # noqa: F401

from arguments import topics
from benchmarks.memory import CP, FEW_TOKENS, FSDP, PP, SMALL, TP, VIRTUAL, ZERO1, Case, rows

UNFUSED = "--attention-backend unfused"
ROPE = "--position-embedding-type rope"
FULL = "--recompute-granularity full --recompute-method uniform"
FINE = "--fine-grained-activation-offloading --offload-modules"
MUON = f"{FEW_TOKENS} --optimizer muon"
UNTIED = "--untie-embeddings-and-output-weights"


class Peaks(NamedTuple):
    """The highest peak of the ranks, in bytes."""

    predicted: int
    measured: int


class Flip(NamedTuple):
    """A change of a run.

    field: the setting that changes. flags: the flags of the change. base: the flags of both runs,
    on top of the sizes of benchmarks/memory.py.
    micro_batches: those of a rank, in the first and in the second run.
    """

    field: str
    flags: str
    base: str = SMALL
    ranks: int = 1
    micro_batches: tuple[int, int] = (2, 2)

    @property
    def name(self) -> str:
        """The name of the test."""
        return " ".join((self.field, *self.flags.split()[1:2]))

    def peaks(self) -> tuple[Peaks, Peaks]:
        """Returns the peaks without and with the change."""
        return (
            peaks_of(self.base, self.ranks, self.micro_batches[0]),
            peaks_of(f"{self.base} {self.flags}", self.ranks, self.micro_batches[1]),
        )


@lru_cache
def peaks_of(flags: str, ranks: int, micro_batches: int) -> Peaks:
    """Runs two steps. Returns the predicted and the measured peak of the second one."""
    found = rows(Case(flags, flags, ranks, micro_batches))
    return Peaks(
        max(row.predicted_bytes for row in found), max(row.measured_bytes for row in found)
    )


ONE_RANK = (
    Flip("num_layers", "--num-layers 6"),
    Flip("hidden_size", "--hidden-size 160"),
    Flip("num_attention_heads", "--num-attention-heads 8", f"{SMALL} {UNFUSED}"),
    Flip("max_position_embeddings", "--max-position-embeddings 256"),
    Flip("ffn_hidden_size", "--ffn-hidden-size 640"),
    Flip("kv_channels", "--kv-channels 48"),
    Flip("group_query_attention", "--group-query-attention --num-query-groups 2"),
    Flip(
        "num_query_groups",
        "--num-query-groups 1",
        f"{SMALL} --group-query-attention --num-query-groups 2",
    ),
    Flip("position_embedding_type", ROPE),
    Flip("position_embedding_type", "--position-embedding-type none"),
    Flip("rotary_percent", "--rotary-percent 0.5", f"{SMALL} {ROPE}"),
    Flip("parallel_residual", "--parallel-residual"),
    Flip("normalization", "--normalization RMSNorm"),
    Flip("apply_layernorm_1p", "--apply-layernorm-1p"),
    Flip("qk_layernorm", "--qk-layernorm"),
    Flip(
        "qk_layernorm_scope",
        "--qk-layernorm-scope all-heads",
        f"{SMALL} --qk-layernorm --normalization RMSNorm",
    ),
    Flip("swiglu", "--swiglu"),
    Flip("add_bias_linear", "--disable-bias-linear"),
    Flip("add_qkv_bias", "--add-qkv-bias", f"{SMALL} --disable-bias-linear"),
    Flip("untie_embeddings_and_output_weights", UNTIED),
    Flip("attention_backend", UNFUSED),
    Flip("attention_softmax_in_fp32", "--attention-softmax-in-fp32", f"{SMALL} --bf16 {UNFUSED}"),
    Flip("fp32_residual_connection", "--fp32-residual-connection", f"{SMALL} --bf16"),
    Flip("hidden_dropout", "--hidden-dropout 0.1"),
    Flip("attention_dropout", "--attention-dropout 0.1"),
    Flip("micro_batch_size", "--micro-batch-size 3"),
    Flip("bf16", "--bf16"),
    Flip("fp16", "--fp16"),
    Flip("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion"),
    Flip("loss_chunk_size", "--loss-chunk-size 64", ""),
    Flip("seq_length", "--seq-length 96"),
    Flip("eod_mask_loss", "--eod-mask-loss"),
    Flip("reset_position_ids", "--reset-position-ids"),
    Flip("reset_attention_mask", "--reset-attention-mask"),
    Flip("reset_attention_mask", "--reset-attention-mask", f"{SMALL} {UNFUSED}"),
    Flip("vocab_size", "--vocab-size 3000", ""),
    Flip("make_vocab_size_divisible_by", "--make-vocab-size-divisible-by 1024"),
    Flip("optimizer", "--optimizer muon"),
    Flip("optimizer", "--optimizer muon", FEW_TOKENS),
    Flip("muon_nesterov", "--muon-nesterov", MUON),
    Flip(
        "muon_split_qkv", "--muon-no-split-qkv", f"{MUON} --hidden-size 768 --ffn-hidden-size 256"
    ),
    Flip("muon_fp32_matmul_prec", "--muon-fp32-matmul-prec high", MUON),
    Flip("recompute_activations", "--recompute-activations", f"{SMALL} {UNFUSED}"),
    Flip("recompute_granularity", FULL),
    Flip("recompute_method", f"{FULL[:-7]}block", f"{SMALL} {FULL}"),
    Flip("recompute_num_layers", "--recompute-num-layers 2", f"{SMALL} {FULL}"),
    Flip(
        "recompute_modules", "--recompute-modules mlp", f"{SMALL} --recompute-granularity selective"
    ),
    Flip("recompute_policy", "--recompute-policy *:pointwise"),
    Flip("recompute_policy", "--recompute-policy *:ops(matmul)"),
    Flip("recompute_policy", "--recompute-policy *:none@host"),
    Flip("recompute_policy", "--recompute-policy *:none@host(core_attn)"),
    Flip("cpu_offloading_num_layers", "--cpu-offloading-num-layers 2"),
    Flip("offload_modules", "--offload-modules core_attn mlp_norm", f"{SMALL} {FINE} core_attn"),
    Flip("fine_grained_activation_offloading", f"{FINE} core_attn"),
    Flip("recompute_tail_skip", "--no-recompute-tail-skip", f"{SMALL} {FULL}"),
    Flip("recompute_verify", "--recompute-verify", f"{SMALL} {FULL}"),
)
TWO_RANKS = (
    Flip("tensor_model_parallel_size", TP, SMALL, 2),
    Flip("sequence_parallel", "--sequence-parallel", f"{SMALL} {TP}", 2),
    Flip("pipeline_model_parallel_size", PP, SMALL, 2, (4, 4)),
    Flip("num_virtual_stages_per_pipeline_rank", VIRTUAL, f"{SMALL} {PP}", 2, (4, 4)),
    Flip(
        "num_layers_per_virtual_pipeline_stage",
        "--num-layers-per-virtual-pipeline-stage 1",
        f"{SMALL} {PP}",
        2,
        (4, 4),
    ),
    Flip(
        "decoder_first_pipeline_num_layers",
        "--decoder-first-pipeline-num-layers 1",
        f"{SMALL} {PP}",
        2,
        (4, 4),
    ),
    Flip(
        "decoder_last_pipeline_num_layers",
        "--decoder-last-pipeline-num-layers 1",
        f"{SMALL} {PP}",
        2,
        (4, 4),
    ),
    Flip("context_parallel_size", CP, SMALL, 2),
    Flip("cp_comm_type", "--cp-comm-type allgather", f"{SMALL} {CP}", 2),
    Flip("use_distributed_optimizer", ZERO1, SMALL, 2),
    Flip("use_torch_fsdp2", FSDP, SMALL, 2),
    Flip("torch_fsdp2_reshard_after_forward", "--torch-fsdp2-no-reshard-after-forward", FSDP, 2),
    Flip(
        "fsdp_memory_efficient_wrapping", "--fsdp-memory-efficient-wrapping", f"{FSDP} {UNTIED}", 2
    ),
    Flip("grad_reduce_in_bf16", "--grad-reduce-in-bf16", f"{FEW_TOKENS} --bf16", 2),
    Flip("global_batch_size", "", f"{SMALL} {PP}", 2, (1, 4)),
    Flip("global_batch_size", "", FSDP, 2, (1, 2)),
    Flip("muon_tp_mode", "--muon-tp-mode blockwise", f"{MUON} {TP}", 2),
    Flip(
        "distribute_saved_activations",
        "--distribute-saved-activations",
        f"{SMALL} {TP} {FULL} --num-layers 8 --micro-batch-size 4",
        2,
    ),
    Flip(
        "num_microbatches_with_partial_activation_checkpoints",
        "--num-microbatches-with-partial-activation-checkpoints 1",
        f"{SMALL} {PP} {FULL}",
        2,
        (4, 4),
    ),
)
FLIPS = (*ONE_RANK, *TWO_RANKS)
# One of each kind. Two runs take a second on an idle machine.
IN_EVERY_RUN = (
    "attention_backend",
    "micro_batch_size",
    "bf16",
    "recompute_granularity",
    "use_distributed_optimizer",
)

# Flags that leave the peak as it is, with the flags of both runs.
WITHOUT_CHANGE = {
    "no_rope_freq": ("--no-rope-freq 2", f"{SMALL} {ROPE}"),
    "rotary_base": ("--rotary-base 500", f"{SMALL} {ROPE}"),
    "use_rope_scaling, rope_scaling_factor, rotary_seq_len_interpolation_factor": (
        "--use-rope-scaling --rope-scaling-factor 4 --rotary-seq-len-interpolation-factor 2",
        f"{SMALL} {ROPE}",
    ),
    # Before attention or after it: the norm and the linear layer beside it each keep an [s, b, h].
    "norm_position": ("--norm-position after", SMALL),
    "squared_relu": ("--squared-relu", SMALL),
    "bias_gelu_fusion": ("--no-bias-gelu-fusion", SMALL),
    "window_size": ("--window-size 32,0", SMALL),
    "window_attn_skip_freq": ("--window-attn-skip-freq 2", f"{SMALL} --window-size 32,0"),
    "norm_epsilon, init_method_std": ("--norm-epsilon 1e-3 --init-method-std 0.1", SMALL),
    "seed, deterministic_mode": ("--seed 5 --deterministic-mode", SMALL),
    "adam_beta1, adam_beta2, adam_eps": (
        "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6",
        FEW_TOKENS,
    ),
    "weight_decay, clip_grad": ("--weight-decay 0 --clip-grad 0", FEW_TOKENS),
    "muon_momentum, muon_num_ns_steps, muon_scale_mode, muon_extra_scale_factor, "
    "muon_coefficient_type": (
        "--muon-momentum 0.5 --muon-num-ns-steps 3 --muon-scale-mode unit_rms_norm "
        "--muon-extra-scale-factor 2 --muon-coefficient-type simple",
        MUON,
    ),
    "calculate_per_token_loss": ("--calculate-per-token-loss", f"{SMALL} --eod-mask-loss"),
    "contiguous_saved_activations": ("--contiguous-saved-activations", f"{SMALL} {FULL}"),
    "overlap_grad_reduce, ddp_bucket_size": (
        "--overlap-grad-reduce --ddp-bucket-size 100000",
        f"{SMALL} {ZERO1} --bf16",
    ),
}
# The topics without a field that a step's memory depends on.
TOPICS_WITHOUT_MEMORY = ("loss_scaling", "lr_schedule", "checkpoint", "logging", "profiling")
# Why the other fields are in no run of this file.
NOT_RUN = {
    "norm_impl": "apex runs on GPUs alone",
    "optimizer_impl": "apex runs on GPUs alone",
    "torch_compile": "the prediction is for steps that are not compiled, and the run says so",
    "activation_memory_budget": "needs --torch-compile",
    "memory_budget": "is for --recompute-policy auto, which another policy replaces at the start",
    "memory_limit": "only limits",
    "allow_predicted_out_of_memory": "only allows",
    "overlap_p2p_comm": "adds at most one hidden state, as far as it comes early, which is luck",
    "overlap_param_gather": "gathers in place",
    "distributed_backend": "gloo is the one that runs on CPUs",
    "distributed_timeout_minutes": "a time limit",
    "distributed_timeout_seconds_after_init": "a time limit",
    "rampup_batch_size": "a smaller batch at first: --global-batch-size",
    "step_batch_size_schedule": "other batches at first: --global-batch-size",
    "train_iters": "the length of a run",
    "train_samples": "the length of a run",
    "eval_interval": "an evaluation is no step",
    "eval_iters": "an evaluation is no step",
    "exit_interval": "the end of a run",
    "exit_duration_in_mins": "the end of a run",
    "exit_signal_handler": "the end of a run",
    "exit_signal": "the end of a run",
    "check_for_nan_in_loss_and_grad": "reads numbers",
    "max_skipped_updates": "reads numbers",
    "skip_update_on_spike": "reads numbers",
    "check_weight_hash_across_dp_replicas_interval": "runs between steps",
    "data_path": "where tokens come from",
    "mock_data": "where tokens come from",
    "split": "where tokens come from",
    "data_cache_path": "where tokens come from",
    "data_args_path": "where tokens come from",
    "train_data_path": "where tokens come from",
    "valid_data_path": "where tokens come from",
    "test_data_path": "where tokens come from",
    "per_split_data_args_path": "where tokens come from",
    "dataloader_type": "where tokens come from",
    "data_sharding": "where tokens come from",
    "tokenizer_type": "gives the vocabulary's size alone",
    "tokenizer_model": "gives the vocabulary's size alone",
    "vocab_file": "gives the vocabulary's size alone",
    "merge_file": "gives the vocabulary's size alone",
    "tiktoken_pattern": "splits texts",
    "tiktoken_num_special_tokens": "gives the vocabulary's size alone",
    "tokenizer_special_tokens": "names token ids",
}
SCALARS_BYTES = 512


@pytest.mark.parametrize(
    "flip",
    [
        pytest.param(
            flip, id=flip.name, marks=[] if flip.field in IN_EVERY_RUN else pytest.mark.long
        )
        for flip in FLIPS
    ],
)
def test_a_flag_moves_the_prediction_in_the_measured_direction(flip: Flip) -> None:
    before, after = flip.peaks()
    assert after.measured != before.measured, "the flag does not change the peak of this base"
    # The prediction is an estimate within 5 %: smaller steps of the measured peak are below it.
    if abs(after.measured - before.measured) > 0.05 * before.measured:
        assert after.predicted != before.predicted
    if after.predicted != before.predicted:
        assert (after.predicted > before.predicted) == (after.measured > before.measured)


@pytest.mark.long
@pytest.mark.parametrize("fields", WITHOUT_CHANGE)
def test_a_flag_without_memory_leaves_both_peaks_as_they_are(fields: str) -> None:
    flags, base = WITHOUT_CHANGE[fields]
    ranks = 2 if ZERO1 in base else 1
    before, after = Flip(fields, flags, base, ranks).peaks()
    assert after.predicted == before.predicted
    # Each tensor is rounded up to the allocator's 64 bytes, and a few scalars come and go.
    assert abs(after.measured - before.measured) <= SCALARS_BYTES


def test_every_field_of_the_configuration_is_in_one_of_the_tables() -> None:
    without = {field for fields in WITHOUT_CHANGE for field in fields.split(", ")}
    decided = [{flip.field for flip in FLIPS}, without, set(NOT_RUN)]
    every = {
        field.name
        for topic, config in topics().items()
        if topic not in TOPICS_WITHOUT_MEMORY
        for field in dataclasses.fields(config)
    }
    assert set().union(*decided) == every
    assert sum(map(len, decided)) == len(every), "a field is in two tables"
