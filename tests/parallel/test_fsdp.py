"""FSDP2's units: what is gathered and reduced and when, of our model and of others; and what
torch's own norm makes of it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.allocator_peak import allocator_peak
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.parallel.fsdp import Wrapping, fully_shard_
from megatron_lite.parallel.fsdp_buffers import UnitGradients
from megatron_lite.parallel.waiting import gloo_has_freed
from megatron_lite.parallel.weights import weights_in_use
from megatron_lite.recompute.apply import apply_policy_
from megatron_lite.recompute.schedule import plan_stage
from tests.support.collectives import recorded_collectives
from tests.support.equality import difference
from tests.support.hf import PEERS
from tests.support.layouts import LAYOUTS, backward, build
from tests.support.models import sample_tokens, tp_state
from tests.support.pairs import only, pairs
from tests.support.ranks import run_ranks
from tests.support.torch_features import NEEDS_CUSTOM_COLLECTIVES

NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce"}
HF_WRAPPINGS = {
    "gpt2": Wrapping(layers="transformer.h", embedding="transformer.wte", output="lm_head"),  # tied
    "llama": Wrapping(layers="model.layers", embedding="model.embed_tokens", output="lm_head"),
}


def exchanged(name: str, layout: str, **model: Any) -> list[str]:
    """What one micro-batch sends between two ranks: "gather" or "reduce", and of which unit, told
    by its size."""

    def work(rank: int, world_size: int) -> list[str]:
        with tp_state(1) as parallel:
            built, optimizer = build(name, parallel, LAYOUTS[layout], dtype=torch.float32, **model)
            layer = sum(parameter.numel() for parameter in built.decoder.layers[0].parameters())
            vocabulary = built.embedding.word_embeddings.weight.numel()
            units = {layer: "layer", vocabulary: "vocabulary"}
            backward(built, optimizer, parallel, 0, micro_batches=1)
            optimizer.step(0.0)
            with recorded_collectives() as sent:
                backward(built, optimizer, parallel, 0, micro_batches=1)
            return [
                f"{NAMES[one.name]} {units.get(one.shape[0], 'rest')}"
                for one in sent
                if one.name in NAMES
            ]

    first, second = run_ranks(work, 2)
    assert first == second
    return first


@pytest.mark.parametrize(
    "policy",
    [
        None,
        *(pytest.param(policy, marks=pytest.mark.long) for policy in ("*:full", "*:full/2")),
        "*:core_attn+layernorm+mlp",
    ],
)
def test_a_layer_is_gathered_for_forward_and_for_backward_and_not_again_for_its_replay(
    policy: str | None,
) -> None:
    plan = None if policy is None else plan_stage(RecomputeConfig(recompute_policy=policy), 2)
    forward, middle = (
        ["gather rest", "gather layer", "gather layer"],
        ["gather layer", "gather layer"],
    )
    assert exchanged("gpt2", "fsdp2", plan=plan) == [
        *forward,
        *middle,
        "reduce layer",
        "reduce layer",
        "reduce rest",
    ]
    assert exchanged("gpt2", "fsdp2, no reshard", plan=plan) == [
        *forward,
        "reduce layer",
        "reduce layer",
        "reduce rest",
    ]


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_embedding_and_output_are_gathered_when_they_are_used(chunk_size: int | None) -> None:
    """The output's gradient is reduced before the layers' backward. A tied weight's is complete
    only after it."""
    forward = [
        "gather rest",
        "gather vocabulary",
        "gather layer",
        "gather layer",
        "gather vocabulary",
    ]
    untied = exchanged("llama", "fsdp2, memory-efficient", loss_chunk_size=chunk_size)
    assert untied[:5] == forward and untied.index("reduce vocabulary") < untied.index(
        "reduce layer"
    )
    assert sorted(untied[5:]) == sorted(
        [
            "gather layer",
            "gather layer",
            "reduce vocabulary",
            "reduce layer",
            "reduce layer",
            "reduce rest",
            "reduce vocabulary",
        ]
    )
    tied = exchanged("gpt2", "fsdp2, memory-efficient", loss_chunk_size=chunk_size)
    assert tied == [
        *forward,
        "gather layer",
        "gather layer",
        "reduce layer",
        "reduce layer",
        "reduce rest",
        "reduce vocabulary",
    ]


def peak_bytes(name: str, layout: str) -> int:
    """Of one step of a model that is mostly vocabulary, sharded over two ranks, without what was
    there before."""

    def work(rank: int, world_size: int) -> int:
        with tp_state(1) as parallel:
            model, optimizer = build(
                name, parallel, LAYOUTS[layout], dtype=torch.float32, vocab_size=4000
            )
            # the gathered weights, too, come to life inside, in the first of the two
            with LiveStorages() as live:
                for _ in range(2):
                    backward(model, optimizer, parallel, 0, micro_batches=1, sequences=2)
            return live.peak_bytes

    return run_ranks(work, 2)[0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_units_of_their_own_spare_a_whole_copy_of_the_vocabulary(name: str) -> None:
    """The weights are gone when the embedding's gradient comes; untied, of the output's gradient
    all but the rows."""
    assert peak_bytes(name, "fsdp2") - peak_bytes(name, "fsdp2, memory-efficient") >= 4 * 4000 * 32


def allocated_peak(name: str, layout: str) -> int:
    """Of the second step in bf16, as torch's allocator counts: with gloo's copies."""

    def work(rank: int, world_size: int) -> int:
        with tp_state(1) as parallel:
            model, optimizer = build(
                name, parallel, LAYOUTS[layout], dtype=torch.bfloat16, vocab_size=VOCABULARY
            )
            backward(model, optimizer, parallel, 0, micro_batches=1, sequences=2)
            optimizer.step(0.001)
            with gloo_has_freed(), allocator_peak() as found:
                backward(model, optimizer, parallel, 0, micro_batches=1, sequences=2)
            return found.peak_bytes

    return max(run_ranks(work, 2, detail=False))


VOCABULARY = 65536
WORDS = VOCABULARY * 32 * 2  # bytes of the vocabulary in bf16


@NEEDS_CUSTOM_COLLECTIVES
@pytest.mark.parametrize("layout", only(["fsdp2", "fsdp2, memory-efficient"], 0))
def test_a_tied_vocabulary_is_never_allocated_more_than_five_times(layout: str) -> None:
    """In bf16: the gathered weight, its two gradients and their sum; or the float32 buffer, gloo's
    copy of it, and this rank's half of the sum.

    Units of their own used to take more than the root, since torch holds on to the last gradient of
    a unit while it reduces it.
    """
    assert allocated_peak("gpt2", layout) <= 5.5 * WORDS


def test_the_gradients_of_a_step_are_gone_when_the_next_one_begins() -> None:
    def work(rank: int, world_size: int) -> bool:
        with tp_state(1) as parallel:
            model, optimizer = build("gpt2", parallel, LAYOUTS["fsdp2"], dtype=torch.bfloat16)
            backward(model, optimizer, parallel, 0)
            optimizer.step(0.001)
            gradients = [
                weakref.ref(piece.grad.untyped_storage()) for piece in optimizer.layout.pieces
            ]
            optimizer.zero_grad()
            return all(gradient() is None for gradient in gradients)

    assert run_ranks(work, 2) == [True, True]


def test_a_gradient_that_someone_else_can_read_is_not_freed() -> None:
    for hold in (
        lambda grad: grad,
        lambda grad: grad.detach(),
        lambda grad: grad.view(-1),
        lambda grad: grad[:1],
    ):
        parameter, gradients = nn.Parameter(torch.ones(4, 2)), UnitGradients()
        for _ in range(2):
            gradients.record([parameter])
        (parameter * torch.arange(8.0).view(4, 2)).sum().backward()
        torchs, parameter.grad = parameter.grad, None
        held = hold(torchs)
        expected = held.clone()
        gradients.free_()
        # a name of its own: pytest would read the freed memory to print it
        freed = held.untyped_storage().nbytes() == 0
        assert not freed
        assert torch.equal(held, expected)


def test_a_gradient_that_only_torchs_loop_names_is_freed_once_it_is_copied() -> None:
    parameter, gradients = nn.Parameter(torch.ones(4, 2)), UnitGradients()
    gradients.record([parameter])
    (parameter * 2.0).sum().backward()
    torchs, parameter.grad = parameter.grad, None
    gradients.free_()
    assert torchs.untyped_storage().nbytes() == 0


def test_torchs_norm_of_sharded_gradients_is_that_of_a_part_and_ours_is_the_whole() -> None:
    """Plain shards say nothing of the TP ranks, so torch sums over the data-parallel ranks
    alone."""

    def work(rank: int, world_size: int) -> tuple[float, float]:
        with tp_state(2 if world_size == 4 else 1) as parallel:
            layout = LAYOUTS["fsdp2" if world_size == 4 else "replicated"]
            model, optimizer = build("llama", parallel, layout, dtype=torch.float64)
            backward(model, optimizer, parallel, 0)
            torchs = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            torchs = torchs.full_tensor() if hasattr(torchs, "full_tensor") else torchs
            return torchs.item(), optimizer.step(0.0).grad_norm.item()

    true, _ = work(0, 1)
    for torchs, ours in run_ranks(work, 4, detail=False):
        assert ours == pytest.approx(true, rel=1e-12)
        assert abs(torchs / true - 1.0) > 0.05


def test_gathered_weights_are_known_to_whoever_counts_what_is_kept() -> None:
    """Else the weights, which the graph saves, would count as activations. Their storages are the
    same in every step."""

    def work(rank: int, world_size: int) -> Any:
        with tp_state(1) as parallel:
            kept = []
            for layout in ("replicated", "fsdp2, memory-efficient", "fsdp2, no reshard"):
                model, _ = build(
                    "llama", parallel, LAYOUTS[layout], dtype=torch.bfloat16, loss_chunk_size=7
                )
                for _ in range(2):
                    with kept_for_backward(exclude=weights_in_use(model)) as meter:
                        loss = model.loss(*sample_tokens()).mean()
                    kept.append(meter.total_bytes())
                    loss.backward()
            return kept

    for kept in run_ranks(work, 2):
        assert len(set(kept)) == 1 and kept[0] > 0


def hf_loss(model: nn.Module, rank: int, seq_length: int = 16) -> Tensor:
    tokens, _ = sample_tokens(rank, seq_length=seq_length)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.parametrize(
    ("name", "memory_efficient", "policy"), pairs(HF_WRAPPINGS, [False, True], [None, "*:full"])
)
def test_a_model_of_transformers_keeps_its_losses_and_gradients(
    name: str, memory_efficient: bool, policy: str | None
) -> None:
    """Two steps of plain SGD, so that gathered weights must be the new ones."""
    wrapping = (
        HF_WRAPPINGS[name] if memory_efficient else Wrapping(layers=HF_WRAPPINGS[name].layers)
    )
    start = PEERS[name].build().double()

    def work(rank: int, world_size: int) -> Any:
        model = copy.deepcopy(start)
        if policy is not None:
            apply_policy_(model, layers_fqn=wrapping.layers, policy=policy)
        fully_shard_(
            model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)), wrapping
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            loss = hf_loss(model, rank + 2 * step)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        with torch.no_grad():
            losses.append(hf_loss(model, rank).item())
        return losses, {
            key: parameter.grad.full_tensor() for key, parameter in model.named_parameters()
        }

    results = run_ranks(work, 2)
    optimizer = torch.optim.SGD(start.parameters(), lr=0.01)
    losses: list[list[float]] = [[], []]
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            loss = hf_loss(start, rank + 2 * step)
            loss.backward()
            losses[rank].append(loss.item())
        optimizer.step()
    for rank, (of_rank, grads) in enumerate(results):
        assert of_rank[:2] == pytest.approx(losses[rank], rel=1e-12)
        assert of_rank[2] == pytest.approx(hf_loss(start, rank).item(), rel=1e-12)
        assert grads.keys() == dict(start.named_parameters()).keys()
        assert (
            max(
                difference(parameter.grad, grads[key])
                for key, parameter in start.named_parameters()
            )
            < 1e-10
        )


@pytest.mark.parametrize("name", HF_WRAPPINGS)
def test_units_of_a_model_of_transformers_spare_a_whole_copy_of_its_vocabulary(name: str) -> None:
    pytest.importorskip("transformers")

    def work(rank: int, world_size: int) -> list[int]:
        peaks = []
        for wrapping in (Wrapping(layers=HF_WRAPPINGS[name].layers), HF_WRAPPINGS[name]):
            model = PEERS[name].build()
            model.resize_token_embeddings(4000)
            fully_shard_(
                model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)), wrapping
            )
            with LiveStorages() as live:
                for _ in range(2):
                    # the logits must not hide the weights
                    hf_loss(model, rank, seq_length=2).backward()
            peaks.append(live.peak_bytes)
        return peaks

    for default, efficient in run_ranks(work, 2):
        assert default - efficient >= 4 * 4000 * 32


@pytest.mark.parametrize(
    ("wrapping", "message"),
    [
        (
            Wrapping(layers="decoder.blocks"),
            "'decoder.blocks' is no list of modules in the model; its lists are decoder.layers",
        ),
        (Wrapping(layers="decoder"), "'decoder' is no list of modules"),
        (
            Wrapping(layers="decoder.layers", embedding="wte"),
            "the model has no module 'wte'; those with parameters of their own are "
            "embedding.word_embeddings, ",
        ),
    ],
)
def test_a_name_that_the_model_does_not_have_is_an_error_that_lists_those_it_has(
    wrapping: Wrapping, message: str
) -> None:
    with tp_state(1) as parallel:
        model, _ = build("gpt2", parallel, LAYOUTS["replicated"])
        with pytest.raises(ValueError, match="^" + message):
            fully_shard_(model, None, wrapping)  # type: ignore[arg-type]
