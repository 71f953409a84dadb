"""megatron-core's GPT, its optimizer and its checkpoints on a CPU, which it does not support.

Import this module only in the processes of `run_ranks`, after pytest.importorskip("megatron.core").
"""

import argparse
import queue
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.metadata import TensorProperties

from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.experts import ExpertSettings
from megatron_lite.convert.megatron.args import OF_LATENTS, ONLY_HERE
from tests.support.models import VOCAB_SIZE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of each GPU library that is not there
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.optimizer import (
        OptimizerConfig,
        _get_param_groups,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

PADDED = 64
SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "normalization", "rotary_interleaved"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm"),
)
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


@contextmanager
def on_cpu(tp_size):
    """The places that ask for a CUDA device get the CPU, for the rest of the process.

    What they compile, for seconds, runs as it is.
    """
    torch.compiler.set_stance("force_eager")
    ones, tensor = torch.ones, torch.tensor
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    torch.ones = lambda *size, device=None, **options: ones(*size, **options)
    torch.tensor = lambda data, device=None, **options: tensor(data, **options)
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    filesystem_async._process_memory = lambda: 0  # psutil is not installed
    moe_utils.te_general_gemm = None  # it is not defined without Transformer Engine
    multi_latent_attention.HAVE_TE = False  # it takes it for granted
    parallel_state.initialize_model_parallel(tp_size)
    yield


class CoreAttention(DotProductAttention):
    """Their attention without a GPU, to which their latent attention also tells sizes of heads."""

    def __init__(self, *args, k_channels=0, v_channels=0, **options):
        super().__init__(*args, **options)


def their_config(config, tp_size=1, dtype=torch.float64, **more):
    """Returns megatron-core's config of ours."""
    kind = MLATransformerConfig if config.multi_latent_attention else TransformerConfig
    if config.multi_latent_attention:
        more = _same(config, OF_LATENTS) | more
        more |= dict(kv_channels=config.value_dim, multi_latent_attention=True)
    settings = dict(
        **_same(config, SAME),
        num_query_groups=config.query_groups,
        ffn_hidden_size=config.ffn_size,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=config.swiglu,
        activation_func=F.silu if config.swiglu else F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        tensor_model_parallel_size=tp_size,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **_expert_settings(config),
    )
    return kind(**{**settings, **more})


def their_model(config, tp_size=1, dtype=torch.float32, *, padded=PADDED, gathers=True, **more):
    """Returns megatron-core's model of a config, with random weights.

    gathers: whether every rank has all logits. more: settings of their config besides.
    """
    theirs = their_config(config, tp_size, dtype, **more)
    torch.manual_seed(7)
    if config.num_experts is None:
        spec = their_layer(config)
    else:
        spec = get_gpt_decoder_block_spec(
            theirs, use_transformer_engine=False, normalization=config.normalization
        )
        for number, layer in enumerate(spec.layer_specs):
            if config.multi_latent_attention:
                knows_latents_(layer)
            if config.layer_has_experts(number):  # the name of this norm in TE's spec of layers
                layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    model = GPTModel(
        theirs,
        spec,
        padded,
        config.max_position_embeddings,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        parallel_output=not gathers,
    )
    biases_work_(model)
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:  # zeros and ones would hide mistakes
            parameter.data += 0.3 * torch.sin(torch.arange(parameter.numel()) + number)
    return model.to(dtype)


def their_layer(config):
    """Returns the spec of a dense layer."""
    spec = get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if config.multi_latent_attention:
        knows_latents_(spec)
    return spec


def knows_latents_(spec):
    """Gives a layer attention without a GPU, and the names of TE's spec of layers."""
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    spec.submodules.sharded_state_dict_keys_map = {
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }


def biases_work_(model):
    """Takes out the sum over one rank after which an expert cannot add its bias in place."""
    for name, module in model.named_modules():
        if name.endswith("linear_fc2") and "local_experts" in name:
            module.explicit_expert_comm = True


def _same(config, names):
    return {name: getattr(config, name) for name in names}


def _expert_settings(config):
    if config.num_experts is None:
        return {}
    found = _same(config, {one.name for one in fields(ExpertSettings)} - ONLY_HERE.keys())
    found |= {"num_moe_experts": found.pop("num_experts"), "moe_token_dispatcher_type": "allgather"}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in found.items()
    }


def arguments(config, tp_size):
    """Returns the `args` that Megatron-LM saves with a model, as far as they matter."""
    values = {**asdict(config), "ffn_hidden_size": config.ffn_size, "kv_channels": config.head_dim}
    return argparse.Namespace(
        **{**values, "attention_backend": AttnBackend.auto, "bias_gelu_fusion": False},
        params_dtype=torch.float32,
        save=Path("/checkpoints"),
        tokenizer_type="NullTokenizer",
        vocab_size=60,
        padded_vocab_size=PADDED,
        consumed_train_samples=24,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=1,
    )


def _logits(model, tokens):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None)[..., :VOCAB_SIZE].float()


def their_results(model, tokens, labels):
    """Returns the logits of the words, without padding, and the loss."""
    with torch.no_grad():
        logits = _logits(model, tokens)
    return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def as_on_cuda(tensor, *dtype, kind=torch.Tensor.type):
    """Takes the place of Tensor.type, by whose text the optimizers look for tensors on a GPU."""
    return kind(tensor, *dtype) if dtype else kind(tensor).replace("torch.", "torch.cuda.")


def trained(model, tokens, labels, steps=2):
    """Returns megatron-core's optimizer after some updates of the model.

    A bfloat16 model gets the optimizer with float32 weights. torch's AdamW makes the updates.
    """
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1)
    groups = _get_param_groups([model], config, get_standard_config_overrides(config))
    for group in groups:  # as Megatron-LM's schedule does
        group["weight_decay"] = 0.1 * group["wd_mult"]
    adam = torch.optim.AdamW(groups, lr=1e-2)
    if next(model.parameters()).dtype == torch.float32:
        optimizer = FP32Optimizer(adam, config, lambda *_: None)
    else:
        kind = torch.Tensor.type
        torch.Tensor.type = as_on_cuda
        optimizer = Float16OptimizerWithFloat16Params(adam, config, None, lambda *_: None)
        torch.Tensor.type = kind
    for _ in range(steps):
        step(model, optimizer, tokens, labels)
    return optimizer


def step(model, optimizer, tokens, labels):
    """Makes one update of the model."""
    tp_group = parallel_state.get_tensor_model_parallel_group()
    F.cross_entropy(_logits(model, tokens).flatten(0, 1), labels.flatten()).backward()
    for name, parameter in model.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:  # each rank has its own heads
            dist.all_reduce(parameter.grad, group=tp_group)
        main = getattr(parameter, "main_param", parameter)
        main.grad = parameter.grad.to(main.dtype)
    optimizer.optimizer.step()
    for parameter in model.parameters():
        parameter.data.copy_(getattr(parameter, "main_param", parameter).data)
        parameter.grad = None


def _begun(root, inner=""):
    """Returns the folder of the one iteration that is saved."""
    folder = root / "iter_0000004" / inner
    folder.mkdir(parents=True, exist_ok=True)
    (root / LATEST).write_text("4")
    return folder


def save_legacy(root, rank, args, model, optimizer):
    """Writes what Megatron-LM's save_checkpoint writes with --ckpt-format torch."""
    torch.save(
        {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 4,
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": 4},
            "rng_state": [{"random_rng_state": (3, (1, 2, 3), None)}],
            "num_floating_point_operations_so_far": 0,
        },
        _begun(root, f"mp_rank_{rank:02d}") / "model_optim_rng.pt",
    )


def save_dist(root, args, model, optimizer):
    """Writes what Megatron-LM's save_checkpoint writes with --ckpt-format torch_dist."""
    from megatron.core import dist_checkpointing

    filesystem_async._results_queue = queue.Queue()  # else it starts a process that needs a main
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 4,
        "model": model.sharded_state_dict(metadata=METADATA),
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=METADATA)
    folder = _begun(root)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))


def load_legacy(root, rank, model, optimizer):
    """Loads as Megatron-LM's load_checkpoint does with --ckpt-format torch."""
    path = _saved(root) / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    assert state["checkpoint_version"] == 3.0 and state["iteration"] == 4
    _take(state, model, optimizer)


def _saved(root):
    """Returns the folder of the newest iteration."""
    return root / f"iter_{int((root / LATEST).read_text()):07d}"


def _take(state, model, optimizer):
    model.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(with_torch_steps(state["optimizer"]))


def with_torch_steps(state):
    """Adds the step that torch's AdamW keeps for each parameter.

    Megatron-LM's FusedAdam, which needs a GPU, keeps one step for each group instead.
    """
    inner = state.get("optimizer", state)
    steps = {group["step"] for group in inner["param_groups"]}
    inner["state"]["common_step"] = torch.tensor(float(steps.pop()))
    assert not steps
    return state


def load_dist(root, model, optimizer):
    """Loads as Megatron-LM's load_checkpoint does with --ckpt-format torch_dist."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    wanted = {"model": model.sharded_state_dict(metadata=METADATA)}
    wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=METADATA)
    # megatron-core passes all properties to torch.empty, which takes no strides (torch 2.15).
    with patch.object(TensorProperties, "__setstate__", _restore):
        state = dist_checkpointing.load(wanted, str(_saved(root)), strict=StrictHandling.RAISE_ALL)
    _take(state, model, optimizer)


def _restore(properties, state, restore=TensorProperties.__setstate__):
    restore(properties, state)
    vars(properties).pop("strides", None)
