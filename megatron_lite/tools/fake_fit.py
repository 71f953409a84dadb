"""Fits a model of transformers on fake tensors, which have sizes and no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.checks import InputError
from megatron_lite.config.plain import shown
from megatron_lite.fit.gauges import FakeGauge
from megatron_lite.fit.layers import layer_lists
from megatron_lite.fit.measurement import Measurement
from megatron_lite.fit.memory_fit import Fit, fitted
from megatron_lite.parallel.torch_internals import FakeTensorMode
from megatron_lite.plan.hardware import Hardware

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}


class LowRank(nn.Module):
    """A frozen linear layer and its trainable adapter of low rank (LoRA, 2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        dtype = linear.weight.dtype
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, linear.out_features, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the sum of both."""
        return self.linear(hidden) + self.up(self.down(hidden))


def fit_config(
    config: Any,
    hardware: Hardware,
    budget: int | None,
    *,
    seq_length: int,
    micro_batch_size: int = 1,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    lora_rank: int = 0,
) -> Fit:
    """Returns the fit of a model of transformers, on fake tensors.

    config: the parsed config.json. dtype, optimizer: keys of the tables above.
    lora_rank: 0 trains all parameters.
    Raises ValueError if no policy fits, or if the model cannot be built or run.
    """
    device = torch.device("cpu")

    def gauge(device: torch.device, held: int) -> FakeGauge:
        made = FakeGauge(device, held)
        rates = hardware.matmuls(DTYPES[dtype].itemsize)
        made.flops = rates.peak_flops * rates.max_efficiency
        made.bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
        return made

    with FakeTensorMode():
        model = _model(config, DTYPES[dtype])
        if lora_rank:
            add_adapters_(model, lora_rank)
        given = _inputs(model, micro_batch_size, seq_length, DTYPES[dtype])

        def step() -> None:
            _loss(model(**given)).backward()  # the logits are not held meanwhile

        measured = Measurement(
            model,
            layer_lists(model, None),
            step,
            OPTIMIZERS[optimizer],
            device,
            gauge,
            has_values=False,
        )
        return fitted(model, measured, budget)


def add_adapters_(model: nn.Module, rank: int) -> None:
    """Freezes a model, and puts adapters on the linear layers inside its repeated layers."""
    model.requires_grad_(False)
    layers = [layer for one in layer_lists(model, None) for layer in one.layers]
    for layer in layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(module, LowRank):
                    setattr(module, name, LowRank(child, rank))


def _model(config: Any, dtype: torch.dtype) -> Any:
    import transformers

    try:
        parsed = transformers.AutoConfig.for_model(**config)
        name = (parsed.architectures or [""])[0]
        family = getattr(transformers, name, None)
        if isinstance(family, type) and issubclass(family, transformers.PreTrainedModel):
            return family._from_config(parsed, dtype=dtype).train()
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"transformers cannot build this model: {shown(str(error))}") from error
    raise InputError(f"architectures: {shown(repr(name))} is no model of transformers: name one")


def _inputs(model: Any, batch: int, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    if model.main_input_name == "pixel_values":
        sides, config = model.config.image_size, model.config
        height, width = (sides, sides) if isinstance(sides, int) else sides
        return {"pixel_values": torch.zeros(batch, config.num_channels, height, width, dtype=dtype)}
    if model.main_input_name != "input_ids":
        raise InputError(
            f"the model reads {model.main_input_name}: only token ids and images are made here; "
            "call fit_memory_ with a batch of your own"
        )
    if length < 1:
        raise InputError(f"--seq-length must be at least 1 (got {length}): give the tokens")
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def _loss(output: Any) -> Tensor:
    loss: Tensor | None = getattr(output, "loss", None)
    return output[0].float().mean() if loss is None else loss
