"""Times one training step of megatron_lite beside other GPTs of the same shape, and beside the machine's matmul rate.

A step is: gradients cleared, forward, loss over the whole vocabulary, backward, clipping at 1.0, fused AdamW. The engines take
turns (A B C A B C ..), so that a disturbed machine disturbs all of them, and each round gives one ratio. Engines:

    megatron_lite        its own training step; in bf16 its weights are bf16, masters, moments and gradients float32
    transformers         GPT2LMHeadModel, SDPA attention, tanh gelu as one kernel; skipped where the package is missing
    plain                the shortest GPT in plain PyTorch, below: the peer of a machine that has torch alone
    in bf16, peers run   "autocast": float32 weights under torch.autocast, which trains as ours does, and
                         "pure": bf16 weights, moments and gradients: less work than ours, and worse training

One process, one device, random tokens. How to read the table: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from megatron_lite.config.model import ModelConfig  # noqa: E402
from megatron_lite.config.training import OptimizerConfig  # noqa: E402
from megatron_lite.memory.flops import step_flops  # noqa: E402
from megatron_lite.model.gpt import GPTModel  # noqa: E402
from megatron_lite.optim.adamw import Optimizer  # noqa: E402
from megatron_lite.parallel.rng import RngStreams  # noqa: E402
from megatron_lite.parallel.state import ParallelState  # noqa: E402
from megatron_lite.tensor_parallel.context import TensorParallelContext  # noqa: E402
from megatron_lite.tensor_parallel.initialize import initialize_parameters_  # noqa: E402
from megatron_lite.training.batches import MicroBatch  # noqa: E402
from megatron_lite.training.step import train_step  # noqa: E402

SEED = 1234
OURS = "megatron_lite"
LEARNING_RATE = 1e-4
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One GPT with learned positions and tied embeddings, and the tokens of one step."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    batch_size: int
    vocab_size: int


PRESETS = {
    "tiny": Shape(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, batch_size=2, vocab_size=256),
    "small": Shape(num_layers=4, hidden_size=256, num_attention_heads=8, seq_length=256, batch_size=4, vocab_size=4096),
    "medium": Shape(num_layers=8, hidden_size=512, num_attention_heads=8, seq_length=512, batch_size=4, vocab_size=8192),
    "gpt2": Shape(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, batch_size=8, vocab_size=50304),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one block of rows has in common."""

    shape: Shape
    device: torch.device
    dtype: str
    dropout: float

    def model_config(self) -> ModelConfig:
        """The shape in the engine's own words."""
        shape = self.shape
        return ModelConfig(num_layers=shape.num_layers, hidden_size=shape.hidden_size, max_position_embeddings=shape.seq_length,
                           num_attention_heads=shape.num_attention_heads, hidden_dropout=self.dropout,
                           attention_dropout=self.dropout)


Step = Callable[[], Tensor]  # runs one training step and returns its loss, 0-d, without waiting for the device


# --- the engines ---

def our_step(setting: Setting, batch: MicroBatch) -> Step:
    """The engine's own train_step on one rank."""
    parallel = ParallelState(device=setting.device, rng=RngStreams(setting.device, seed=SEED))
    context = TensorParallelContext.of(parallel, sequence_parallel=False, params_dtype=DTYPES[setting.dtype])
    vocab_size = setting.shape.vocab_size
    model = GPTModel(setting.model_config(), context, vocab_size=vocab_size, padded_vocab_size=vocab_size)
    initialize_parameters_(model, seed=SEED, tp_rank=0, tp_size=1)
    optimizer = Optimizer(model, OptimizerConfig(), parallel)

    def step() -> Tensor:
        return train_step(model, optimizer, (batch,), num_microbatches=1, learning_rate=LEARNING_RATE, parallel=parallel).loss

    return step


def peer_step(build: Callable[[Setting], nn.Module], setting: Setting, batch: MicroBatch, *, autocast: bool) -> Step:
    """A training step as PyTorch's documentation writes it, for a model that maps token ids to logits [b, s, V]."""
    torch.manual_seed(SEED)
    model = build(setting).to(setting.device, torch.float32 if autocast else DTYPES[setting.dtype]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    labels = batch.labels.reshape(-1)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setting.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
            logits = model(batch.tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


class Logits(nn.Module):
    """Hides the outputs of a transformers model other than its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False, return_dict=True).logits


def transformers_gpt2(setting: Setting) -> nn.Module:
    """transformers' GPT-2. Its default gelu is a chain of seven pointwise kernels: the single-kernel spelling is faster."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = setting.shape
    return Logits(GPT2LMHeadModel(GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.seq_length, n_embd=shape.hidden_size, n_layer=shape.num_layers,
        n_head=shape.num_attention_heads, resid_pdrop=setting.dropout, embd_pdrop=setting.dropout, attn_pdrop=setting.dropout,
        activation_function="gelu_pytorch_tanh", attn_implementation="sdpa", bos_token_id=0, eos_token_id=0)))


class PlainLayer(nn.Module):
    """nn.Linear and scaled_dot_product_attention, batch first."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        h = shape.hidden_size
        self.num_heads, self.dropout = shape.num_attention_heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj, self.fc1, self.fc2 = nn.Linear(h, 3 * h), nn.Linear(h, h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, h = hidden_states.shape
        query, key, value = self.qkv(self.norm1(hidden_states)).view(b, s, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        hidden_states = hidden_states + F.dropout(self.proj(context.transpose(1, 2).reshape(b, s, h)), self.dropout)
        intermediate = F.gelu(self.fc1(self.norm2(hidden_states)), approximate="tanh")
        return hidden_states + F.dropout(self.fc2(intermediate), self.dropout)


class PlainGPT(nn.Module):
    """GPT-2's architecture in plain PyTorch."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        shape = setting.shape
        self.dropout = setting.dropout
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.seq_length, shape.hidden_size)
        self.layers = nn.Sequential(*(PlainLayer(shape, setting.dropout) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden_states = F.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]], self.dropout)
        return F.linear(self.norm(self.layers(hidden_states)), self.tokens.weight)


PEERS: dict[str, Callable[[Setting], nn.Module]] = {"transformers": transformers_gpt2, "plain": PlainGPT}


def build_engines(setting: Setting, peers: Sequence[str]) -> dict[str, Step]:
    """The contestants by name, ours first."""
    text = torch.randint(0, setting.shape.vocab_size, (setting.shape.batch_size, setting.shape.seq_length + 1),
                         generator=torch.Generator().manual_seed(SEED)).to(setting.device)
    batch = MicroBatch(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    engines = {OURS: our_step(setting, batch)}
    for peer in peers:
        if setting.dtype == "float32":
            engines[peer] = peer_step(PEERS[peer], setting, batch, autocast=False)
        else:
            engines[f"{peer}, autocast"] = peer_step(PEERS[peer], setting, batch, autocast=True)
            engines[f"{peer}, pure"] = peer_step(PEERS[peer], setting, batch, autocast=False)
    return engines


# --- the clock ---

@dataclass(frozen=True, kw_only=True)
class Clock:
    """wall: what a user waits for. cpu: this thread's processor time, which other processes on the machine hardly disturb."""

    device: torch.device
    kind: str = "wall"
    steps: int = 1

    def ms(self, action: Callable[[], object]) -> float:
        """Milliseconds per call over `steps` calls, the device's work included."""
        now = time.thread_time if self.kind == "cpu" else time.perf_counter
        self._wait()
        start = now()
        for _ in range(self.steps):
            action()
        self._wait()
        return (now() - start) * 1000.0 / self.steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def model_gemms(setting: Setting) -> Callable[[], None]:
    """Runs each forward matmul of the model's linear layers once, alone, on data of its own."""
    shape, dtype = setting.shape, DTYPES[setting.dtype]
    h, tokens = shape.hidden_size, shape.batch_size * shape.seq_length
    sizes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)] * shape.num_layers + [(h, shape.vocab_size)]
    operands = {size: (torch.randn(tokens, size[0], device=setting.device, dtype=dtype),
                       torch.randn(size[1], size[0], device=setting.device, dtype=dtype)) for size in set(sizes)}

    def run() -> None:
        for size in sizes:
            F.linear(*operands[size])

    return run


def gemm_flops(shape: Shape) -> int:
    """FLOPs of one `model_gemms` run."""
    h = shape.hidden_size
    return 2 * shape.batch_size * shape.seq_length * (shape.num_layers * 12 * h * h + h * shape.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine's result. speed_ratio: its time / ours, median, first and third quartile over rounds: above 1, ours is faster.

    gemm_fraction: time of the model's matmul FLOPs at the rate measured between the steps / time of the step.
    """

    engine: str
    dtype: str
    dropout: float
    ms: float
    tokens_per_second: float
    gemm_fraction: float
    gemm_tflops: float
    speed_ratio: tuple[float, float, float]
    samples_ms: list[float]
    loss: float


def measure(setting: Setting, engines: dict[str, Step], clock: Clock, *, rounds: int) -> list[Row]:
    """Rounds of every engine in turn, after two rounds to warm up."""
    gemms = model_gemms(setting)
    losses = {name: step() for _ in range(2) for name, step in engines.items()}
    gemms()
    samples: dict[str, list[float]] = {name: [] for name in engines}
    gemm_ms = []
    for _ in range(rounds):
        for name, step in engines.items():
            samples[name].append(clock.ms(step))
        gemm_ms.append(clock.ms(gemms))
    gemm_rate = gemm_flops(setting.shape) / (statistics.median(gemm_ms) / 1000.0)
    flops = step_flops(setting.model_config(), batch=setting.shape.batch_size, seq_length=setting.shape.seq_length,
                       padded_vocab_size=setting.shape.vocab_size)
    rows = []
    for name, times in samples.items():
        ms = statistics.median(times)
        ratios = [theirs / ours for theirs, ours in zip(times, samples[OURS], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        rows.append(Row(engine=name, dtype=setting.dtype, dropout=setting.dropout, ms=ms, samples_ms=times,
                        tokens_per_second=setting.shape.batch_size * setting.shape.seq_length / ms * 1000.0,
                        gemm_fraction=flops / gemm_rate / (ms / 1000.0), gemm_tflops=gemm_rate / 1e12,
                        speed_ratio=(middle, low, high), loss=losses[name].item()))
    return rows


def profile(setting: Setting, engines: dict[str, Step], *, steps: int = 3, top: int = 20) -> str:
    """Self time of the most expensive operators of each engine, in ms per step."""
    from torch.profiler import ProfilerActivity

    cuda = setting.device.type == "cuda"
    lines = []
    for name, step in engines.items():
        step()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
                                    record_shapes=not cuda) as trace:
            Clock(device=setting.device, steps=steps).ms(step)
        averages = trace.key_averages()
        cost = {event: getattr(event, "self_device_time_total" if cuda else "self_cpu_time_total") / 1000.0 / steps
                for event in averages}
        lines.append(f"\n{name}, {setting.dtype}, dropout {setting.dropout}: {sum(cost.values()):.1f} ms per step in operators")
        for event in sorted(cost, key=lambda event: -cost[event])[:top]:
            lines.append(f"  {cost[event]:9.2f} ms {event.count // steps:6d} calls  {event.key[:60]}")
    return "\n".join(lines)


# --- the report ---

HEADER = f"{'dtype':8}{'dropout':>8}  {'engine':23}{'ms':>9}{'tokens/s':>11}{'GEMM':>6}   {'time / ours (quartiles)':24}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of one block."""
    for row in rows:
        middle, low, high = row.speed_ratio
        ratio = "" if row.engine == OURS else f"{middle:.2f} ({low:.2f}-{high:.2f})"
        yield (f"{row.dtype:8}{row.dropout:8.1f}  {row.engine:23}{row.ms:9.1f}{row.tokens_per_second:11.0f}"
               f"{row.gemm_fraction:6.0%}   {ratio:24}").rstrip()


def device_name(device: torch.device) -> str:
    """What a reader needs to know of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def available_peers(wanted: str) -> list[str]:
    """The peers to run: "auto" is transformers, or plain PyTorch where it is missing."""
    if wanted != "auto":
        return [wanted] if wanted != "both" else list(PEERS)
    try:
        import transformers  # noqa: F401
    except ImportError:
        return ["plain"]
    return ["transformers"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="step_time.py", description="Times a training step beside other GPTs.",
                                     allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ..")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--peer", choices=["auto", "both", *PEERS], default="auto", help="auto: transformers if it is there")
    parser.add_argument("--preset", choices=list(PRESETS), default="small")
    for field in Shape.__dataclass_fields__:
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, help="instead of the preset's")
    parser.add_argument("--repeats", type=int, default=15, help="rounds, in each of which every engine is timed once")
    parser.add_argument("--steps-per-round", type=int, help="steps between two looks at the clock (1 on CPU, 5 on CUDA)")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice if not given")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                        help="cpu: processor time, for a machine that others use too; needs --threads 1 and the CPU")
    parser.add_argument("--json", metavar="FILE", help="also write settings and every sample")
    parser.add_argument("--profile", action="store_true", help="also print each engine's most expensive operators")
    args = parser.parse_args(argv)
    args.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if args.clock == "cpu" and (args.threads != 1 or args.device.type != "cpu"):
        parser.error("--clock cpu reads one thread's processor time: it needs --threads 1 and --device cpu")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0."""
    args = parse(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device: torch.device = args.device
    chosen = {field: getattr(args, field) for field in Shape.__dataclass_fields__ if getattr(args, field) is not None}
    shape = Shape(**{**asdict(PRESETS[args.preset]), **chosen})
    clock = Clock(device=device, kind=args.clock, steps=args.steps_per_round or (5 if device.type == "cuda" else 1))
    peers = available_peers(args.peer)
    print(f"{device_name(device)}, {torch.get_num_threads()} CPU thread(s), torch {torch.__version__}, {clock.kind} time, "
          f"medians of {args.repeats} rounds\n{', '.join(f'{name} {value}' for name, value in asdict(shape).items())}\n\n{HEADER}", flush=True)
    results, profiles = [], []
    for dtype in args.dtype:
        for dropout in args.dropout:
            setting = Setting(shape=shape, device=device, dtype=dtype, dropout=dropout)
            engines = build_engines(setting, peers)
            rows = measure(setting, engines, clock, rounds=args.repeats)
            print(*table(rows), f"{'':18}matmuls alone: {rows[0].gemm_tflops:.3g} TFLOP/s", sep="\n", flush=True)
            results += [asdict(row) for row in rows]
            if args.profile:
                profiles.append(profile(setting, engines))
    print(*profiles, sep="\n")
    if args.json:
        report = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                  "device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__, "cuda": torch.version.cuda,
                  "shape": asdict(shape), "rounds": args.repeats, "steps_per_round": clock.steps, "clock": clock.kind,
                  "rows": results}
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
