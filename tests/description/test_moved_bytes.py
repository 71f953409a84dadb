"""The bytes that the description says kernels move, against the operators that torch dispatches.

The model lies on torch's meta device: operators have shapes and run nothing, and the code takes the
branches of a GPU.
"""

import pytest
import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.dispatch import Dispatches, tensors_in

MATMULS = {"mm", "addmm", "bmm", "baddbmm"}
SHAPES_ALONE = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view"}
WRITE_ONLY = {"copy_", "zero_", "fill_"}
BATCH, SEQ_LENGTH = 2, 256
# RMSNorm is many operators on the meta device, and one kernel on a GPU.
LLAMA = dict(position_embedding_type="rope", swiglu=True, add_bias_linear=False)
CASES = {
    "gpt2": dict(),
    "relu": dict(squared_relu=True, position_embedding_type="none"),
    "llama": dict(**LLAMA, group_query_attention=True, num_query_groups=4),
    "rope": dict(position_embedding_type="rope"),
    "caps": dict(attn_logit_softcapping=0.7),
}


def moved(tensor):
    """Returns the bytes of a tensor's elements in memory. An expanded dim counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


class Moves(Dispatches):
    """Sums the bytes of the inputs and outputs of all operators but matmuls and views."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def saw(self, func, args, kwargs, results):
        name = func.overloadpacket.__name__
        if func.is_view or name in MATMULS | SHAPES_ALONE:
            return
        inputs = {id(leaf): leaf for leaf in tensors_in((args, kwargs))}
        if name in WRITE_ONLY:
            del inputs[id(args[0])]
        self.num_bytes += sum(map(moved, [*inputs.values(), *tensors_in(results)]))


def dispatched(config):
    """Returns the bytes that forward and backward of a model move."""
    with torch.device("meta"):
        context = RankContext(
            rng=RngStreams(torch.device("cpu"), seed=1),
            device=torch.device("meta"),
            params_dtype=torch.bfloat16,
        )
        model = GPTModel(config, context, vocab_size=128, padded_vocab_size=128)
        tokens = torch.zeros(BATCH, SEQ_LENGTH, dtype=torch.long)
    with Moves() as forward:
        losses = model(tokens, tokens)
    with Moves() as backward:
        losses.backward(torch.empty_like(losses))
    return forward.num_bytes, backward.num_bytes


@pytest.mark.parametrize("case", CASES)
def test_a_layer_moves_the_bytes_that_torch_dispatches(case, monkeypatch):
    # torch knows no autocast for the meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    one, two = (
        ModelConfig(
            num_layers=layers,
            hidden_size=1024,
            num_attention_heads=16,
            max_position_embeddings=SEQ_LENGTH,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attention_backend="unfused",
            **CASES[case],
        )
        for layers in (1, 2)
    )
    measured = [long - short for long, short in zip(dispatched(two), dispatched(one), strict=True)]
    sizes = Sizes(
        model=one,
        micro_batch_size=BATCH,
        seq_length=SEQ_LENGTH,
        padded_vocab_size=128,
        element_bytes=2,
        device="cuda",
    )
    operations = describe_layer(sizes).operations
    described = [
        sum(operation.moved[direction] for operation in operations) for direction in (0, 1)
    ]
    # The spread of a mask inside a matmul is not dispatched; small tables are not described.
    assert described == pytest.approx(measured, rel=0.2)
