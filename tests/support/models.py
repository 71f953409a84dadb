"""Small models for tests, which run on one rank of a TP group and are compared as whole tensors."""

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel.collectives import all_gather_first_dim, all_reduce_
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.sequence_spans import select, spans_of
from megatron_lite.parallel.state import parallel_state
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.initialize import initialize_parameters_
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.ranks import run_ranks

VOCAB_SIZE = 61  # no multiple of a number of ranks that splits it
SEQ_LENGTH, BATCH = 12, 3


def tiny_config(**overrides):
    """Returns the config of a GPT of unequal small sizes, without dropout."""
    values = dict(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=40,
        kv_channels=6,
        max_position_embeddings=17,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
    )
    if overrides.get("multi_latent_attention"):
        del values["kv_channels"]
    return ModelConfig(**{**values, **overrides})


@contextmanager
def tp_state(tp_size, *, cp_size=1, seed=7, **others):
    """Yields this process's parallel state in the initialised default group, if one exists.

    others: further fields of ParallelConfig.
    """
    config = ParallelConfig(
        tensor_model_parallel_size=tp_size,
        context_parallel_size=cp_size,
        distributed_backend="gloo",
        **others,
    )
    with parallel_state(config, seed=seed) as parallel:
        yield parallel


def on_ranks(fn, world_size, *, tp_size=1, detail=None, **others):
    """Calls `fn(parallel)` on several ranks (`run_ranks`), each with its parallel state.

    Returns the results in rank order. others: further arguments of `tp_state`.
    """

    def work(rank, world_size):
        with tp_state(tp_size, **others) as parallel:
            return fn(parallel)

    return run_ranks(work, world_size, detail=detail)


def with_new_streams(parallel):
    """Returns the state with random numbers that are the same every time."""
    return replace(
        parallel,
        rng=RngStreams(
            parallel.device, seed=7, tp_rank=parallel.tp_rank, dp_rank=parallel.dp_cp_rank
        ),
    )


def padded_vocab_size(tp_size):
    """Returns the padded size, a multiple of 12 rows per rank.

    It is 72 at TP 1 and 2, and 96 at TP 4, whose last rank holds only padding.
    """
    return -(-VOCAB_SIZE // (12 * tp_size)) * 12 * tp_size


def plan_of(policy, num_layers, **others):
    """Returns the plan of a policy for the first stage. others: further fields of the config."""
    return plan_stage(RecomputeConfig(recompute_policy=policy, **others), num_layers)


def tiny_sizes(config, tp_size=1, **others):
    """Returns the sizes of a step of a tiny model. others: further fields."""
    return Sizes(
        model=config,
        micro_batch_size=BATCH,
        seq_length=SEQ_LENGTH,
        padded_vocab_size=padded_vocab_size(tp_size),
        tp_size=tp_size,
        **others,
    )


def build_tiny_model(
    config,
    parallel,
    *,
    sequence_parallel=False,
    dtype=torch.float64,
    seed=7,
    plan=None,
    loss_chunk_size=None,
    stage=None,
    cp_comm_type="p2p",
    vocab_size=VOCAB_SIZE,
    kernels=None,
):
    """Returns this rank's shard of a model or stage. Elements of a bias or norm weight differ.

    plan: or the text of a policy.
    """
    context = RankContext.of(
        parallel,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        cp_comm_type=cp_comm_type,
        kernels=kernels,
        loss_kernels=kernels,
    )
    padded = padded_vocab_size(parallel.tp_size) if vocab_size == VOCAB_SIZE else vocab_size
    model = GPTModel(
        config,
        context,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        plan=plan_of(plan, config.num_layers) if isinstance(plan, str) else plan,
        loss_chunk_size=loss_chunk_size,
        stage=stage,
    )
    initialize_parameters_(model, parallel, seed=seed)
    perturb_constant_parameters_(model, parallel)
    return model


class Layout(NamedTuple):
    """The ranks that share tensors and sequences, and how they do it."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_comm_type: str | tuple[str, ...] = "p2p"

    @property
    def ranks(self):
        return self.tp * self.cp

    @property
    def can_split(self):
        """Whether a policy may split the input of a unit over the ranks."""
        return self.tp > 1 and not self.sequence_parallel

    def state(self, **others):
        return tp_state(self.tp, cp_size=self.cp, **others)

    def model(self, config, parallel, **options):
        return build_tiny_model(
            config,
            parallel,
            sequence_parallel=self.sequence_parallel,
            cp_comm_type=self.cp_comm_type,
            **options,
        )

    def sizes(self, config, dtype=torch.float32, **others):
        return tiny_sizes(
            config,
            self.tp,
            sequence_parallel=self.sequence_parallel,
            cp_size=self.cp,
            cp_comm_type=self.cp_comm_type,
            element_bytes=dtype.itemsize,
            **others,
        )


@torch.no_grad()
def perturb_constant_parameters_(model, parallel):
    """Gives the elements of biases and norm weights different values, by global index.

    Their usual zeros and ones would hide mistakes.
    """
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.init_std is not None:
            continue
        place = parallel.holding(spec)
        numbers = torch.arange(math.prod(spec.global_shape), dtype=parameter.dtype)
        whole = (0.3 * torch.sin(numbers + 1.0) + spec.init_value).view(spec.global_shape)
        if spec.of_experts:
            whole = whole.chunk(place.ep_size)[place.ep_rank]
        _copy_shard_(parameter, whole, spec, place.tp_rank, place.tp_size)


def sample_tokens(seed=3, *, batch=BATCH, seq_length=SEQ_LENGTH, parallel=None):
    """Returns (tokens, labels): each [b, s], or with `parallel` this rank's spans [b, s/c]."""
    text = torch.randint(
        0, VOCAB_SIZE, (batch, seq_length + 1), generator=torch.Generator().manual_seed(seed)
    )
    rank, size = (0, 1) if parallel is None else (parallel.cp_rank, parallel.cp_size)
    spans = spans_of(seq_length, rank=rank, size=size)
    return select(text[:, :-1], spans, 1), select(text[:, 1:], spans, 1)


@torch.no_grad()
def load_whole_(model, weights, parallel):
    """Copies this rank's part of each whole tensor into the parameter. Padding rows become zero."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
    for name, parameter in parameters.items():
        spec = spec_of(parameter)
        assert weights[name].shape == spec.global_shape, name
        parameter.zero_()
        _copy_shard_(parameter, weights[name], spec, parallel.tp_rank, parallel.tp_size)


def _copy_shard_(shard, whole, spec, rank, size, *, back=False):
    """Copies a rank's part of a whole tensor into its shard, or back."""
    if spec.tp_dim is None:
        shard.copy_(whole)
        return
    for span in spec.spans(rank, size):
        local = shard.narrow(spec.tp_dim, span.local_start, span.length)
        part = whole.narrow(spec.tp_dim, span.global_start, span.length)
        (part if back else local).copy_(local if back else part)


def specs_of(model):
    """Returns the spec of each parameter by its name."""
    return {name: spec_of(parameter) for name, parameter in model.named_parameters()}


def whole_tensor(local, parameter, parallel):
    """Returns the whole tensor, without padding, of which each TP rank holds the shard `local`.

    The shard is split like `parameter`. One all-gather over the TP group, if it is split.
    """
    return whole_tensors({"": local}, {"": spec_of(parameter)}, parallel)[""]


def whole_tensors(tensors, specs, parallel):
    """Returns the whole tensors, without padding, of which each TP rank holds the shards `tensors`,
    and of experts each expert-parallel rank its own.

    specs: how the parameter of each name is split, as its tensor is (`specs_of`).

    One all-gather over the TP group for each
    dtype gets all split tensors: in small models a collective costs more than its bytes.
    """
    whole = {name: local.detach().clone() for name, local in tensors.items()}
    split = [name for name in tensors if specs[name].tp_dim is not None]
    for name in tensors:
        if specs[name].of_experts and parallel.experts is not None:
            place = parallel.experts
            whole[name] = all_gather_first_dim(whole[name], place.ep_group)
            if place.tp_size == 1:
                split = [other for other in split if other != name]
    for dtype in sorted({tensors[name].dtype for name in split}, key=str):
        names = [name for name in split if tensors[name].dtype == dtype]
        shards = all_gather_first_dim(
            torch.cat([whole[name].reshape(-1) for name in names]).unsqueeze(0), parallel.tp_group
        )
        sizes = [whole[name].numel() for name in names]
        for name, parts in zip(names, shards.split(sizes, 1), strict=True):
            whole[name] = _joined(
                parts.reshape(-1, *whole[name].shape), specs[name], parallel.tp_size
            )
    return whole


def _joined(shards, spec, tp_size):
    """Returns the tensor of which shards[rank] is a rank's shard."""
    assert spec.tp_dim is not None
    whole = shards.new_zeros(spec.global_shape)
    for rank in range(tp_size):
        _copy_shard_(shards[rank], whole, spec, rank, tp_size, back=True)
    return whole


@dataclass(frozen=True)
class Outcome:
    """The loss, and the whole gradients by parameter name."""

    loss: Tensor
    grads: dict[str, Tensor]


def loss_and_grads(model, parallel, *, seq_length=SEQ_LENGTH):
    """Runs two micro-batches forward and backward through the product's own gradient buffer."""
    buffer = GradBuffer(dict(model.named_parameters()), parallel)
    total = torch.zeros((), dtype=torch.float64)
    for number in range(2):
        tokens, labels = sample_tokens(number, parallel=parallel, seq_length=seq_length)
        loss = model(tokens, labels).mean() / (2 * parallel.cp_size)
        loss.backward()
        total += loss.detach()
    buffer.reduce_()
    return Outcome(
        all_reduce_(total, parallel.cp_group),
        whole_tensors(buffer.grads, specs_of(model), parallel),
    )
