"""The `args` of a Megatron checkpoint: the model, the vocabulary and the progress, both ways."""

import argparse
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.step_files import Progress
from megatron_lite.config.checks import InputError, Values, flag, input_faults, parse_json, quoted
from megatron_lite.config.experts import ExpertSettings
from megatron_lite.config.megatron_flags import REFUSED
from megatron_lite.config.model import SWITCHED_ACTIVATIONS, ModelConfig
from megatron_lite.config.setting import from_plain, settings_of
from megatron_lite.config.variants import LATENT, LatentSettings, RotarySettings, Variants
from megatron_lite.convert.target import new_step
from megatron_lite.convert.weights import OUTPUT, WORDS, WeightSource

from .torch_file import Inert

SCALARS = (bool, int, float, str, type(None))
# Fields that Megatron-LM has no argument for, or that are not converted, with the only value of
# models that are.
ONLY_HERE = {
    **{
        name: one.default
        for kind in (LatentSettings, RotarySettings, Variants)
        for name, one in settings_of(kind).items()
        if name != "rotary_interleaved"
    },
    "rope_type": "rope",
    "moe_router_group_best": None,
}
# Of these Megatron-LM has arguments that count with multi-latent attention alone.
OF_LATENTS = {*settings_of(LatentSettings), *settings_of(RotarySettings)} & ONLY_HERE.keys() - {
    *("latent_norm_epsilon", "rotary_base_local", "rope_attention_factor"),
    *("short_factor", "long_factor"),
}
# attention_backend says how a layer is computed, not what: the converted model has the default.
SHARED = settings_of(ModelConfig).keys() - {*ONLY_HERE, "attention_backend"}
# tables.json: the names of older releases (`names`) and of TE's fused norms (`norms`), in the order
# in which they are replaced; the `order` of a layer's modules, which numbers the optimizer states;
# the arguments that make a model another one (`variants`), beside the fields of Variants, with the
# values besides None and False for which they do not, unless Megatron-LM has them for the model;
# `older` spellings of arguments; and values of files that are written. The run that loads a
# `schedule` takes its own with --override-opt_param-scheduler.
TABLES = parse_json(Path(__file__).with_name("tables.json").read_text())
VOCAB_MULTIPLE = 128  # --make-vocab-size-divisible-by, its default in Megatron-LM
ADAM, MASTER = ("exp_avg", "exp_avg_sq"), "master"


def arguments_of(common: Any, where: object) -> Values:
    """Returns the `args` of a checkpoint's common values. Raises InputError if there are none."""
    found = common.get("args") if isinstance(common, dict) else None
    found = vars(found) if isinstance(found, Inert) else found
    if not isinstance(found, dict) or not found:
        raise InputError(
            f"{where}: holds no `args`, so the shape of its model is not known. Checkpoints of "
            "Megatron-LM have them; save the checkpoint again with Megatron-LM"
        )
    return {name: _plain(value) for name, value in found.items() if isinstance(name, str)}


def _plain(value: Any) -> Any:
    """Returns a scalar or a list of scalars as it is, and a text in the place of anything else.

    The repr of a nested list may be endless: a list may contain itself.
    """
    if type(value) in SCALARS:
        return value
    if isinstance(value, (list, tuple)) and all(type(one) in SCALARS for one in value):
        return [int(one) if type(one) is bool else one for one in value]
    return value.kind if isinstance(value, Inert) else f"a {type(value).__name__}"


def shared(has_latents: Any) -> set[str]:
    """Returns the fields of ModelConfig that are arguments of Megatron-LM for a model."""
    return SHARED | OF_LATENTS if has_latents else SHARED


def model_of(args: Values, where: str) -> ModelConfig:
    """Returns the model that a checkpoint's `args` describe.

    Raises InputError if this project has no such model; it names the argument.
    """
    names = shared(args.get(LATENT))
    ours = {name: (one.default,) for name, one in settings_of(Variants).items()}
    for name, neutral in (ours | TABLES["variants"]).items():
        value = args.get(name)
        if name not in names and value not in (None, False, *neutral):
            reason = REFUSED.get(flag(name), "it changes the model, and no conversion reads it")
            raise InputError(
                f"{where}: was trained with {name} = {quoted(value)}, which cannot be converted: "
                f"{reason.partition(';')[0]}"
            )
    # Spellings and forms of older releases count where the newer ones are missing.
    values = {name: args.get(older) for name, older in TABLES["older"].items()}
    if "disable_bias_linear" in args:
        values["add_bias_linear"] = not args["disable_bias_linear"]
    if args.get("add_position_embedding") is False:
        values["position_embedding_type"] = "none"
    values |= {name: one for name, one in args.items() if name in names and one is not None}
    if args.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    # Megatron does not read the number of groups and the settings of experts without a switch.
    if not values.get("group_query_attention"):
        values["num_query_groups"] = None
    if not values.get("num_experts"):
        values |= dict.fromkeys(settings_of(ExpertSettings))
    if args.get("openai_gelu"):
        values["bias_gelu_fusion"] = True  # both are the tanh approximation
    if type(base := values.get("rotary_base")) is float and base.is_integer():
        values["rotary_base"] = int(base)
    with input_faults(f"{where}: its args describe no model of this project: "):
        given = {name: value for name, value in values.items() if value is not None}
        return from_plain(ModelConfig, given, "args")


def vocabulary_of(args: Values, padded: int) -> tuple[int, list[str]]:
    """Returns V, and notes.

    padded: the number of rows that the embedding has in the checkpoint.
    """
    notes = []
    tokenizer, size = args.get("tokenizer_type"), args.get("vocab_size")
    if type(tokenizer) is str and tokenizer != "NullTokenizer":
        notes.append(
            f"the checkpoint does not hold its tokenizer ({quoted(tokenizer)}, "
            f"{quoted(args.get('tokenizer_model') or args.get('vocab_file'))}): name it with "
            "--tokenizer-type and its files"
        )
    if type(size) is int and size > 0:
        size += tokenizer == "NullTokenizer"  # its end-of-document id
        if size <= padded:
            return size, notes
    notes.append(
        f"the checkpoint does not say how many of its {padded} rows of the vocabulary are "
        "padding: all of them are kept"
    )
    return padded, notes


def progress_of(common: Values, args: Values, where: str) -> Progress:
    """Returns how far the run had come; zero where the checkpoint does not say.

    Raises InputError for numbers that no run reaches.
    """
    progress = Progress(
        iteration=_plain(common.get("iteration")) or 0,
        consumed_samples=args.get("consumed_train_samples") or 0,
    )
    with input_faults(f"{where}: of its numbers: "):
        progress.check()
    return progress


# --- writing ---


def padded_vocab_size(source: WeightSource, tp_size: int) -> int:
    """Returns the number of rows of the vocabulary that a run of Megatron-LM has by default."""
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-source.true_vocab_size // multiple) * multiple


def with_padding(name: str, whole: Tensor, num_rows: int) -> Tensor:
    """Returns the values of a parameter, with further rows of zeros if it is of the vocabulary."""
    if name not in (WORDS, OUTPUT):
        return whole
    return torch.nn.functional.pad(whole, (0, 0, 0, num_rows - len(whole)))


def new_iteration(source: WeightSource, path: Path) -> AbstractContextManager[Path]:
    """Yields the folder of the iteration to write, or of the "release" for weights alone."""
    return new_step(path, source.progress.iteration if source.state_keys else None)


def common_values(source: WeightSource, *, tp_size: int, pp_size: int) -> Values:
    """Returns the values that are no tensors and belong to no optimizer."""
    model, progress = source.model, source.progress
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(model).items()
        if name in shared(model.multi_latent_attention)
    }
    if not model.group_query_attention:
        values["num_query_groups"] = model.num_attention_heads
    args = argparse.Namespace(
        **TABLES["saved"],
        **values,
        seq_length=model.max_position_embeddings,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        expert_tensor_parallel_size=tp_size,
        vocab_size=source.true_vocab_size - 1,
        padded_vocab_size=padded_vocab_size(source, tp_size),
        make_vocab_size_divisible_by=VOCAB_MULTIPLE,
        consumed_train_samples=progress.consumed_samples,
    )
    found = dict(
        args=args,
        checkpoint_version=3.0,
        iteration=progress.iteration,
        num_floating_point_operations_so_far=0,
    )
    if source.state_keys:
        schedule = TABLES["schedule"]
        found["opt_param_scheduler"] = {**schedule, "num_steps": progress.consumed_samples}
    return found


def groups(source: WeightSource) -> list[Values]:
    """Returns the optimizer's groups with and without weight decay, without `params`."""
    return [
        {"wd_mult": decay, **TABLES["group"], "step": source.num_updates} for decay in (1.0, 0.0)
    ]


def check_exact(source: WeightSource, target: str) -> None:
    """Raises InputError unless Megatron-LM has such a model, and reads the optimizer states."""
    model = source.model
    has = shared(model.multi_latent_attention)
    for name, only in ONLY_HERE.items():
        if name not in has and getattr(model, name) != only:
            raise InputError(
                f"--to {target}: the model has {name} = {getattr(model, name)}, and every model of "
                f"Megatron-LM that is converted has {only}: convert with --to hf"
            )
    has_gelu = not any(getattr(model, name) for name in SWITCHED_ACTIVATIONS)
    if has_gelu and model.bias_gelu_fusion and not model.add_bias_linear:
        # Megatron-LM turns its fused GELU off without a bias, and the unfused one has no tanh.
        raise InputError(
            f"--to {target}: the model has bias_gelu_fusion = True, the tanh formula of GELU, "
            "without biases, and Megatron-LM computes the exact GELU there: train with "
            "--no-bias-gelu-fusion"
        )
    is_adam = set(source.state_keys) - {MASTER} == set(ADAM) and not source.lacking
    if source.state_keys and not is_adam:
        raise InputError(
            f"--to {target}: the checkpoint holds the optimizer states "
            f"{', '.join(source.state_keys)}, and only those of Adam can be converted. "
            "Export the weights alone with --to hf, or train with --optimizer adam"
        )
