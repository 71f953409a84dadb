"""The shapes and settings of the benchmarks, and our model and optimizer for one of them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.run import DEFAULT_LOSS_TOKENS
from megatron_lite.config.training import TrainingConfig
from megatron_lite.model.gpt import GPTModel, ModelStages
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState
from megatron_lite.tensor_parallel.rank_context import RankContext
from megatron_lite.training.apex_kernels import fuse_weight_gradients_
from megatron_lite.training.batches import MicroBatch

SEED = 1234
LEARNING_RATE = 1e-4
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


class Shape(NamedTuple):
    """One GPT with learned positions and tied embeddings, and the tokens of one step."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    batch_size: int
    vocab_size: int


PRESETS = {
    "tiny": Shape(2, 64, 4, 32, 2, 256),
    "small": Shape(4, 256, 8, 256, 4, 4096),
    "medium": Shape(8, 512, 8, 512, 4, 8192),
    "1024": Shape(16, 1024, 16, 2048, 2, 32768),
    "0.6b": Shape(28, 1024, 16, 4096, 1, 32000),  # as deep and as wide as Qwen3 0.6B
    "gpt2": Shape(12, 768, 12, 1024, 8, 50304),
    "a3b": Shape(1, 2048, 32, 4096, 1, 32768),  # a layer of Qwen3-30B-A3B, with --family qwen3_moe
    "8b": Shape(6, 4096, 32, 4096, 1, 32768),  # Llama 3 8B but for its vocabulary and depth
}


def llama(shape):
    """Returns what a Llama has besides the sizes: rotary positions, RMSNorm, swiglu, no biases,
    untied."""
    return dict(
        normalization="RMSNorm",
        swiglu=True,
        position_embedding_type="rope",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        ffn_hidden_size=-(-8 * shape.hidden_size // (3 * 64)) * 64,
    )


def qwen3_moe(shape):
    """Returns what Qwen3's experts have. At h = 2048 a layer is that of Qwen3-30B-A3B."""
    h, heads = shape.hidden_size, shape.num_attention_heads
    experts = max(8, h // 16)
    return dict(
        llama(shape),
        kv_channels=2 * h // heads,
        group_query_attention=True,
        num_query_groups=max(1, heads // 8),
        qk_layernorm=True,
        num_experts=experts,
        moe_router_topk=max(2, experts // 16),
        moe_ffn_hidden_size=3 * h // 8,
    )


# By the name of the model in transformers, which has the same.
FAMILIES = {"gpt2": lambda shape: {}, "llama": llama, "qwen3_moe": qwen3_moe}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that the rows of one block have in common."""

    shape: Shape
    device: torch.device
    dtype: str
    dropout: float
    compiled: bool = False  # whether ours has the kernels of --torch-compile
    family: str = "gpt2"

    @property
    def tokens(self):
        """The tokens of the batch."""
        return self.shape.batch_size * self.shape.seq_length

    @property
    def sizes(self):
        """The batch and the vocabulary as fields of description's Sizes."""
        shape = self.shape
        return dict(
            micro_batch_size=shape.batch_size,
            seq_length=shape.seq_length,
            padded_vocab_size=shape.vocab_size,
        )

    @property
    def loss_in_one_pass(self):
        """Whether a loss in chunks computes its gradients in forward, as in a run."""
        return self.dtype == "float32"

    @property
    def loss_chunk_size(self):
        """The tokens of a loss chunk, as in a run without --loss-chunk-size."""
        is_long = self.tokens > DEFAULT_LOSS_TOKENS
        return DEFAULT_LOSS_TOKENS if is_long and self.loss_in_one_pass else None

    def model_config(self):
        """Returns the shape as a config of megatron_lite."""
        shape = self.shape
        return ModelConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            max_position_embeddings=shape.seq_length,
            num_attention_heads=shape.num_attention_heads,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            **FAMILIES[self.family](shape),
        )

    def batch(self):
        """Returns random tokens, the same for every engine."""
        text = torch.randint(
            0,
            self.shape.vocab_size,
            (self.shape.batch_size, self.shape.seq_length + 1),
            generator=torch.Generator().manual_seed(SEED),
        ).to(self.device)
        return MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def our_model(setting, parallel, *, plan=None, weights=None):
    """Returns a model with these parameters, by name, as its own. None: new ones, drawn on the
    device, which is faster than a run's draws on the host."""
    kernels = CompiledKernels() if setting.compiled else None
    context = RankContext.of(
        parallel,
        sequence_parallel=False,
        params_dtype=DTYPES[setting.dtype],
        kernels=kernels,
        loss_kernels=kernels,
    )
    vocab_size = setting.shape.vocab_size
    model = GPTModel(
        setting.model_config(),
        context,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        plan=plan,
    )
    if weights is not None:
        model.load_state_dict(weights, assign=True)
        return model
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            spec = spec_of(parameter)
            parameter.normal_(spec.init_value, spec.init_std or 0.0)
    return model


def one_rank(setting):
    """Returns the state of a run with this process as its only rank."""
    return ParallelState(device=setting.device, rng=RngStreams(setting.device, seed=SEED))


def our_optimizer(model, setting, **settings):
    """Returns the optimizer of a training run, whose weight gradients go the way of a run."""
    stages, parallel = ModelStages([model]), one_rank(setting)
    kernels = model.decoder.context.kernels
    optimizer = Optimizer(stages, OptimizerConfig(**settings), parallel, kernels=kernels)
    fuse_weight_gradients_(TrainingConfig(micro_batch_size=1), parallel, stages, optimizer)
    return optimizer
