"""Settings of Megatron-LM and its forks that stand for other fields here, by a rule, by arithmetic
or from a file; and what stands before the flags in a launch script.

`megatron_flags.OTHER_WAYS` has most of their flags. `translate_values` loads this module if one of
them is given, or a choice about context parallelism. Standard library only.
"""

import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from .checks import InputError, Values, as_object, flag, input_faults, quoted, shown
from .hf_rules import Config
from .input_file import read_json
from .megatron_flags import ACCOUNTED, SHARDING_STRATEGIES, STRATEGY, TOKENS, ZERO_STAGE
from .model import ModelConfig
from .parallel import ParallelConfig, no_flash_across_ranks
from .setting import Setting, settings_of

OFFLOAD = "optimizer_cpu_offload"
# What DeepSpeed's configuration says as fields here, and the type of each or what its words mean.
DEEPSPEED: dict[str, tuple[str, type | Values]] = {
    "train_batch_size": ("global_batch_size", int),
    "train_micro_batch_size_per_gpu": ("micro_batch_size", int),
    "gradient_clipping": ("clip_grad", float),
    "bf16.enabled": ("bf16", bool),
    "fp16.enabled": ("fp16", bool),
    "fp16.loss_scale": ("loss_scale", float),
    "fp16.initial_scale_power": ("initial_loss_scale", int),
    "fp16.loss_scale_window": ("loss_scale_window", int),
    "fp16.hysteresis": ("hysteresis", int),
    "fp16.min_loss_scale": ("min_loss_scale", float),
    "communication_data_type": ("grad_reduce_in_bf16", {"fp32": False, "bf16": True}),
    "data_types.grad_accum_dtype": ("main_grads_dtype", {"fp32": "fp32", "bf16": "bf16"}),
    "zero_optimization.cpu_offload": (OFFLOAD, bool),
    "zero_optimization.offload_optimizer.device": (OFFLOAD, {"cpu": True, "none": False}),
    "zero_optimization.offload_optimizer.ratio": ("optimizer_offload_fraction", float),
    "optimizer.type": ("optimizer", {"adam": "adam", "adamw": "adam"}),
    "optimizer.params.lr": ("lr", float),
    "optimizer.params.betas.0": ("adam_beta1", float),
    "optimizer.params.betas.1": ("adam_beta2", float),
    "optimizer.params.eps": ("adam_eps", float),
    "optimizer.params.weight_decay": ("weight_decay", float),
}
# Its keys that change no result but by rounding. Any other one is refused, unless it is off.
UNREAD = re.compile(
    r"(steps_per_print|dump_state|log_level|wall_clock_breakdown|memory_breakdown|flops_profiler|"
    r"tensorboard|wandb|comet|csv_monitor|comms_logger|timers|activation_checkpointing|aio|"
    r"checkpoint|nebula|datastates_ckpt|disable_allgather|dataloader_drop_last|sparse_gradients|"
    r"prescale_gradients|gradient_predivide_factor|zero_allow_untested_optimizer|compile|"
    r"zero_force_ds_cpu_optimizer|graph_harvesting|use_data_before_expert_parallel_|"
    r"optimizer\.legacy_fusion|optimizer\.params\.torch_adam|"
    r"bf16\.immediate_grad_update|bf16\.check_grad_overflow|fp16\.auto_cast|"
    r"pipeline\.(?!seed_layers)\w+|zero_optimization\.(?!zero_quant|zeropp|zenflow)\w+)(\.|$)"
)
# What is on here, and may not be off.
ON = ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction")
STAGES = {1: "use_distributed_optimizer", 2: "use_distributed_optimizer", 3: "use_torch_fsdp2"}
# A flag, and its value if that is plain.
FLAGS = re.compile(r"(?<![\w$-])(--[a-zA-Z][\w-]*)(?:[= ]+([^\s\\\"'$()-][^\s\\\"'$()]*))?")
# What a launcher starts, and how a command begins, as words with \0 between them.
PROGRAM = re.compile(r"(?:^|(?<=\0))(?:[^\0]*\.py|bash|megatron.lite\0train)(?=\0|$)")
COMMAND = re.compile(
    r"(?:^|(?<=\0))(?:(?:[A-Za-z_]\w*=[^\0]*|(?:[^\0]*/)?(?:env|srun|\w+run|mpiexec|deepspeed|"
    rf"accelerate|ray|python[\d.]*))\0|{PROGRAM.pattern})"
)


def translate_others(given: Values, *, has_file: bool) -> Iterator[str]:
    """Replaces these settings in `given`. Yields notices about them.

    has_file: whether a file supplies the values of flags that are not given.
    Raises InputError for flags that contradict each other.
    """
    if given.pop("no_bf16", False) and given.setdefault("bf16", False):
        raise InputError("--no-bf16 contradicts --bf16: leave one out")
    for step in (_tokens, _deepspeed, _mindspeed):
        yield from step(given)
    yield from _cp_comm_type(given, has_file)
    yield from _position_embedding(given)
    yield from _megatron_fsdp(given)
    yield from _accounted_layers(given, has_file)
    if not has_file:
        yield from _context_parallel_attention(given)


def _deepspeed(given: Values) -> Iterator[str]:
    """Takes ZeRO's stage and the fields of a DeepSpeed configuration.

    Raises InputError where a flag contradicts, and for a key that would change the result.
    """
    path, stage = given.pop("deepspeed_config", None), given.pop("zero_stage", None)
    said, found, source = f"--deepspeed-config {path}", Values(), f"--zero-stage {stage}"
    if stage is not None:
        stage = ZERO_STAGE.megatron.get(stage, stage)
        if fault := ZERO_STAGE.fault(stage):
            raise InputError(fault)
        stage = int(stage)
        yield f"{source} is read as {flag(STAGES[stage]) if stage else 'what happens here anyway'}"
    if path is not None and not os.path.exists(path):
        yield f"{shown(said)}: there is no such file, so the flags alone hold"
        path = None
    with input_faults(f"{said}: " if path else ""):
        if path is not None:
            try:
                found = dict(_leaves(as_object(read_json(path), "the file")))
            except OSError as error:
                raise ValueError(f"cannot be read ({error.strerror})") from error
        filed = _taken(found, "zero_optimization.stage", int)
        if filed not in (None, 0, *STAGES):
            raise ValueError(f"zero_optimization.stage must be 0, 1, 2 or 3 (got {filed})")
        if filed is not None:
            typed, source = source, f"zero_optimization.stage {filed}"
            if stage not in (None, filed):
                raise ValueError(f"{source} contradicts {typed}: make them equal")
            stage = filed
        for field in {*STAGES.values()} if stage is not None else ():
            if STAGES.get(stage) == field:
                given[field] = True
            elif given.get(field):
                raise ValueError(f"{source} contradicts {flag(field)}: leave one out")
        for name, (field, kind) in DEEPSPEED.items():
            if (value := _taken(found, name, kind)) is None:
                continue
            if field == "loss_scale":
                value = value or None  # a scale of 0 is dynamic
            elif field == "initial_loss_scale":
                value = 2.0 ** min(value, 999)
            held = given.setdefault(field, "fp32" if field == "main_grads_dtype" else value)
            if held != value:
                said_by = Setting("", f"--no-{field}" * (held is False), field=field)
                raise ValueError(
                    f"{name} {value} contradicts {said_by.with_value(held)}: make them equal"
                )
        if stage == 3 and given.get(OFFLOAD):
            raise ValueError(
                f"{source} excludes states on the host (offload_optimizer, {flag(OFFLOAD)}): main "
                "weights stay on the device there. Take stage 2, or leave them out"
            )
        steps = _taken(found, "gradient_accumulation_steps", int)
        samples = given.get("micro_batch_size", 1)
        if steps and given.get("global_batch_size", samples) % max(steps * samples, 1):
            raise ValueError(
                f"gradient_accumulation_steps {steps} needs train_batch_size or "
                "--global-batch-size: give a multiple of it and of --micro-batch-size"
            )
        unread = [name for name in found if UNREAD.match(name)]
        refused = [
            shown(name)
            for name, value in found.items()
            if name not in unread and (value is False if name in ON else value and value != "auto")
        ]
        if refused:
            raise ValueError(
                f"what may change the result is not supported here: {', '.join(refused)}. Leave it "
                "out, or give flags for it"
            )
    if unread:
        yield f"{said}: without effect on results, so not read: {', '.join(map(shown, unread))}"


def _leaves(section: Values, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested objects with names such as `zero_optimization.stage`.

    A section that can be turned on or off has only that: as `aio.enabled` if it is off, else `aio`.
    """
    for key, value in section.items():
        name = before + {"bfloat16": "bf16"}.get(key, key)
        if key == "betas" and isinstance(value, list):
            value = {str(number): beta for number, beta in enumerate(value)}
        is_on = value.get("enabled") if isinstance(value, dict) else None
        if is_on is False:
            yield f"{name}.enabled", False
        elif not isinstance(value, dict) or name.count(".") > 9:
            yield name, value
        elif is_on is not None and name not in ("bf16", "fp16"):
            yield name, is_on
        else:
            yield from _leaves(value, f"{name}.")


def _taken(found: Values, name: str, kind: type | Values) -> Any:
    """Removes a value, and returns it; None if it is not there, or "auto".

    Raises ValueError if it is of another type, or none of the words.
    """
    value = found.pop(name, None)
    if value is None or value == "auto":
        return None
    if isinstance(kind, type):
        return Config({name: value}).value(name, kind, None)
    if (word := str(value).lower()) not in kind:
        raise ValueError(f"{name} must be {' or '.join(kind)} (got {quoted(value)})")
    return kind[word]


def _tokens(given: Values) -> Iterator[str]:
    """Replaces lengths in tokens by samples, or by iterations where the run has those."""
    for name in TOKENS:
        if (tokens := given.pop(name, None)) is None:
            continue
        in_iterations = "train_iters" in given
        sizes = ["seq_length", "global_batch_size"][: 1 + in_iterations]
        if missing := [flag(size) for size in sizes if given.get(size, 0) < 1]:
            raise InputError(
                f"{flag(name)} {tokens} needs {' and '.join(missing)}: give it, at least 1"
            )
        if tokens < 0 or (tokens == 0 and name == "train_tokens"):
            raise InputError(f"{flag(name)} must be at least 1 (got {tokens}): give the tokens")
        if in_iterations and given.get("rampup_batch_size"):
            raise InputError(
                f"{flag(name)} {tokens} with --rampup-batch-size needs --train-samples in place of "
                "--train-iters: the batches differ"
            )
        length = -(-tokens // math.prod(given[size] for size in sizes))
        topic = name.removesuffix("tokens")
        field = topic + ("iters" if in_iterations else "samples")
        for other in (f"{topic}iters", f"{topic}samples") if topic != "train_" else ():
            given.pop(other, None)  # which tokens override
        given[field] = min(length, given.get(field, length))
        yield f"{flag(name)} {tokens} is read as {flag(field)} {given[field]}"


def _mindspeed(given: Values) -> Iterator[str]:
    """Replaces MindSpeed's number of dense first layers by the list of --moe-layer-freq, numbers of
    its models by the multipliers that they stand for, and its list of the stages' layers by the
    layout."""
    dense, text = given.pop("first_k_dense_replace", None), given.pop("num_layer_list", None)
    hidden, layers = given.get("hidden_size", 0), given.get("num_layers", 0)
    if dense is not None:
        every = given.get("moe_layer_freq", 1)
        if not layers:
            raise InputError(
                f"--first-k-dense-replace {dense} needs --num-layers: give it, or --moe-layer-freq "
                f"[0]*{dense}+[1]*N"
            )
        if not isinstance(every, int):
            raise InputError(f"--first-k-dense-replace {dense} excludes a list of --moe-layer-freq")
        given["moe_layer_freq"] = tuple(
            int(number >= dense and number % (every or 1) == 0) for number in range(layers)
        )
        yield (
            f"--first-k-dense-replace {dense}: the first {dense} of {layers} layers have no experts"
        )
    for name, field, size, scale in (
        ("input_embeds_norm", "embedding_multiplier", hidden, lambda _: math.sqrt(hidden)),
        ("query_pre_attn_scalar", "softmax_scale", 1, lambda number: 1 / math.sqrt(number)),
        ("scale_depth", "residual_multiplier", layers, lambda depth: depth / math.sqrt(layers)),
        ("dim_model_base", "logits_scaling", hidden, lambda base: hidden / base),
    ):
        value = given.pop(name, None)
        if value is None or value is False:
            continue
        if value <= 0:
            raise InputError(f"{flag(name)} must be above 0 (got {value})")
        if size < 1:
            raise InputError(f"{flag(name)} needs --hidden-size and --num-layers: give them")
        given[field] = scale(value)
        yield f"{flag(name)} is read as {flag(field)} {given[field]}"
    if text is not None:
        said = f"--num-layer-list {shown(text)}"
        stages = given.get("pipeline_model_parallel_size", 1)
        numbers = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
        if len(numbers) != stages or sum(numbers) != layers or not all(numbers):
            raise InputError(
                f"{said} must have --pipeline-model-parallel-size {stages} numbers of at least 1 "
                f"with the sum --num-layers {given.get('num_layers')}"
            )
        if len({*numbers}) == 1:
            yield f"{said}: all stages have as many layers, as they have anyway"
        else:
            yield _with_layout(given, said, numbers)


def _with_layout(given: Values, said: str, numbers: Sequence[int]) -> str:
    """Sets the layout of stages with these numbers of layers. Returns a notice."""
    given["pipeline_model_parallel_layout"] = f"E{'|'.join('t' * one for one in numbers)}L"
    return f"{said}: --pipeline-model-parallel-layout '{given['pipeline_model_parallel_layout']}'"


def _cp_comm_type(given: Values, has_file: bool) -> Iterator[str]:
    kinds = given.pop("cp_comm_type", [])
    others = settings_of(ParallelConfig)["cp_comm_type"].megatron
    alone = given.get("context_parallel_size", 1 + has_file) == 1  # no ranks exchange anything
    parts = given.get("tensor_model_parallel_size", 1) * given.get("context_parallel_size", 1)
    groups = given.get("num_query_groups") or given.get("num_attention_heads", 0)
    # MindSpeed repeats keys and values where there are too few for the ranks
    others = {**others, "ulysses": "p2p" if parts and groups % parts else "a2a"}
    read = [others.get(kind, kind) for kind in kinds]
    if alone:
        read = ["p2p" if kind == "a2a" else kind for kind in read]
    if kinds:
        given["cp_comm_type"] = read[0] if len({*read}) == 1 else tuple(read)
    for kind, read_as in sorted({*zip(kinds, read, strict=True)}):
        if ("a2a" in kind or kind == "ulysses") and read_as == "p2p":
            yield (
                f"--cp-comm-type {kind} is read as {read_as}: each rank keeps its heads here, "
                "which changes the result by rounding at most"
            )


def _position_embedding(given: Values) -> Iterator[str]:
    """Replaces the two switches for a position embedding by the field.

    Raises ValueError if they contradict --position-embedding-type.
    """
    for switch, kinds in (
        ("use_rotary_position_embeddings", ("rope",)),
        ("no_position_embedding", ("none", "rope")),
    ):
        if given.pop(switch, False):
            kind = given.setdefault("position_embedding_type", kinds[0])
            if kind not in kinds:
                raise InputError(
                    f"{flag(switch)} contradicts --position-embedding-type {kind}: leave one out"
                )
            if switch == "no_position_embedding":
                yield f"{flag(switch)} is an old flag, read as --position-embedding-type {kind}"


def _megatron_fsdp(given: Values) -> Iterator[str]:
    """Replaces Megatron's own FSDP by the switch that shares out the same here."""
    is_used = given.pop("use_megatron_fsdp", False)
    strategy = given.pop("data_parallel_sharding_strategy", None)
    if not is_used:
        if strategy is not None:
            yield "--data-parallel-sharding-strategy has no effect without --use-megatron-fsdp"
        return
    strategy = strategy or "no_shard"
    said = f"--use-megatron-fsdp with {strategy}"
    if fault := STRATEGY.fault(strategy):
        raise InputError(fault)
    field = SHARDING_STRATEGIES[strategy]
    if field is None:
        yield f"{said} has no effect: it shares out nothing"
        return
    if field == "use_torch_fsdp2":
        given.pop("use_distributed_optimizer", None)
        given.pop("overlap_param_gather", None)
    given[field] = True
    yield f"{said} is read as {flag(field)}, which gives the same results"


def _accounted_layers(given: Values, has_file: bool) -> Iterator[str]:
    """Replaces the switches that count the embedding or the loss as a layer of the pipeline.

    The first, or the last, pipeline rank then has one layer less than the others. The command line
    must have both numbers that this needs: a file is read later.
    """
    counted = [name for name in ACCOUNTED if given.pop(name, False)]
    size, layers = given.get("pipeline_model_parallel_size", 1), given.get("num_layers")
    said = " and ".join(map(flag, counted))
    if counted and has_file and not {"num_layers", "pipeline_model_parallel_size"} <= given.keys():
        raise InputError(
            f"{said} needs --num-layers and --pipeline-model-parallel-size on the command line, "
            "not in a file: give both, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers instead"
        )
    if not counted or layers is None:
        return  # a missing --num-layers is an error of its own
    if size == 1:
        yield f"{said}: no effect at --pipeline-model-parallel-size 1"
        return
    per_stage = given.pop("num_layers_per_virtual_pipeline_stage", None)
    per_rank = given.pop("num_virtual_stages_per_pipeline_rank", None)
    whole = layers + len(counted)
    number = per_stage or whole // (size * (per_rank or 1))
    if number < 1 or whole % (number * size) or (per_rank and whole != number * size * per_rank):
        raise InputError(
            f"{said}: --num-layers {layers} and {len(counted)} more are not divisible by "
            f"--pipeline-model-parallel-size {size}, or not into equal virtual stages on {size} "
            "ranks: give other numbers"
        )
    numbers = [number] * (whole // number)
    for name, end in zip(ACCOUNTED, (0, -1), strict=True):
        numbers[end] -= name in counted
    yield _with_layout(given, said, numbers)


def _context_parallel_attention(given: Values) -> Iterator[str]:
    """Chooses unfused attention where context parallelism has no other for the run."""
    reason = no_flash_across_ranks(
        given.get("attention_dropout", ModelConfig.attention_dropout),
        bool(given.get("reset_attention_mask")),
    )
    is_free = given.get("attention_backend", "auto") == "auto"
    exchanges = given.get("context_parallel_size", 1) > 1 and given.get("cp_comm_type") != "a2a"
    if reason and is_free and exchanges:
        given["attention_backend"] = "unfused"
        yield (
            "--attention-backend auto is unfused: context-parallel ranks have no flash attention "
            f"with {reason}, and unfused attention builds the scores"
        )


def without_launcher(words: Sequence[str]) -> tuple[list[str], str]:
    """Returns the words without those that start a program, such as `X=1 torchrun .. a.py`; and
    those.

    A word that is a whole command line is taken apart: ValueError if it is none.
    """
    parts = []
    for word in words:
        line = word.replace("\\\n", " ")
        parts += shlex.split(line) if ".py " in line else [word]
    text = "\0".join(parts)
    if not (programs := [*PROGRAM.finditer(text)]):
        return parts, ""
    begin, end = next(COMMAND.finditer(text)).start(), programs[-1].end()
    rest = text[:begin] + text[end + 1 :]
    return rest.strip("\0").split("\0"), text[begin:end].replace("\0", " ")


def num_processes(started: str) -> str | None:
    """Returns how many processes the words that start a program say, if they do."""
    given = dict(FLAGS.findall(started.replace("_", "-")))
    numbers = given.get("--nproc-per-node", ""), given.get("--nnodes", "1")
    return str(math.prod(map(int, numbers))) if all(map(str.isdecimal, numbers)) else None
