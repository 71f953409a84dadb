"""`megatron-lite fit` against the real step, and its faults."""

import json
from copy import deepcopy
from functools import partial, wraps
from itertools import product

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from megatron_lite.__main__ import main
from megatron_lite.api import fit_memory_
from megatron_lite.fit.layers import layer_lists
from megatron_lite.fit.measurement import Measurement
from megatron_lite.plan.hardware import load_hardware
from megatron_lite.tools.fake_fit import (
    FakeGauge,
    SimulatedValues,
    add_adapters_,
    fit_config,
    shard_,
)
from megatron_lite.tools.fit import FitSettings
from megatron_lite.tools.stand_ins import StandIns
from tests.support.ranks import run_ranks

LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=200, num_hidden_layers=2,
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
)  # fmt: skip
# A step on fake tensors takes as long as it has operators.
SHALLOW = dict(LLAMA, num_hidden_layers=1)
MIXTRAL = dict(
    SHALLOW, model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=2,
)  # fmt: skip
T5 = dict(
    model_type="t5", architectures=["T5ForConditionalGeneration"], vocab_size=200, num_layers=1,
    d_model=64, d_kv=16, d_ff=128, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
)  # fmt: skip

GPT2 = dict(
    model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=200, n_embd=64, n_layer=2,
    n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
BERT = dict(
    model_type="bert", architectures=["BertForMaskedLM"], vocab_size=200, hidden_size=32,
    num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
)  # fmt: skip
LONGFORMER = dict(  # it asks whether a token attends to all others
    BERT, model_type="longformer", architectures=["LongformerForMaskedLM"], attention_window=16
)
DEEPSTACK = dict(
    model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"],
    text_config=dict(
        LLAMA, model_type="qwen3_vl_text", num_hidden_layers=6,
        rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]},
    ),
    vision_config=dict(
        model_type="qwen3_vl", depth=6, hidden_size=32, num_heads=4, intermediate_size=48,
        patch_size=14, num_position_embeddings=16, out_hidden_size=64, deepstack_visual_indexes=[3],
    ),
)  # fmt: skip
BART = dict(
    model_type="bart", architectures=["BartForConditionalGeneration"], vocab_size=200, d_model=32,
    encoder_layers=2, decoder_layers=2,
)  # fmt: skip
AT_ONCE = partial(torch.optim.AdamW, foreach=True)


def fit_of(config, budget=None, **settings):
    settings = FitSettings(hf_config="model", gpu="h100", **settings)
    return fit_config(config, load_hardware("h100"), budget, settings)


def step_of(model, length):
    ids = torch.arange(2 * length).reshape(2, length) % 200
    return lambda: model(input_ids=ids, labels=ids).loss.backward()


def command(folder, config, *words):
    """Runs the command, which reads the configuration in the folder. Returns its status."""
    (folder / "config.json").write_text(json.dumps(config))
    return main(["fit", "--hf-config", str(folder), "--gpu", "h100", "--seq-length", "16", *words])


@pytest.mark.runs
@pytest.mark.parametrize(
    "config, rank, length",
    # In a short step the peak is the update, which on a GPU is of all tensors at once.
    [
        (SHALLOW, 4, 128),
        (LLAMA, 0, 128),
        (SHALLOW, 0, 4),
        (MIXTRAL, 0, 128),
        (T5, 0, 128),
        (LONGFORMER, 0, 128),
        (BART, 0, 128),
        (T5, 4, 128),  # it reads the weights
        (GPT2, 4, 128),  # it has them transposed
    ],
)
def test_fake_tensors_give_the_peak_of_the_real_step(config, rank, length):
    parsed = transformers.AutoConfig.for_model(**config)
    model = getattr(transformers, config["architectures"][0])(parsed).train()
    if rank:
        add_adapters_(model, rank)
    trainable = f"lora:{rank}" if rank else "all"
    whole = fit_memory_(model, None, step=step_of(model, length), optimizer=AT_ONCE)
    whole.remove()
    budget = int((0.95 if length > 4 else 1) * whole.measured)
    fitted = fit_of(
        config, budget, seq_length=length, micro_batch_size=2, dtype="fp32", trainable=trainable
    )
    # the states of random generators, 5 KB a layer, are some per cent of so small a T5
    rel = 0.01 if config is T5 else 0.001
    assert fitted.plain.peak == pytest.approx(whole.measured, rel=rel)
    assert fitted.measured <= budget
    assert fitted.plan.peak == pytest.approx(fitted.measured, rel=1e-4)
    says = any("decides by values" in note for note in fitted.notes)
    assert says == (config is LONGFORMER)


def sharded(rank, world_size):
    """Returns the peak of a real step of two ranks, without the copies inside of gloo."""
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**LLAMA)).train()
    lists = layer_lists(model, None)
    shard_(model, lists["model.layers"], init_device_mesh("cpu", (world_size,)))
    return Measurement(model, lists, step_of(model, 64), AT_ONCE, FakeGauge).peak()


@pytest.mark.usefixtures("two_actions")
def test_fsdp_on_fake_tensors_is_that_of_two_real_ranks():
    first, second = run_ranks(sharded, 2)
    fake = fit_of(LLAMA, seq_length=64, micro_batch_size=2, dtype="fp32", gpus=2, fsdp=True)
    assert first == second == fake.measured
    assert fake.plan.peak == pytest.approx(fake.measured, rel=0.01)


VISION = dict(
    model_type="clip_vision_model", hidden_size=32, intermediate_size=48, patch_size=8,
    num_hidden_layers=2, num_attention_heads=4, image_size=32,
)  # fmt: skip
WHISPER = dict(
    model_type="whisper", architectures=["WhisperForConditionalGeneration"], d_model=32,
    encoder_layers=2, decoder_layers=2, vocab_size=99, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=20,
    max_source_positions=50, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)  # fmt: skip


def with_towers(name, architecture, **settings):
    """Returns the configuration of a language model that reads something else too."""
    return dict(model_type=name, architectures=[architecture], text_config={**LLAMA}, **settings)


@pytest.mark.usefixtures("two_actions")
@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "config, names",
    [
        (  # it cuts an image
            with_towers(
                "llava_next", "LlavaNextForConditionalGeneration", vision_config=VISION,
                image_grid_pinpoints=[[32, 64]],
            ),
            {"pixel_values": (1, 3, 3, 32, 32)},
        ),
        (  # it asks which images of a sample are not empty
            with_towers(
                "idefics3", "Idefics3ForConditionalGeneration", scale_factor=2, pad_token_id=0,
                vision_config={**VISION, "model_type": "idefics3_vision"},
            ),
            {"pixel_values": (1, 1, 3, 32, 32)},
        ),
        (  # it reads the instruction twice
            dict(
                model_type="instructblip", num_query_tokens=8, image_token_index=9,
                architectures=["InstructBlipForConditionalGeneration"], text_config=LLAMA,
                vision_config=dict(VISION, model_type="instructblip_vision_model"),
                qformer_config=dict(
                    BERT, model_type="instructblip_qformer", max_position_embeddings=24
                ),
            ),
            {"pixel_values": (1, 3, 32, 32), "qformer_input_ids": (1, 24)},
        ),
        (  # it takes patches of images of any shape
            dict(
                model_type="siglip2", architectures=["Siglip2Model"],
                text_config=dict(BERT, model_type="siglip2_text_model"),
                vision_config=dict(VISION, model_type="siglip2_vision_model", num_patches=16),
            ),
            {"pixel_values": (1, 16, 192), "spatial_shapes": (1, 2)},
        ),
        (
            with_towers(
                "qwen2_audio", "Qwen2AudioForConditionalGeneration", audio_token_index=9,
                audio_config={**WHISPER, "model_type": "qwen2_audio_encoder"},
            ),
            {"input_features": (1, 20, 100)},
        ),
        (  # it fills an empty tensor with places
            dict(
                model_type="qwen2_5_omni_thinker", image_token_id=9, audio_token_id=8,
                architectures=["Qwen2_5OmniThinkerForConditionalGeneration"],
                text_config=dict(
                    DEEPSTACK["text_config"], model_type="qwen2_5_omni_text", num_hidden_layers=2
                ),
                vision_config=dict(
                    model_type="qwen2_5_omni_vision_encoder", depth=2, hidden_size=32, num_heads=4,
                    intermediate_size=48, out_hidden_size=64, window_size=56,
                ),
                audio_config=dict(
                    WHISPER, model_type="qwen2_5_omni_audio_encoder", n_window=10, output_dim=64
                ),
            ),
            {"pixel_values": (16, 1176)},
        ),
        (  # a convolution reads its patches
            with_towers(
                "paddleocr_vl", "PaddleOCRVLForConditionalGeneration", image_token_id=9,
                vision_config={**VISION, "model_type": "paddleocr_vl_vision"},
            ),
            {"pixel_values": (36, 3, 8, 8)},
        ),
        (WHISPER, {"input_features": (1, 20, 100)}),
        (
            dict(
                model_type="speech_to_text", architectures=["Speech2TextForConditionalGeneration"],
                d_model=32, encoder_layers=2, decoder_layers=2, decoder_start_token_id=0,
            ),
            {"input_features": (1, 32, 80), "labels": (1, 6)},
        ),
        (  # it drops blocks at rates from a range, and no block of its first stage is repeated
            dict(
                model_type="swinv2", architectures=["Swinv2ForImageClassification"], image_size=32,
                embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4,
            ),
            {"pixel_values": (1, 3, 32, 32)},
        ),
    ],
    # A cut image, images, an instruction, patches, sound and text, sound and images, convolved
    # patches, speech, frames, stages.
)  # fmt: skip
def test_images_and_spectra_are_made_as_the_configuration_says(config, names):
    images = 56 if "image_token_id" in config else 0
    fit = fit_of(config, seq_length=32, image_size=images)
    assert len(fit.policies) >= 2 and not any("does not run" in note for note in fit.notes)
    assert fit.plan.peak == pytest.approx(fit.measured, rel=0.01)
    selects = any("decides by values" in note for note in fit.notes)
    assert selects or config["model_type"] != "idefics3"
    (line,) = [note for note in fit.notes if note.startswith("batch: ")]
    assert all(f"{name} {shape}" in line for name, shape in names.items())


@pytest.mark.usefixtures("two_actions")
def test_a_model_may_have_another_name_copy_tensors_and_cast_its_parts(monkeypatch):
    kind = transformers.LlamaForCausalLM
    build, run = kind._from_config, kind.forward

    def made(*args, **_):
        model = deepcopy(build(*args))
        model.model.layers[0].mlp.half()
        return model

    monkeypatch.setattr(kind, "_from_config", made)
    copying = wraps(run)(lambda model, **inputs: run(model, **deepcopy(inputs)))
    monkeypatch.setattr(kind, "forward", copying)
    config = dict(LLAMA, architectures=["ExaoneForCausalLM"])
    fit_of(config, seq_length=32, gpus=2, fsdp=True)


@pytest.mark.usefixtures("two_actions")
def test_a_sample_has_one_label_where_whole_texts_are_classified():
    config = dict(BERT, architectures=["BertForSequenceClassification"], id2label={0: "reward"})
    assert "labels (1,)" in str(fit_of(config, seq_length=32))


@pytest.mark.usefixtures("two_actions")
def test_what_does_not_run_is_said():
    config = with_towers(
        "gemma4", "Gemma4ForConditionalGeneration", audio_config=dict(num_hidden_layers=1)
    )
    config["text_config"] |= dict(model_type="gemma4_text", head_dim=16, num_hidden_layers=1)
    fit = fit_of(config, seq_length=32)
    assert "note: model.audio_tower.layers does not run in this step" in str(fit)


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize(
    "config, trainable", [*product([LLAMA, MIXTRAL], ["all", "lora:4"]), (DEEPSTACK, "all")]
)
def test_stand_ins_for_alike_layers_change_no_figure(config, trainable, monkeypatch):
    config = {**config, "num_hidden_layers": 6}  # LoRA's first one is like no other
    replaced, odd_ones = 0, []
    images = 56 if config["model_type"] == "qwen3_vl" else 0
    settings = dict(seq_length=32, trainable=trainable, image_size=images)
    complete, candidates = StandIns._complete, ("none", "ops(attention)")

    def noted(self, spans):
        nonlocal replaced
        replaced += len(self._replaced)
        odd_ones.append(complete(self, spans))
        return odd_ones[-1]

    monkeypatch.setattr(StandIns, "_complete", noted)
    monkeypatch.setattr("megatron_lite.fit.measurement.CANDIDATES", candidates)
    quick = fit_of(config, **settings)
    # The merger of images reads some layers of the tower, which no other layer is like.
    assert replaced and sum(map(bool, odd_ones)) == bool(images) and not odd_ones[-1]
    monkeypatch.setattr(StandIns, "__call__", lambda self, step, gauge, actions: step.run(gauge()))
    assert figures(quick) == figures(fit_of(config, **settings))


def test_a_comparison_inside_of_an_operator_decides_nothing():
    with SimulatedValues() as values:
        scores = torch.rand(3, 1009)
        torch.ops.aten._safe_softmax(scores, -1)  # it asks which rows are masked
        assert not values.assumes
        assert not (scores == 0.0).any() and values.assumes


def figures(fit):
    """Returns the options of the layers without their times, and the peaks of plans."""
    options = [one._replace(nanoseconds=0, keeps=len(one.keeps)) for one in fit.plan.choice]
    return options, fit.measured, fit.plan.peak, fit.plain.peak, fit.smaller and fit.smaller.peak


@pytest.mark.usefixtures("two_actions")
def test_a_decoder_without_its_encoder_runs_without_a_cache():
    config = dict(BART, model_type="blenderbot", architectures=["BlenderbotForCausalLM"])
    assert [*fit_of(config, seq_length=16).policies] == ["model.decoder.layers"]


@pytest.mark.usefixtures("two_actions")
@pytest.mark.parametrize("infinity", [float("inf"), {"__float__": "Infinity"}])
def test_files_of_mamba_have_an_infinity(infinity, tmp_path):
    config = dict(
        model_type="mamba2", architectures=["Mamba2ForCausalLM"], hidden_size=32, num_heads=4,
        head_dim=16, state_size=8, n_groups=1, num_hidden_layers=1, vocab_size=99,
        time_step_limit=[0.0, infinity],
    )  # fmt: skip
    assert command(tmp_path, config) == 0


@pytest.mark.usefixtures("two_actions")
def test_the_command_prints_the_verdict_and_the_lines_to_paste(tmp_path, capsys):
    config = dict(SHALLOW, quantization_config={"quant_method": "fp8"})
    assert command(tmp_path, config, "--gpu", "h100-80gb", "--seq-length", "64") == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("fits 75.8")
        and "MemoryBudgetCallback(" in text
        and "a verified call takes more" in text
        and "all weights count as bf16" in text
    )
    assert command(tmp_path, config, "--memory-budget", "9MB") == 0
    assert 'MemoryBudgetCallback("9000000B")' in capsys.readouterr().out
    assert 'apply_policy_(model, layers_fqn="model.layers", policy="*:none")' in text


@pytest.mark.usefixtures("two_actions")
@pytest.mark.parametrize(
    "words, config, text",
    [
        (["--memory-budget", "1KiB"], SHALLOW, "no policy fits. The smallest reachable peak is"),
        (["--gpu", "h900"], LLAMA, "no machine is called 'h900'"),
        (["--trainable", "lora:x"], LLAMA, "--trainable 'lora:x': give all, or lora:16"),
        (["--micro-batch-size", "0"], LLAMA, "--micro-batch-size must be at least 1 (got 0)"),
        (["--image-size", "8"], LLAMA, "LlamaForCausalLM reads no images: leave --image-size out"),
        (["--gpus", "1", "--fsdp"], LLAMA, "--fsdp needs --gpus > 1"),
        (["--memory-budget", "20"], LLAMA, "--memory-budget '20': give a number of bytes"),
        ([], {}, "model_type is missing"),
        ([], {**LLAMA, "num_hidden_layers": 0}, "no policy can save memory: give a model"),
        *(
            ([], {**LLAMA, name: value}, "transformers cannot build this model")
            for name, value in (
                ("hidden_size", -64),
                ("hidden_size", "a"),
                ("num_attention_heads", 0),
                ("model_type", "unheard"),
            )
        ),
        (
            [],
            {**BERT, "max_position_embeddings": 8},
            "because it has 8 positions and --seq-length ",
        ),
        (
            [],
            {**BERT, "architectures": ["BertForMultipleChoice"]},
            "BertForMultipleChoice cannot run on fake tensors (RuntimeError: ",
        ),
        ([], {**LLAMA, "architectures": ["logging"]}, "'logging' is no model of transformers"),
        (
            [],
            dict(model_type="segformer", architectures=["SegformerForImageClassification"]),
            "SegformerForImageClassification reads images of any size: give --image-s",
        ),
    ],
)
def test_a_fault_ends_with_status_2_and_its_reason(words, config, text, tmp_path, capsys):
    assert command(tmp_path, config, *words) == 2
    *progress, line = capsys.readouterr().err.splitlines()
    assert text in line and all(one.startswith("fit_memory_: run ") for one in progress)


def test_a_config_that_is_no_json_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text("root:x:0")
    assert main(["fit", "--hf-config", str(tmp_path), "--gpu", "h100"]) == 2
    assert f"error: {tmp_path}: not JSON (" in capsys.readouterr().err
