"""Sequences that pack documents: their losses and gradients are those of a model that sees each
document alone. tests/data/test_megatron_core_parity.py compares masks and positions."""

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from arguments import parse_args
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.checks import InputError
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import step_flops
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.training.batches import MicroBatches, cut, document_rules, masked_mean
from megatron_lite.training.evaluate import mean_loss
from tests.support.changes import with_fields
from tests.support.documents import ALL, EOD, documents_of, packed_batch, packed_text
from tests.support.equality import difference, variant_config
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    Outcome,
    build_tiny_model,
    specs_of,
    tp_state,
    whole_tensors,
)
from tests.support.models import Layout as Shared
from tests.support.pipelines import Layout, runner_of
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run

FLAGS = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 3 --vocab-size 15 "
    "--make-vocab-size-divisible-by 8 --global-batch-size 6 --train-iters 2 --lr 1e-3 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 "
    "--log-interval 1 --eval-interval 2 --eval-iters 1 --distributed-backend gloo"
)


def config_of(flags):
    return parse_args(f"{RUN} {flags}".split()).config


def metrics_of(flags, folder):
    """Runs the flags on this rank. Returns the losses and gradient norms of the metrics file."""
    path = folder / "metrics.jsonl"
    run_to_end(config_of(f"{flags} --metrics-jsonl {path}"))
    return [
        {key: row[key] for key in row if "loss" in key or key == "grad_norm"} for row in rows(path)
    ]


# --- the documents one by one ----------------------------------------------------------------


def one_by_one(name, seeds, **overrides):
    """Returns the sum of the losses that count, and its gradients, document by document."""
    with tp_state(1) as parallel:
        model = build_tiny_model(variant_config(name, **overrides), parallel)
        total = torch.zeros((), dtype=torch.float64)
        for seed in seeds:
            for document in documents_of(packed_text(seed)):
                tokens, labels = document[:, :-1], document[:, 1:]
                loss = (model(tokens, labels) * (tokens != EOD)).sum()
                loss.backward()
                total += loss.detach()
        grads = {
            name: torch.zeros_like(one) if one.grad is None else one.grad
            for name, one in model.named_parameters()
        }
        return Outcome(total, whole_tensors(grads, specs_of(model), parallel))


def packed(name, parallel, layout, **overrides):
    """Returns the same of a packed micro-batch."""
    model = layout.model(variant_config(name, **overrides), parallel)
    buffer = GradBuffer(dict(model.named_parameters()), parallel)
    batch = packed_batch(parallel=parallel)
    loss = (model(batch.tokens, batch.labels, batch.documents) * batch.loss_mask).sum()
    loss.backward()
    buffer.reduce_()
    total = loss.detach()
    if parallel.cp_group is not None:
        torch.distributed.all_reduce(total, group=parallel.cp_group)
    return Outcome(total, whole_tensors(buffer.grads, specs_of(model), parallel))


# Rotary angles are float32 numbers: those of a document at another place differ by rounding.
TOLERANCE = {"gpt2": 1e-12, "nemotron": 1e-12, "llama": 1e-5, "qwen": 1e-5}
WINDOW = dict(window_size=(2, 0), window_attn_skip_freq=(1, 0))
CASES = [
    ("gpt2", {}),
    ("gpt2", dict(attention_backend="unfused", **WINDOW)),
    ("llama", WINDOW),
    ("qwen", {}),
]


def assert_equal(name, expected, actual):
    assert difference(expected.loss, actual.loss) < TOLERANCE[name]
    wrong = {
        key: difference(grad, actual.grads[key])
        for key, grad in expected.grads.items()
        # A key's bias has no gradient but rounding noise.
        if float(grad.abs().max()) > 1e-9
        and not difference(grad, actual.grads[key]) < TOLERANCE[name]
    }
    assert wrong == {}


LAYOUTS = [
    *(Shared(), Shared(2), Shared(2, True)),
    *(Shared(cp=2), Shared(2, True, 2), Shared(cp=2, cp_comm_type="a2a")),
]


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_have_the_loss_and_gradients_of_documents_one_by_one(layout):
    cases = [
        (name, overrides)
        for name, overrides in CASES
        if layout.cp == 1
        or layout.cp_comm_type == "a2a"
        or variant_config(name, **overrides).attention_backend == "unfused"
    ]

    def work(rank, world_size):
        with layout.state() as parallel:
            return [packed(name, parallel, layout, **overrides) for name, overrides in cases]

    expected = [one_by_one(name, range(3, 4), **overrides) for name, overrides in cases]
    for of_rank in run_ranks(work, layout.ranks):
        for (name, _), want, have in zip(cases, expected, of_rank, strict=True):
            assert_equal(name, want, have)


def in_pipeline(rank, world_size):
    """Returns the loss and the gradients of this rank's stage over three micro-batches."""
    config = variant_config("gpt2", num_layers=3, untie_embeddings_and_output_weights=True)
    batches = [packed_batch(seed=number) for number in range(3)]
    with runner_of(Layout(pp=world_size), config, everywhere=True) as runner:
        loss = runner.train(batches, loss_factor=1.0, mask_factors=torch.ones(3))
        grads = {name: one.grad for name, one in runner.model.named_parameters()}
        return Outcome(loss, {name: grad for name, grad in grads.items() if grad is not None})


def test_every_stage_of_a_pipeline_keeps_documents_apart():
    expected = one_by_one("gpt2", range(3), num_layers=3, untie_embeddings_and_output_weights=True)
    ranks = run_ranks(in_pipeline, 3)
    grads = {
        name.partition("chunks.0.")[2] or name: grad
        for one in ranks
        for name, grad in one.grads.items()
    }
    grads = {name: grads[name][: len(want)] for name, want in expected.grads.items()}  # no padding
    assert_equal("gpt2", expected, Outcome(sum(one.loss for one in ranks), grads))


# --- the loss of a step ----------------------------------------------------------------------


def test_a_step_has_the_gradients_of_megatrons_formula():
    """One of the micro-batches has no token that counts."""
    batches = [packed_batch(seed=1), packed_batch(seed=2)]
    batches[0].loss_mask[:, 3:] = 0.0  # micro-batches of different weight
    batches = [*batches, with_fields(batches[1], loss_mask=torch.zeros(BATCH, SEQ_LENGTH))]
    counts = [int(batch.loss_mask.sum()) for batch in batches]
    assert counts[2] == 0 < counts[0] < counts[1]
    config = variant_config("gpt2")
    for per_token in (False, True):
        with runner_of(Layout(), config) as runner:
            mean = masked_mean(counts, runner.parallel, per_token=per_token)
            loss = runner.train(batches, loss_factor=1.0, mask_factors=mean.factors)
            grads = [one.grad for one in runner.model.parameters()]
        with runner_of(Layout(), config) as runner:
            (chunk,) = runner.model
            sums = [
                (chunk(one.tokens, one.labels, one.documents) * one.loss_mask).sum()
                for one in batches
            ]
            # pretrain_gpt.py and megatron.core.pipeline_parallel.schedules
            whole = (
                sum(sums) / sum(counts)
                if per_token
                else sum(one / max(1, count) / 3 for one, count in zip(sums, counts, strict=True))
            )
            whole.backward()
            expected = [one.grad for one in runner.model.parameters()]
        assert loss / mean.num_tokens == pytest.approx(
            float(sum(sums).detach()) / sum(counts), rel=1e-12
        )
        for want, have in zip(expected, grads, strict=True):
            assert difference(want, have) < 1e-12


def test_the_means_of_data_parallel_ranks_count_all_of_their_tokens():
    def work(rank, world_size):
        with runner_of(Layout(dp=2), variant_config("gpt2")) as runner:
            counts = [[4, 6], [5, 0]][rank]
            return [masked_mean(counts, runner.parallel, per_token=one) for one in (False, True)]

    first, second = run_ranks(work, 2)
    assert [one.num_tokens.item() for one in (*first, *second)] == [15.0] * 4
    # 1 / (tokens x 2 micro-batches x 2 ranks), and 1 / all tokens
    assert first[0].factors.tolist() == [1 / 16, 1 / 24]
    assert second[0].factors.tolist() == [1 / 20, 1 / 4]
    assert torch.equal(second[1].factors, torch.full((2,), 1 / 15, dtype=torch.float64))


class Texts:
    """A dataset of packed samples."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == 999:
            raise InputError("a damaged file")
        return packed_text(index, batch=1)[0].numpy()


def texts(parallel, consumed=0, where=""):
    """Returns two micro-batches of the texts, from a sample on."""
    return MicroBatches(
        dataset=Texts(),
        micro_batch_size=BATCH,
        parallel=parallel,
        consumed_samples=consumed,
        num_microbatches=2,
        where=where,
        rules=ALL,
    )


def test_an_evaluation_is_the_mean_over_the_tokens_that_count():
    with runner_of(Layout(), variant_config("gpt2")) as runner:
        run = SimpleNamespace(
            config=tiny_run(eval_iters=2, micro_batch_size=BATCH, global_batch_size=BATCH),
            runner=runner,
            batches=BatchSchedule(steps=((0, 2 * BATCH),), samples_per_microbatch=BATCH),
            samples=texts(runner.parallel),
        )
        found = mean_loss(run, Texts())
        (chunk,) = runner.model
        total, count = 0.0, 0
        for index in range(4 * BATCH):
            batch = cut(torch.from_numpy(Texts()[index])[None], rules=ALL)
            losses = chunk(batch.tokens, batch.labels, batch.documents)
            total += float((losses * batch.loss_mask).sum().detach())
            count += int(batch.loss_mask.sum())
    assert found == pytest.approx(total / count, rel=1e-12)


def test_the_counts_are_those_of_the_masks_and_say_where_a_sample_cannot_be_read():
    with tp_state(1) as parallel:
        found = texts(parallel, 6)
        assert found.counts() == [int(found[number].loss_mask.sum()) for number in (0, 1)]
        with pytest.raises(InputError, match="iteration 7, samples 997 to 999: a damaged file"):
            texts(parallel, 994, "iteration 7").counts()


def test_flops_count_what_documents_attend():
    with tp_state(1) as parallel:
        found = float(texts(parallel, 6).attended())
    tokens = torch.stack([packed_text(index, batch=1)[0, :-1] for index in range(6, 6 + 2 * BATCH)])
    number = (tokens == EOD).cumsum(1) - (tokens == EOD).int()  # of each token's document
    assert found == (number[:, :, None] == number[:, None]).double().mean()
    model = variant_config("gpt2")
    sizes = Sizes(model=model, micro_batch_size=2, seq_length=SEQ_LENGTH)
    of_attention = step_flops(sizes) - step_flops(replace(sizes, attends=False))
    width = model.num_attention_heads * model.head_dim
    assert of_attention == 3 * model.num_layers * 4 * 2 * SEQ_LENGTH**2 * width


# --- runs ------------------------------------------------------------------------------------

VARIANTS = [
    "",
    "--attention-dropout 0.1 --hidden-dropout 0.1",
    "--attention-backend unfused",
    "--window-size 4,0 --window-attn-skip-freq 2 --micro-batch-size 1",
    "--position-embedding-type rope --attention-backend unfused --window-size 4,0",
    "--bf16 --loss-chunk-size 7",
]
POLICIES = [
    "*:full/1",
    "*:full/3",
    "*:core_attn",
    "*:core_attn+layernorm+mlp",
    "*:ops(matmul)",
    "*:ops(attention)",
    "*:none@host",
    "*:full/1@host",
]
RUNS = list(product(VARIANTS, POLICIES))


@pytest.fixture(scope="module")
def without_policy(tmp_path_factory):
    """Runs the flags at their first use, and returns what they log."""
    return cache(lambda flags: metrics_of(flags, tmp_path_factory.mktemp("without")))


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize("variant, policy", RUNS)
def test_a_policy_changes_no_bit_and_every_byte_is_predicted(
    variant, policy, without_policy, tmp_path
):
    """With --recompute-verify a run ends if a kept byte was not predicted, or lives on unseen."""
    flags = f"{FLAGS} {variant} --recompute-verify --recompute-policy"
    expected = without_policy(f"{flags} *:none")
    assert metrics_of(f"{flags} {policy}", tmp_path) == expected
    assert len(expected) > 1


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).save(str(path))
    config = config_of(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {path} {FLAGS}")
    with pytest.raises(InputError, match="--eod-mask-loss and --reset-position-ids and --reset"):
        document_rules(config)
