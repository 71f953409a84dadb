"""A budget holds on a GPU: what its allocator says, the prediction, the bits and `@host`."""

import torch
from torch import nn

from megatron_lite.api import apply_policy_, fit_memory_, remove_policy_
from megatron_lite.fit.layers import layer_lists
from megatron_lite.fit.measurement import CANDIDATES, FULL, ON_HOST, Measurement
from tests.gpu.test_gpu_offload import deterministic


class Layer(nn.Module):
    """Attention and an MLP, each with a norm and a residual."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.inner, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden):
        """Returns [b, s, width]."""
        batch, length, width = hidden.shape
        heads = self.qkv(self.norm(hidden)).view(batch, length, 3, width // 64, 64)
        attended = nn.functional.scaled_dot_product_attention(
            *heads.permute(2, 0, 3, 1, 4), is_causal=True
        )
        hidden = hidden + attended.transpose(1, 2).reshape(batch, length, width)
        return hidden + self.down(nn.functional.gelu(self.up(self.inner(hidden))))


class Model(nn.Module):
    """Eight layers and a head."""

    def __init__(self, width=512):
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.layers = nn.ModuleList(Layer(width) for _ in range(8))

    def forward(self, tokens):
        """Returns the loss of predicting the tokens themselves."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def model_and_step(cuda):
    torch.manual_seed(1)
    model = Model().to(cuda, torch.bfloat16)
    tokens = torch.randint(1000, (8, 512), device=cuda)
    return model, lambda: model(tokens).backward()


def trained(model, step):
    """Returns the peak of a step, and its gradients on the CPU."""
    torch.cuda.reset_peak_memory_stats()
    step()
    found = torch.cuda.max_memory_allocated(), [each.grad.cpu() for each in model.parameters()]
    model.zero_grad()
    return found


def test_the_peak_of_the_allocator_is_within_the_budget(cuda):
    with deterministic():
        model, step = model_and_step(cuda)
        _, plain = trained(model, step)
        whole = fit_memory_(model, None, step=step)
        whole.remove()
        apply_policy_(model, layers_fqn="layers", policy="*:full")
        trained(model, step)
        smallest, _ = trained(model, step)
        remove_policy_(model)
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            budget = int(smallest + share * (whole.measured - smallest))
            fit = fit_memory_(model, f"{budget}B", step=step)
            assert abs(fit.plan.peak / fit.measured - 1) < 0.01
            peak, found = trained(model, step)
            assert max(peak, fit.measured) <= budget
            assert all(map(torch.equal, found, plain))
            fit.remove()


def test_host_memory_is_a_candidate_that_saves_memory_of_the_gpu(cuda):
    model, step = model_and_step(cuda)
    measured = Measurement(model, layer_lists(model, None), step, None)
    options = {option.action: option for option in measured.problem.options[1]}
    assert {*CANDIDATES, *ON_HOST, FULL} == {*options}
    assert options["none@host"].held < options["none"].held
    # It keeps nothing here, but a copy of another layer may be on its way back.
    assert options["full@host"].held < 8 * 512 * 512 * 2
