"""--decoupled-lr: the word embedding and the output layer have a learning rate of their own."""

import pytest
import torch

from megatron_lite.config.optimizer_settings import OptimizerConfig
from tests.support.layouts import LAYOUTS, backward, build
from tests.support.models import on_ranks

ENDS = {"embedding.word_embeddings.weight", "output_layer.weight"}


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "layout, optimizer, variant",
    [("replicated", "adam", "llama"), ("zero1", "muon", "gpt2"), ("fsdp2", "adam", "llama")],
)
def test_the_ends_are_updated_at_their_rate_and_all_else_at_the_other(layout, optimizer, variant):
    settings = OptimizerConfig(optimizer=optimizer, weight_decay=0.1)

    def work(parallel):
        """The weights after a step at rate 0.02, at 0.005, and at 0.02 with 0.005 at the ends."""
        found = []
        for rate, ends in ((0.02, None), (0.005, None), (0.02, 0.005)):
            model, updater = build(variant, parallel, LAYOUTS[layout], settings=settings)
            backward(model, updater, parallel, 0)
            updater.step(rate, decoupled_learning_rate=ends)
            updater.finish()
            names = [name for name, _ in model.named_parameters()]
            found.append({name: updater.weight(name).detach().clone() for name in names})
        return found

    for every, ends, both in on_ranks(work, 2, detail=False):
        assert ENDS & set(both)
        for name, weight in both.items():
            expected, other = (ends, every) if name in ENDS else (every, ends)
            assert torch.equal(weight, expected[name]), name
            assert not torch.equal(weight, other[name]), name
