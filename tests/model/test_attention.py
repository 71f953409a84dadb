"""Core attention against a loop over heads, rows and keys; and what causality means for the whole
model."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.backend_registration as backends
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.context_parallel.attention_kernels import CuSeqlens
from megatron_lite.description.self_attention import CORE
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from megatron_lite.model.attention import CoreAttention
from tests.support.dispatch import Dispatches, tensors_in
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state
from tests.support.ranks import run_ranks

S, G = 7, 3  # 6 heads in 3 groups


def test_a_second_sequence_length_gets_its_own_rotary_tables():
    tokens, _ = sample_tokens()
    with tp_state(1) as parallel, torch.no_grad():
        model = build_tiny_model(variant_config("llama"), parallel)
        whole, short, again = map(model, (tokens, tokens[:, :5], tokens))
    torch.testing.assert_close(short, whole[:, :5], rtol=1e-12, atol=1e-12)
    assert torch.equal(whole, again)


class Largest(Dispatches):
    """Notes the most elements of a tensor that an operator returns."""

    elements = 0

    def saw(self, func, args, kwargs, results):
        sizes = (one.numel() for one in tensors_in(results))
        self.elements = max(self.elements, *sizes, 0)


BOUNDS = (0, 1, 200, 256, 512)
ON_CUDA = {
    ("auto", torch.bfloat16): "_scaled_dot_product_flash_attention",  # which stands for both
    ("fused", torch.bfloat16): "_scaled_dot_product_cudnn_attention",
    ("flash", torch.bfloat16): "_flash_attention_forward",
    ("auto", torch.float32): "_scaled_dot_product_efficient_attention",
    ("flash", torch.float32): "_scaled_dot_product_efficient_attention",
}


def noted(kept, tensor):
    kept.append(tensor)
    return tensor


def wrong_on_cuda(rank, world_size):
    """Returns what is kept and described where both differ, and where a mask of s x s is made, on
    tensors without values. Where torch chooses, it is made to choose cuDNN's kernel."""
    if not hasattr(torch, "standin"):
        backends._setup_privateuseone_for_python_backend("standin")
    s, b, a, d = 256, 2, 4, 8

    def cudnn(query, key, value, **settings):
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        if query.dtype == torch.float32:  # which has no kernel but this, and no groups
            assert query.shape == key.shape
            op = torch.ops.aten._scaled_dot_product_efficient_attention
        return op(query, key, value, None, True, 0.0, True)[0]

    F.scaled_dot_product_attention = cudnn
    found = {}
    for ((backend, dtype), operator), groups, window, packed in product(
        ON_CUDA.items(), (1, 4), (None, (40, 0)), (False, True)
    ):
        config = tiny_config(
            attention_backend=backend,
            num_attention_heads=a,
            kv_channels=d,
            group_query_attention=True,
            num_query_groups=groups,
            window_size=window,
        )
        sizes = Sizes(
            model=config,
            micro_batch_size=b,
            seq_length=s,
            padded_vocab_size=8,
            element_bytes=dtype.itemsize,
            device="cuda",
            resets_attention=packed,
        )
        (told,) = (one for one in describe_layer(sizes).operations if one.name == CORE)
        kept = []
        alone = torch.autograd.set_multithreading_enabled(False)
        with FakeTensorMode(), alone, Largest() as largest:
            inputs = [
                torch.empty(s, b, heads, d, device="standin", dtype=dtype, requires_grad=True)
                for heads in (a, groups, groups)
            ]
            with saved_tensors_hooks(partial(noted, kept), lambda one: one):
                attention = CoreAttention(config, SimpleNamespace(device=inputs[0].device), layer=0)
                ends = torch.empty(len(BOUNDS), dtype=torch.int32, device="standin")
                output = attention(*inputs, CuSeqlens(BOUNDS, ends) if packed else None)
            owners = {one.untyped_storage()._cdata: one.untyped_storage() for one in kept}
            torch.autograd.grad(output, inputs, torch.empty_like(output))
        real = sum(owner.nbytes() for owner in owners.values())
        differ = real - sum(one.num_bytes for one in told.keeps)
        if differ or (dtype == torch.bfloat16 and largest.elements >= s * s):
            found[backend, dtype, groups, window, packed] = differ, largest.elements
        if packed and dtype == torch.bfloat16:
            operator = "_flash_attention_forward"
        if window is None and [one.operator for one in told.calls] != [f"aten.{operator}.default"]:
            found[backend, dtype] = told.calls
    return found


@pytest.mark.skipif(not hasattr(backends, "_DummyBackendModule"), reason="no device of Python")
def test_what_attention_keeps_on_cuda_is_described():
    assert run_ranks(wrong_on_cuda, 1) == [{}]
