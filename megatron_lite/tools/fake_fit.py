"""Fits a model of transformers on fake tensors, which have sizes and no memory.

One rank of several runs in torch's "fake" process group, whose collectives move nothing. Under
FSDP2 its weights, gradients and optimizer states are those of the real `fully_shard`, and so are
the weights that are gathered at the peak.
"""

import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import flop_registry

from megatron_lite.config.checks import InputError, as_list, quoted
from megatron_lite.fit.fitting import Fit, fitted
from megatron_lite.fit.gauges import Reading
from megatron_lite.fit.layers import layer_lists
from megatron_lite.fit.measurement import Measurement
from megatron_lite.fit.step import Step
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.step_meter import SimulatedTensors, StepMeter
from megatron_lite.parallel.torch_internals import (
    FakeTensor,
    NeedsSizes,
    NeedsValues,
    fake_store,
    grouped_operator,
)
from megatron_lite.plan.hardware import Hardware
from megatron_lite.recompute.contents import tensors_of

from .fit import FitSettings
from .stand_ins import StandIns

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ATEN = torch.ops.aten
DEVICE = torch.ops.prim.device.default
# They make known values, if no tensor is among their arguments.
MAKE_KNOWN = ATEN.arange, ATEN.linspace, ATEN.full, ATEN.zeros, ATEN.ones, ATEN.scalar_tensor
EMPTY = ATEN.empty.memory_format
MOST_INTEGERS, MOST_FLOATS = 1 << 16, 1 << 10  # of a tensor
SAMPLES, FRAMES = 1000, 6  # of the sound of one token of text, 1/16 s
INSTEAD = "call fit_memory_ with a batch of your own"
LONGEST_REASON = 240  # characters
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}


class FakeGauge(StepMeter):
    """Reads fake tensors. An operator is taken to last as long as its arithmetic, or as its tensors
    need to pass through memory.

    flops, bandwidth: per second, of the machine.
    """

    def __init__(
        self, held: Callable[[], int] = int, *, flops: float = 5e14, bandwidth: float = 2.5e12
    ) -> None:
        super().__init__()
        self._held, self._seconds, self._flops, self._bandwidth = held(), 0.0, flops, bandwidth
        self.readings: list[Reading] = []

    def mark(self) -> None:
        """Reads the sum of the storages."""
        self.total_bytes()  # FSDP2 frees storages without an operator
        now, peak = self._held + self._total, self._held + self.peak_bytes
        self.readings.append(Reading(now, peak, int(self._seconds * 1e9)))
        self.peak_bytes = self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # it reads the device of a fake tensor
            return args[0].fake_device if func is DEVICE else func(*args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            moved = sum(each.nbytes for each in tensors_of((args, kwargs, result)))
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            self._seconds += max(flops / self._flops, moved / self._bandwidth)
        return result

    after = LiveStorages.after  # compares the sum with the peak


class SimulatedValues(SimulatedTensors):
    """Fake tensors of which small ones have values, so that a forward may decide by them: by the
    sizes of images, or by a mask. A model may drop layers at rates from a range.

    assumes: whether unknown values counted. A mask of them selects all, a floating-point number is
        equal to no given one, and a truth is false.
    """

    assumes = _is_inside = False

    def may_turn_const(self, t: Tensor) -> bool:
        """Tells torch's mode whether a result keeps its value."""
        return super().may_turn_const(t) or (_is_known(t) and type(t) is Tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is grouped_operator and args[0].dtype != torch.bfloat16:
            # Torch knows the shapes of bf16 alone.
            halves = [one.bfloat16() for one in args[:2]]
            return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
        is_inside, self._is_inside = self._is_inside, True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (NeedsSizes, NeedsValues) as error:  # a mask of unknown values
            (mask, *_), self.assumes = args, True
            if isinstance(error, NeedsValues) and mask.dtype == torch.bool:
                return False
            if func is not ATEN.nonzero.default:
                raise
            with self:
                return torch.zeros(mask.numel(), mask.dim(), dtype=torch.int64)
        finally:
            self._is_inside = is_inside
        # What an operator is made of, such as softmax with a mask, decides nothing by values.
        is_test = func is ATEN.eq.Scalar and args[0].is_floating_point() and not is_inside
        if is_test and result.constant is None:
            self.assumes = True
            result.constant = torch.zeros((), dtype=torch.bool).expand(result.shape)
            self.fake_tensor_converter.add_constant_storage_mapping(result)
        # Indices are made of an empty tensor and filled later.
        is_index = func is EMPTY and not result.is_floating_point()
        makes_known = func.overloadpacket in MAKE_KNOWN and not tensors_of((args, kwargs))
        if (makes_known or is_index) and _is_known(result):
            value = func(*args, **kwargs)  # no mode is active here
            value = value.zero_() if is_index else value
            return self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)
        return result


def _is_known(tensor: Tensor) -> bool:
    return tensor.numel() <= (MOST_FLOATS if tensor.is_floating_point() else MOST_INTEGERS)


class LowRank(nn.Module):
    """A frozen linear layer and its trainable adapter of low rank (LoRA, 2106.09685)."""

    def __init__(self, linear: Any, rank: int) -> None:
        super().__init__()
        dtype, sizes = linear.weight.dtype, linear.weight.shape
        width, given = sizes if isinstance(linear, nn.Linear) else sizes[::-1]
        self.linear = linear
        self.down = nn.Linear(given, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, width, bias=False, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """The weight of the layer, of which T5 reads the type."""
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the sum of both."""
        return self.linear(hidden) + self.up(self.down(hidden))


def fit_config(config: Any, hardware: Hardware, budget: int | None, given: FitSettings) -> Fit:
    """Returns the fit of a model of transformers on one of several data-parallel ranks.

    config: the parsed config.json.
    given: with `fsdp` each layer is a unit of FSDP2, and the model holds the rest. Otherwise the
        model is under DDP, which has buckets as large as the gradients beside them.
    Raises ValueError if no policy fits, or if the model cannot be built or run.
    """
    dtype = DTYPES[given.dtype]
    rates = hardware.matmuls(dtype.itemsize)
    gauge = partial(
        FakeGauge,
        flops=rates.peak_flops * rates.max_efficiency,
        bandwidth=hardware.memory_bandwidth * hardware.memory_efficiency,
    )
    # Checks of transformers read values, such as that of image tokens.
    unchecked = patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1")
    # A mask of ones that a model makes itself (BART) is known, and left out as in a real step.
    known = patch("transformers.masking_utils.is_tracing", lambda *_: False, create=True)
    # Torch's own copy reads memory, which there is not, and its exchange refuses weak references.
    copies = patch.object(FakeTensor, "__deepcopy__", _copied, create=True)
    casts = patch("torch.utils.swap_tensors", _become)
    with _ranks(given.gpus) as mesh, SimulatedValues() as values, unchecked, known, copies, casts:
        model = _model(config, dtype)
        if rank := given.trainable.partition(":")[2]:
            add_adapters_(model, int(rank))
        lists = layer_lists(model, None)
        layers = [*dict.fromkeys(chain.from_iterable(lists.values()))]
        trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
        optimizer = OPTIMIZERS[given.optimizer]

        def step() -> None:
            _loss(model(**batch)).backward()  # the logits are not held meanwhile

        try:
            batch = _inputs(model, given, dtype)
            forward = Step(model, layers, lambda: _loss(model(**batch)))
            try:
                forward.run(gauge())
            except NeedsValues:
                raise
            except Exception:  # perhaps of a cache of keys
                model.config.get_text_config().use_cache = model.config.use_cache = False
                forward.run(gauge())
            kinds = forward.sharing.kinds()
            around = StandIns({**kinds})
            if given.fsdp:
                shard_(model.to(dtype), layers, mesh)  # FSDP2 refuses units of two types
                # In its first step FSDP2 learns the order of its units.
                first = Step(model, layers, step)
                around(first, gauge, {})
            measured = Measurement(
                model,
                lists,
                step,
                # Without a choice torch updates all tensors of a GPU at once, which takes memory.
                optimizer and partial(optimizer, foreach=hardware.device == "cuda"),
                gauge,
                buckets=0 if given.fsdp or given.gpus == 1 else trained,
                around=around,
                kinds=kinds,
            )
        except InputError:
            raise
        except Exception as error:  # what a model needs beyond a batch of its usual kind
            length = given.seq_length
            most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            why = ", because its forward decides by values" * isinstance(error, NeedsValues)
            if length > (most or length):
                why = f", perhaps because it has {most} positions and --seq-length is {length}"
            raise InputError(
                f"{type(model).__name__} cannot run on fake tensors{why} ({_reason(error)}): "
                f"{INSTEAD}"
            ) from error
        measured.notes.append(
            f"batch: {', '.join(f'{name} {tuple(one.shape)}' for name, one in batch.items())}"
        )
        if config.get("quantization_config"):
            measured.notes.append(
                f"note: quantization_config is left out, so all weights count as {given.dtype}"
            )
        if values.assumes:
            measured.notes.append(
                "note: the step decides by values, which fake tensors have not. A mask is taken to "
                "select all, and a question to be answered by no, so a real step may differ"
            )
        return fitted(measured, budget)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = f"{text[: LONGEST_REASON // 2]} ... {text[-LONGEST_REASON // 2 :]}"
    return f"{type(error).__name__}: {text}"


def shard_(model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Shards a model over ranks with FSDP2: each layer is a unit, and the model holds the rest."""
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def add_adapters_(model: nn.Module, rank: int) -> None:
    """Freezes a model, and puts adapters on the linear layers inside its repeated layers."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    model.requires_grad_(False)
    layers = chain.from_iterable(layer_lists(model, None).values())
    for module in [module for layer in layers for module in layer.modules()]:
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.Linear, Conv1D)) and not isinstance(module, LowRank):
                setattr(module, name, LowRank(child, rank))


@contextmanager
def _ranks(number: int) -> Iterator[DeviceMesh]:
    """Makes this process rank 0 of `number` ranks that do not exist, and yields their mesh."""
    dist.init_process_group("fake", store=fake_store()(), rank=0, world_size=number)
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        dist.destroy_process_group()


def _model(config: Any, dtype: torch.dtype) -> Any:
    import transformers
    from transformers.initialization import no_init_weights

    name = str(as_list(config.get("architectures") or [""], "architectures")[0])
    # Its later versions write Infinity as an object.
    decoded = getattr(transformers.PretrainedConfig, "_decode_special_floats", lambda it: it)
    try:
        parsed = transformers.AutoConfig.for_model(**decoded(config))
        for part in (parsed, *vars(parsed).values()):
            # A step in which chance drops no layer takes the most.
            for drop in [one for one in getattr(part, "__dict__", ()) if one.endswith("layerdrop")]:
                setattr(part, drop, 0.0)
        family = getattr(transformers, name, None)
        # Some configurations are of a model with another name (EXAONE 3 is a Llama).
        kind = getattr(transformers, f"AutoModel{name[name.find('For') :]}", None)
        build = None
        if isinstance(family, type) and issubclass(family, transformers.PreTrainedModel):
            build = family._from_config
        elif not family and kind:
            build = kind.from_config
        if build:
            with no_init_weights():
                model = build(parsed, dtype=dtype)
            model.tie_weights()  # a part of the initialization
            return model.train()
    except Exception as error:  # the library checks few values before it computes with them
        raise InputError(f"transformers cannot build this model: {_reason(error)}") from error
    raise InputError(
        f"architectures: {quoted(name)} is no model of transformers: name one, such as "
        "LlamaForCausalLM"
    )


def _become(tensor: Any, other: Any) -> None:
    """Gives a fake tensor the type of another one, and its value if that is known."""
    tensor.data, tensor.constant = other.data, other.constant


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy of a fake tensor."""
    if id(tensor) not in memo:
        kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor.requires_grad_
        memo[id(tensor)] = kind(tensor.detach().clone(), tensor.requires_grad)
    return memo[id(tensor)]


def _inputs(model: Any, given: FitSettings, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a batch: token ids of text, and images and sound as large as the model takes.

    If the model takes sound of any length, --seq-length is that of the sound. An input that the
    forward does not name is left out.
    """
    config, main = model.config, model.main_input_name
    accepted = inspect.signature(model.forward).parameters
    batch, length = given.micro_batch_size, given.seq_length
    inputs = _images(model, accepted, given, dtype)
    image_tokens = inputs.pop("image_tokens", 0)
    sound: Any = getattr(config, "audio_config", getattr(config, "encoder_config", config))
    bins = getattr(sound, "num_mel_bins", None)
    # the width of a spectrum whose frames are --seq-length
    width = getattr(sound, "input_feat_per_channel", bins)
    width = getattr(sound, "feature_projection_input_dim", getattr(sound, "input_dim", width))
    unit, rate = "tokens", 1
    if bins and hasattr(sound, "max_source_positions") and "input_features" in accepted:
        frames = 2 * sound.max_source_positions  # Whisper's first convolutions halve them
        inputs["input_features"] = torch.zeros(batch, bins, frames, dtype=dtype)
        mask = torch.ones(batch, frames, dtype=torch.int64)
        inputs |= dict.fromkeys(("feature_attention_mask", "input_features_mask"), mask)
    elif main == "input_features" and width:
        inputs[main] = torch.zeros(batch, length, width, dtype=dtype)
        unit, rate = "frames of sound", FRAMES
    elif main == "input_values":
        length = getattr(config, "max_length", length)  # of a spectrum
        inputs[main] = torch.zeros(batch, length, *[bins] if bins else (), dtype=dtype)
        unit, rate = "samples of sound", SAMPLES
    elif main not in ("input_ids", *inputs):
        raise InputError(
            f"{type(model).__name__} reads {main}: only token ids, images, samples of sound and "
            f"spectra are made here; {INSTEAD}"
        )
    is_text = not accepted.keys().isdisjoint(("input_ids", "decoder_input_ids"))
    if length <= image_tokens and (is_text or main != "pixel_values"):
        least = f"{image_tokens + 1}, since an image takes {image_tokens}" if image_tokens else "1"
        raise InputError(f"--seq-length must be at least {least} (got {length}): give the {unit}")
    if is_text:
        numbers = torch.arange(math.ceil(length / rate))
        # Some models tell images by their number of tokens, and sound by two in a row.
        token = config.image_token_id if image_tokens else getattr(config, "audio_token_id", None)
        is_other = (numbers < (image_tokens or 2)).long().repeat(batch, 1)
        ids = is_other * (token or 0)
        if image_tokens:
            inputs["mm_token_type_ids"] = is_other
            if any(hasattr(one, "get_rope_index") for one in model.modules()):
                inputs["position_ids"] = numbers.repeat(3, batch, 1)  # of time, height, width
        query = getattr(config, "qformer_config", None)  # of InstructBLIP, with a text of its own
        inputs["qformer_input_ids"] = ids[:, : getattr(query, "max_position_embeddings", None)]
        inputs |= dict.fromkeys(("input_ids", "labels"), ids)
        if type(model).__name__.endswith("ForSequenceClassification"):  # one label for each sample
            inputs["labels"] = ids[:, 0].to(dtype if config.num_labels == 1 else ids.dtype)
    return {name: one for name, one in inputs.items() if name in accepted}


def _images(
    model: Any, accepted: Collection[str], given: FitSettings, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns an image for each sample, and its tokens if they are apart from those of the text.

    accepted: the names of what the forward takes.
    """
    config, batch = model.config, given.micro_batch_size
    is_vision = model.main_input_name == "pixel_values"
    vision: Any = getattr(config, "vision_config", config if is_vision else None)
    own: Any = getattr(vision, "image_size", None)
    sizes: Any = given.image_size or own
    if vision is None:
        if sizes:
            name = type(model).__name__
            raise InputError(f"{name} reads no images: leave --image-size out")
        return {}
    channels: int = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    if "spatial_shapes" in accepted:  # Siglip 2 gets patches, as many as it has places for
        side = int(vision.num_patches**0.5)
        numbers = channels * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(batch, side**2, numbers, dtype=dtype),
            "pixel_attention_mask": torch.ones(batch, side**2, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[side, side]] * batch),
        }
    if not sizes:
        raise InputError(
            f"{type(model).__name__} reads images of any size: give --image-size, the pixels of a "
            "side"
        )
    height, width = (sizes, sizes) if isinstance(sizes, int) else sizes
    if "image_grid_thw" in accepted:  # Qwen2-VL and what descends from it
        merge = getattr(vision, "spatial_merge_size", 1)
        side = max(1, height // (vision.patch_size * merge)) * merge
        frames, patch_size = getattr(vision, "temporal_patch_size", 1), vision.patch_size
        shape = [channels, patch_size, patch_size]  # of a patch, if a convolution reads it
        if frames > 1 or not any(isinstance(each, nn.Conv2d) for each in model.modules()):
            shape = [frames * math.prod(shape)]
        return {
            "pixel_values": torch.zeros(batch * side**2, *shape, dtype=dtype),
            "image_grid_thw": torch.tensor([[1, side, side]] * batch),
            "image_merge_sizes": torch.tensor([merge] * batch),
            "image_tokens": (side // merge) ** 2,
        }
    inputs, grids = {}, getattr(config, "image_grid_pinpoints", None)
    if grids or vision.model_type == "pixtral":
        inputs["image_sizes"] = torch.tensor([[height, width]] * batch)
    shape = [batch, channels, height, width]
    if tiles := getattr(vision, "max_num_tiles", 0):  # Llama 3.2 fills up to so many
        shape[1:1] = 1, tiles
        inputs["aspect_ratio_ids"] = torch.ones(batch, 1, dtype=torch.int64)
        inputs["aspect_ratio_mask"] = torch.ones(batch, 1, tiles, dtype=torch.int64)
    elif grids:  # LLaVA-NeXT cuts an image
        from transformers.models.llava_next import modeling_llava_next as cuts

        shape[1:] = cuts.image_size_to_num_patches((height, width), grids, own), shape[1], own, own
    elif "pixel_attention_mask" in accepted:  # Idefics has several images for a sample
        shape[1:1] = [1]
    return inputs | {"pixel_values": torch.zeros(shape, dtype=dtype)}


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return output[0].float().mean() if loss is None else loss
