"""--loss-chunk-size in float32: forward computes the gradients of the head, in one pass over the
chunks. The oracle is the loss in two passes, whose backward computes the logits again."""

import itertools
import math
from contextlib import contextmanager
from unittest.mock import PropertyMock, patch

import pytest
import torch

from arguments import parse_args
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.tensor_parallel import linear_cross_entropy
from megatron_lite.tensor_parallel.cross_entropy import RowStatistics, row_statistics
from megatron_lite.training.batches import cut, document_rules, masked_mean
from megatron_lite.training.build_trainer import build_runner
from megatron_lite.training.observe import ActivationMeter
from megatron_lite.training.step import train_step
from tests.config.test_rules import TWO_PASSES
from tests.support.pairs import covered
from tests.support.ranks import run_ranks
from tests.support.saves import same

VOCABULARY, BATCH, SEQ_LENGTH, MICRO_BATCHES = 61, 2, 8, 2
TWO = "--tensor-model-parallel-size 2"
LAYOUTS = {
    "one": (1, ""),
    "tp": (2, TWO),
    "sp": (2, f"{TWO} --sequence-parallel"),
    "pp": (2, "--pipeline-model-parallel-size 2"),
    "dp": (2, "--overlap-grad-reduce --ddp-bucket-size 500"),
    "zero1": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "cp": (2, "--context-parallel-size 2"),
}
TIED = "--hidden-dropout 0.1 --attention-dropout 0"
UNTIED = (
    "--swiglu --ffn-hidden-size 24 --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights"
)
MASKS = ("", "--eod-mask-loss", "--eod-mask-loss --calculate-per-token-loss")
POLICIES = ("*:none", "*:full/2", "*:layernorm+mlp", "*:ops(matmul)")


def config_of(flags):
    """Returns the config of a model of two small layers whose loss is in chunks."""
    return parse_args(
        (
            f"--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length {SEQ_LENGTH} "
            f"--max-position-embeddings {SEQ_LENGTH} --micro-batch-size {BATCH} "
            f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 "
            f"--distributed-backend gloo {flags}"
        ).split()
    ).config


@contextmanager
def two_passes():
    with patch.object(RunConfig, "loss_in_one_pass", new=PropertyMock(return_value=False)):
        yield


class Run:
    """A rank's model, optimizer and runner."""

    def __init__(self, config, parallel):
        self.config, self.parallel = config, parallel
        self.runner, self.optimizer, _ = build_runner(config, parallel)
        self.model = self.runner.model

    def batches(self, step):
        """Returns the micro-batches of one step on this rank."""
        parallel, rules, found = self.parallel, document_rules(self.config), []
        for number in range(MICRO_BATCHES):
            seed = torch.Generator().manual_seed(100 * step + 10 * number + parallel.dp_rank)
            samples = torch.randint(0, VOCABULARY, (BATCH, SEQ_LENGTH + 1), generator=seed)
            if rules is not None:
                samples[0, 2 + number] = rules.eod
            found.append(
                cut(samples, cp_rank=parallel.cp_rank, cp_size=parallel.cp_size, rules=rules)
            )
        return found

    def step(self, number):
        """Runs a training step."""
        masked = None
        if self.config.data.eod_mask_loss:
            counts = [3 + number, 11][:MICRO_BATCHES]
            masked = masked_mean(
                counts, self.parallel, per_token=self.config.training.calculate_per_token_loss
            )
        return train_step(
            self.runner, self.optimizer, self.batches(number), learning_rate=1e-2, masked=masked
        )

    def state(self):
        """Returns copies of the last step's gradients and of the weights."""
        self.optimizer.finish()
        found = {f"weight {name}": one for name, one in self.model.named_parameters()}
        buffer = self.optimizer.layout.gradients
        found |= {f"bucket {n}": one.flat[one.own] for n, one in enumerate(buffer.buckets)}
        return {name: one.detach().clone() for name, one in found.items()}


def trained(config, steps=2):
    with parallel_state(config.parallel, seed=1) as parallel:
        run = Run(config, parallel)
        return [run.step(number) for number in range(steps)], run.state()


def differing(rank, world_size, config):
    """Returns the names of what is not equal, to the bit, in one pass and in two."""
    assert config.loss_in_one_pass
    with two_passes():
        losses, expected = trained(config)
    own_losses, found = trained(config)
    names = [name for name, one in found.items() if not torch.equal(one, expected[name])]
    pairs_of = zip(own_losses, losses, strict=True)
    names += [
        f"step {number}"
        for number, (one, other) in enumerate(pairs_of)
        if not (
            torch.equal(one.loss, other.loss)
            and torch.equal(one.update.grad_norm, other.update.grad_norm)
        )
    ]
    return names


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize(
    "layout, model, policy, mask, chunk_size",
    covered(itertools.product(LAYOUTS, (TIED, UNTIED), POLICIES, MASKS, (5, 100))),
)
def test_one_pass_has_the_bits_of_two(layout, model, policy, mask, chunk_size):
    ranks, flags = LAYOUTS[layout]
    config = config_of(
        f"{flags} {model} --recompute-policy {policy} {mask} --loss-chunk-size {chunk_size}"
    )
    assert not any(run_ranks(differing, ranks, config))


def single(flags=""):
    return config_of(f"{UNTIED} --loss-chunk-size 5 {flags}")


@pytest.mark.parametrize("flags", TWO_PASSES)
def test_some_settings_take_two_passes(flags):
    assert single().loss_in_one_pass and not single(flags).loss_in_one_pass
    assert not config_of(UNTIED).loss_in_one_pass


def kept(rank, world_size, config):
    with parallel_state(config.parallel, seed=1) as parallel:
        run, meter = Run(config, parallel), ActivationMeter(config, parallel)
        meter._thorough = True
        run.optimizer.zero_grad()
        run.runner.train(run.batches(0), loss_factor=0.5, look=meter.forward)
        return meter.result()


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize(
    "layout, model, mask, chunk_size",
    covered(itertools.product(("one", "sp", "tp", "pp"), (TIED, UNTIED), MASKS[:2], (5, 100))),
)
def test_the_kept_bytes_are_those_predicted(layout, model, mask, chunk_size):
    ranks, flags = LAYOUTS[layout]
    config = config_of(f"{flags} {model} {mask} --loss-chunk-size {chunk_size}")
    for found, fault in run_ranks(kept, ranks, config):
        assert not fault and found["activation_bytes_measured"] > 0


def evaluated(run):
    before = run.state()
    loss = run.runner.evaluate(run.batches(7))
    assert same(run.state(), before)
    with two_passes():
        assert torch.equal(loss, run.runner.evaluate(run.batches(7)))


def spoiled(*arguments):
    return RowStatistics(*(torch.full_like(one, math.nan) for one in row_statistics(*arguments)))


def skipped(run):
    """A step of NaN losses, whose gradients are in the sums."""
    with patch.object(linear_cross_entropy, "row_statistics", spoiled):
        step = run.step(5)
    grad = run.optimizer.layout.gradients.grads["output_layer.weight"]
    assert step.update.skipped == 1.0 and grad.isnan().any()


@pytest.mark.parametrize("between", [evaluated, skipped])
def test_an_evaluation_or_a_skipped_step_between_two_others_leaves_no_trace(between):
    config = single()
    with parallel_state(config.parallel, seed=1) as parallel:
        run = Run(config, parallel)
        run.step(0)
        between(run)
        run.step(1)
        found = run.state()
    assert same(found, trained(config)[1])
