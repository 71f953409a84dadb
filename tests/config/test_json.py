"""A run survives JSON unchanged, and JSON that is no run is refused with the place of the fault."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import LrScheduleConfig, OptimizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig

positive = st.integers(1, 9)
rates = st.floats(0.0, 1.0, exclude_max=True)
any_size = st.floats(0.0, 1e6)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Any legal run, near enough: sizes are multiples of what must divide them."""
    tp_size, groups, heads_per_group = draw(st.integers(1, 3)), draw(positive), draw(positive)
    heads, seq_length = tp_size * groups * heads_per_group, tp_size * draw(positive)
    position = draw(st.sampled_from(["learned_absolute", "rope", "none"]))
    by_samples, lr = draw(st.booleans()), draw(any_size)
    unit = "samples" if by_samples else "iters"
    style = draw(st.sampled_from(["constant", "linear", "cosine", "inverse-square-root", "WSD"]))
    wsd = {f"lr_wsd_decay_{unit}": draw(positive)} if style == "WSD" else {}
    warmup = draw(
        st.sampled_from([{}, {f"lr_warmup_{unit}": 5}, {"lr_warmup_fraction": draw(rates)}])
    )
    load, save = draw(maybe(st.text(min_size=1))), draw(maybe(st.text(min_size=1)))
    grouped = draw(st.booleans())
    return RunConfig(
        model=ModelConfig(
            num_layers=draw(positive),
            hidden_size=64 * heads,
            num_attention_heads=heads,
            max_position_embeddings=seq_length + draw(st.integers(0, 3)),
            swiglu=draw(st.booleans()),
            ffn_hidden_size=64 * tp_size * draw(positive),
            kv_channels=draw(maybe(st.just(8))),
            group_query_attention=grouped,
            num_query_groups=tp_size * groups if grouped else 1,
            position_embedding_type=position,
            bias_gelu_fusion=draw(st.booleans()),
            hidden_dropout=draw(rates),
            norm_epsilon=draw(any_size),
        ),
        training=TrainingConfig(
            micro_batch_size=2,
            global_batch_size=8,
            rampup_batch_size=draw(st.sampled_from([(), (4, 2, 9)])),
            train_samples=draw(positive) if by_samples else None,
            train_iters=None if by_samples else draw(maybe(positive)),
            bf16=draw(st.booleans()),
            eval_interval=draw(maybe(positive)),
        ),
        data=DataConfig(
            seq_length=seq_length,
            data_path=tuple(draw(st.lists(st.text(), max_size=3))),
            split=draw(st.text()),
        ),
        tokenizer=draw(
            st.sampled_from(
                [
                    TokenizerConfig(vocab_size=99),
                    TokenizerConfig(vocab_file="v", merge_file="m"),
                    TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model='é\n"'),
                ]
            )
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp_size, sequence_parallel=draw(st.booleans())
        ),
        optimizer=OptimizerConfig(
            adam_beta1=draw(rates),
            adam_eps=draw(st.floats(1e-12, 0.5)),
            weight_decay=draw(any_size),
            **draw(
                st.sampled_from(
                    [{}, dict(optimizer="muon", muon_nesterov=True, muon_split_qkv=False)]
                )
            ),
        ),
        lr_schedule=LrScheduleConfig(lr=lr, min_lr=lr / 2, lr_decay_style=style, **warmup, **wsd),
        checkpoint=CheckpointConfig(
            load=load,
            finetune=load is not None and draw(st.booleans()),
            save=save,
            save_interval=None if save is None else draw(maybe(positive)),
        ),
        logging=LoggingConfig(
            log_interval=draw(positive), metrics_jsonl=draw(maybe(st.text(min_size=1)))
        ),
    )


@given(runs())
def test_a_run_survives_json(config: RunConfig) -> None:
    read = RunConfig.from_json(config.to_json())
    assert read == config
    assert read.to_json() == config.to_json(), "types too: 1 and 1.0 compare equal"


def plain() -> dict[str, Any]:
    config = RunConfig(
        model=ModelConfig(
            num_layers=2, hidden_size=16, num_attention_heads=4, max_position_embeddings=8
        ),
        training=TrainingConfig(micro_batch_size=2),
        data=DataConfig(seq_length=8),
        tokenizer=TokenizerConfig(vocab_size=99),
    )
    values: dict[str, Any] = json.loads(config.to_json())
    return values


def test_a_whole_number_is_read_as_a_float_where_a_float_is_meant() -> None:
    values = plain()
    values["optimizer"]["clip_grad"] = 1
    clip_grad = RunConfig.from_json(json.dumps(values)).optimizer.clip_grad
    assert clip_grad == 1.0 and isinstance(clip_grad, float)


ILL_TYPED = {
    ("model", "num_layers"): ("2", 2.0, True, None),
    ("model", "swiglu"): (1,),
    ("model", "hidden_dropout"): (False, "0.1"),
    ("model", "normalization"): (3,),
    ("training", "global_batch_size"): ("8", [8]),
    ("training", "rampup_batch_size"): (["1"], [True, 1, 1]),
    ("data", "data_path"): ("a", [1]),
    ("model", "window_size"): ("3,0", 3, [3.0, 0], [True, 0]),
    ("model", "window_attn_skip_freq"): ([1, True], "[1,0]"),
    ("model", "no_rope_freq"): (2.0, True),
}


@pytest.mark.parametrize(("topic", "field"), ILL_TYPED)
def test_an_ill_typed_field_is_refused_by_name(topic: str, field: str) -> None:
    for value in ILL_TYPED[topic, field]:
        values = plain()
        values[topic][field] = value
        with pytest.raises(ValueError, match=rf"run\.{topic}\.{field}: expected .*, got "):
            RunConfig.from_json(json.dumps(values))


def test_an_unknown_a_missing_and_a_wrong_field_are_named() -> None:
    for changed, message in (
        ({"hidden_sizes": 3}, "run.model: unknown field hidden_sizes"),
        ({"hidden_size": -1}, "--hidden-size must be at least 1 (got -1)"),
        ({"num_layers": None}, "run.model.num_layers: expected"),
    ):
        values = plain()
        values["model"] |= changed
        with pytest.raises(ValueError, match=re.escape(message)):
            RunConfig.from_json(json.dumps(values))
    values = plain()
    del values["model"]["num_layers"]
    with pytest.raises(ValueError, match=r"run\.model: missing field num_layers"):
        RunConfig.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("null", "run: expected an object, got NoneType"),
        ("[1]", "run: expected an object, got list"),
        ("{}", "run: missing field data, model, tokenizer, training"),
        ('{"modell": {}}', "run: unknown field modell (known: "),
        (json.dumps({"model": 3}), "run: missing field data"),
        ("[" * 200_000, "brackets nested too deeply: a run is an object of objects"),
        ('{"a":' * 100_000, "brackets nested too deeply"),
        (" " * 2_000_000, "longer than 1048576 characters, which no run is"),
        ('{"model": {"num_layers": 1%s}}' % ("0" * 5000), "(5001 characters) is no whole number"),
        (
            '{"model": {"num_layers": 9223372036854775808}}',
            "9223372036854775808 is no whole number",
        ),
        ('{"model": {"num_layers": -9223372036854775809}}', "-9223372036854775809 is no whole"),
        ('{"model": {}, "model": {}}', "'model' is given twice"),
        ('{"model": {"num_layers": 2, "num_layers": 3}}', "'num_layers' is given twice"),
        ('{"optimizer": {"clip_grad": Infinity}}', "Infinity is no JSON number"),
    ],
)
def test_text_that_is_no_run_is_one_short_error(text: str, message: str) -> None:
    with pytest.raises(ValueError) as fault:
        RunConfig.from_json(text)
    assert message in str(fault.value) and len(str(fault.value)) < 300
