"""Random-init models of `transformers` with their weights copied over: the same logits, loss and
gradients."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import stages
from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.equality import difference
from tests.support.hf import PEERS, V, our_config, our_tensors
from tests.support.models import (
    load_whole_,
    padded_vocab_size,
    sample_tokens,
    tp_state,
    whole_tensor,
)
from tests.support.pairs import FULL_GRIDS
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")


@dataclass(frozen=True)
class Result:
    """logits [b, s, V]; loss: mean over all tokens; gradients by our parameter names."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def theirs(name, dtype):
    """Our configuration, the weights under our names, and what transformers computes with them."""
    model = PEERS[name]().to(dtype)
    config = our_config(model)
    tokens, labels = sample_tokens()
    text = torch.cat((tokens, labels[:, -1:]), dim=1)
    # shifts the labels itself, and takes the loss in float32
    output = model(input_ids=text, labels=text)
    logits = output.logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    weights = our_tensors(
        model, {key: value.detach() for key, value in model.named_parameters()}, config
    )
    grads = our_tensors(model, {key: value.grad for key, value in model.named_parameters()}, config)
    return config, weights, Result(logits.detach(), loss.detach(), grads)


def ours(config, weights, dtype, tp_size):
    """The same on this rank."""
    with tp_state(tp_size) as parallel:
        context = RankContext.of(parallel, sequence_parallel=True, params_dtype=dtype)
        model = GPTModel(
            config, context, vocab_size=V, padded_vocab_size=padded_vocab_size(tp_size)
        )
        load_whole_(model, weights, parallel)
        parameters = dict(model.named_parameters())
        buffer = GradBuffer(parameters, parallel)
        tokens, labels = sample_tokens()
        loss = model(tokens, labels).mean()
        loss.backward()
        buffer.reduce_()
        with torch.no_grad():
            logits = model(tokens)
        return Result(
            logits,
            loss.detach(),
            {
                key: whole_tensor(buffer.grads[key], value, parallel)
                for key, value in parameters.items()
            },
        )


def ours_in_stages(config, weights, dtype):
    """The same from two pipeline stages, each with its own weights, one after the other."""
    split = stages(ParallelConfig(pipeline_model_parallel_size=2), config.num_layers)
    tokens, labels = sample_tokens()
    with tp_state(1) as parallel:
        context = RankContext.of(parallel, sequence_parallel=False, params_dtype=dtype)
        first, last = (
            GPTModel(
                config, context, vocab_size=V, padded_vocab_size=padded_vocab_size(1), stage=stage
            )
            for stage in split
        )
        for model in (first, last):
            held = {name for name, _ in model.named_parameters()}
            load_whole_(model, {name: weights[name] for name in held}, parallel)
        hidden_states = first(tokens)
        loss = last(hidden_states, labels).mean()
        loss.backward()
        with torch.no_grad():
            logits = last(hidden_states)
        grads = {}
        for model in (first, last):
            for name, parameter in model.named_parameters():
                grad = whole_tensor(parameter.grad, parameter, parallel)
                grads[name] = grads[name] + grad if name in grads else grad  # a tied embedding
        return Result(logits, loss.detach(), grads)


@pytest.mark.runs(daily=4, ci=60)
@pytest.mark.parametrize(
    "name, dtype, tolerance",
    [("gpt2", torch.float64, 1e-12), *((name, torch.float32, 1e-5) for name in PEERS)],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(name, dtype, tolerance):
    """Relative to the largest value of each tensor. transformers computes RMSNorm and rotary angles
    in float32."""
    config, weights, expected = theirs(name, dtype)
    results = [ours(config, weights, dtype, 1), ours_in_stages(config, weights, dtype)]
    # One group of keys is not split. The default run splits each third family.
    if config.query_groups > 1 and (FULL_GRIDS or [*PEERS].index(name) % 3 == 0):
        results += run_ranks(lambda rank, world_size: ours(config, weights, dtype, world_size), 2)
    for result in results:
        assert difference(expected.logits, result.logits) < tolerance
        assert difference(expected.loss, result.loss) < tolerance
        assert expected.grads.keys() == result.grads.keys()
        assert {
            key
            for key, grad in expected.grads.items()
            if not difference(grad, result.grads[key]) < 10 * tolerance
        } == set()
