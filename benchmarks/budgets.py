"""Memory against time on models of transformers: our budgets, and what else a user can set.

    none                 the model as it is
    budget               fit_memory_, at five budgets between the least and the most a step takes
    gradient_checkpointing   of transformers
    every-2, every-3     torch.utils.checkpoint around every second or third layer
    SAC                  torch's selective checkpointing: it keeps matrix products and attention
    SAC/2                the same, with every second matrix product, as torchtitan has it
    compiler's budget    torch.compile with activation_memory_budget; not on experts, whose shapes
                         change, nor on published sizes, which take minutes to compile

The peak is that of a step, with weights and gradients. A time is the ratio to a step of the plain
model, which runs in turn; for the compiler's budget, to a step of the same compiled code with a
budget of 1.
"""

import copy
import math
import sys
from contextlib import contextmanager, suppress
from functools import partial

import torch
import transformers
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

sys.path.insert(0, ".")  # the root of the clone, which may not be installed

from benchmarks.harness import (
    OutOfTime,
    add_device,
    clock_of,
    end_with_what_there_is,
    in_rounds,
    new_report,
    parse_benchmark,
    peak_above,
    plain_parser,
    publish,
    spread,
)
from megatron_lite.api import apply_policy_, fit_memory_, remove_policy_
from megatron_lite.config import known_models
from megatron_lite.config.hf_config import to_hf
from megatron_lite.config.model import ModelConfig
from megatron_lite.data.durable_files import write_text
from megatron_lite.fit.layers import layer_lists
from megatron_lite.pages.document import svg_text
from megatron_lite.parallel.weights import bytes_of
from megatron_lite.recompute.ops import find_operators

SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)  # of the way from the least to the most
BUDGETS = (0.0, 0.3, 0.6)  # of torch's compiler
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
ATTENTION = find_operators(["attention"])
DECODER = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=4, head_dim=32,
)  # fmt: skip


def decoder(kind, device, *, tokens=(2, 256), dtype=torch.float32, **settings):
    """Returns a language model and its batch. tokens: [b, s]."""
    config = getattr(transformers, f"{kind}Config")(**{**DECODER, **settings})
    with device:
        model = getattr(transformers, f"{kind}ForCausalLM")(config).train().to(dtype)
    ids = torch.randint(0, config.vocab_size, tokens, device=device)
    return model, dict(input_ids=ids, labels=ids, use_cache=False)


def published(name):
    """Returns what builds a Qwen3 of a published size in bf16, with 4096 tokens: for a GPU."""
    known = known_models.PRESETS[name]
    config = to_hf(ModelConfig(**known.fields), known.vocab_size, "qwen3")
    return partial(decoder, "Qwen3", tokens=(1, 4096), dtype=torch.bfloat16, **config)


def whisper(device):
    """Returns a model of speech with two lists of layers, and its batch."""
    layers = dict(encoder_layers=4, decoder_layers=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024)
    config = transformers.WhisperConfig(
        d_model=256, encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=2048,
        max_source_positions=200, pad_token_id=0, decoder_start_token_id=1, **layers,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).train().to(device)
    sound = torch.randn(2, config.num_mel_bins, 400, device=device)
    words = torch.randint(2, 2048, (2, 96), device=device)
    return model, dict(input_features=sound, labels=words, use_cache=False)


ON_A_CPU = ["Qwen3", "Qwen3-MoE", "Whisper"]
MODELS = {
    "Qwen3": partial(decoder, "Qwen3"),
    "Qwen3-MoE": partial(
        decoder, "Qwen3Moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
    ),
    "Whisper": whisper,
    **{name: published(name.lower()) for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B")},
}


def stepped(model, batch):
    """Returns a forward and a backward."""

    def step():
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    return step


@contextmanager
def switched(model):
    """transformers' own switch."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    yield
    model.gradient_checkpointing_disable()


@contextmanager
def wrapped(model, every, kept=0):
    """torch's checkpoint around layers. kept: every how many-th matrix product is kept, if any."""
    layers = [layer for one in layer_lists(model, None).values() for layer in one][::every]
    for layer in layers:
        more = {"context_fn": partial(selective, kept)} if kept else {}
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **more)
    yield
    for layer in layers:
        del layer.forward


def selective(kept):
    """The contexts of one layer's forward and replay."""
    counts = {False: 0, True: 0}

    def policy(context, operator, *_, **__):
        counts[context.is_recompute] += operator in PRODUCTS
        number = counts[context.is_recompute]
        keeps = operator in ATTENTION or (operator in PRODUCTS and number % kept == 0)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled(model, batch, budget):
    """Returns a copy of the model, and its step compiled for a share of its activations."""
    copied = copy.deepcopy(model)
    is_cuda = next(model.parameters()).is_cuda
    name = "inductor" if is_cuda else "aot_eager_decomp_partition"  # no C++ compiler needed
    backend = partial(lookup_backend(name))  # one of its own, since code is shared by backend
    with torch._functorch.config.patch(activation_memory_budget=budget):
        step = stepped(torch.compile(copied, backend=backend), batch)
        step()
    return copied, step


def peak_of(model, step, device):
    """Returns the most bytes of a step, with the weights."""
    model.zero_grad()
    there = bytes_of([*model.parameters(), *model.buffers()])
    if device.type == "cuda":
        there = torch.cuda.memory_allocated(device)
    return there + peak_above(step, device)


def rows_of(name, args):
    """Measures one model under every setting."""
    torch.manual_seed(0)
    model, batch = MODELS[name](args.device)
    step, plain = stepped(model, batch), stepped(copy.deepcopy(model), batch)
    clock = clock_of(args)
    plain()  # its gradients are on the device from now on

    def row(setting, other, base, measured):
        assert torch.allclose(other(), base(), rtol=1e-4), setting
        peak = peak_of(measured, other, args.device)
        steps = {setting: partial(clock, other), "the plain model": partial(clock, base)}
        ratio = spread(*in_rounds(steps, args.repeats).values())
        return dict(what=name, name=setting, peak_bytes=peak, time_ratio=ratio)

    most = peak_of(model, step, args.device)
    for layers in layer_lists(model, None):
        apply_policy_(model, layers_fqn=layers, policy="*:full", verify=False)
    least = peak_of(model, step, args.device)
    remove_policy_(model)
    yield row("none", step, plain, model)
    for share in SHARES:
        budget = int(least + share * (most - least))
        model.zero_grad()
        fit = fit_memory_(model, f"{budget}B", step=step)
        found = row(f"budget {budget / 2**20:.0f} MiB", step, plain, model)
        yield dict(found, budget_bytes=budget)
        fit.remove()
    ways = {
        "gradient_checkpointing": switched(model),
        **{f"every-{n}": wrapped(model, n) for n in (2, 3)},
        "SAC": wrapped(model, 1, kept=1),
        "SAC/2": wrapped(model, 1, kept=2),
    }
    for setting, way in ways.items():
        with way:
            yield row(setting, step, plain, model)
    if name in ("Qwen3", "Whisper"):
        torch._dynamo.reset()
        _, whole = compiled(model, batch, 1.0)
        for share in BUDGETS:
            copied, other = compiled(model, batch, share)
            yield row(f"compiler's budget {share}", other, whole, copied)


def draw(rows, file):
    """Draws one picture for each model: memory to the right, time upwards."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["what"] for row in rows))
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    marks = {
        "none": ("k*", "none"),
        "budget": ("o-", "megatron_lite's budget"),
        "gradient": ("D", "gradient_checkpointing"),
        "every": ("s:", "every n-th layer"),
        "SAC": ("^:", "SAC"),
        "compiler's": ("v:", "torch's compiler"),
    }
    for name, axis in zip(names, axes, strict=True):
        for start, (mark, label) in marks.items():
            found = [row for row in rows if row["what"] == name and row["name"].startswith(start)]
            axis.plot(
                [row["peak_bytes"] / 2**20 for row in found],
                [row["time_ratio"][0] for row in found],
                mark,
                label=label,
            )
        axis.set(title=name, xlabel="peak of a step, MiB", ylabel="time / plain")
    legend = dict(loc="outside lower center", ncols=len(marks), fontsize="small")
    figure.legend(*axes[0].get_legend_handles_labels(), **legend)
    write_text(file, svg_text(figure))


def main(argv=None):
    """Runs the benchmark. Returns 0, or 1 if a step took more than its budget."""
    parser = plain_parser(__doc__, repeats=5)
    add_device(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=ON_A_CPU)
    parser.add_argument("--picture", metavar="FILE.svg", help="memory against time, drawn")
    args = parse_benchmark(parser, argv)
    report = new_report(args)
    end_with_what_there_is()
    above = []
    for name in args.models:
        rows = []
        with suppress(OutOfTime):
            rows.extend(rows_of(name, args))  # what there is stays
        publish(report, rows, args.json)
        above += [
            row for row in rows if row["peak_bytes"] > 1.01 * row.get("budget_bytes", math.inf)
        ]
    for row in above:
        print(f"above its budget: {row}", file=sys.stderr)
    if args.picture:
        draw(report["rows"], args.picture)
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
