"""Windows and layers without rotary embedding: what the flags' text means, which layers it names,
and what is refused."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.config.layer_pattern import LONGEST_TEXT, parse_pattern, parse_window
from tests.support.models import tiny_config

ROPE = {"position_embedding_type": "rope"}


# --- which layers ---


def test_a_window_reaches_nothing_less_where_the_sequence_ends_before_it():
    config = tiny_config(num_layers=6, window_size=(7, 0), window_attn_skip_freq=2)
    assert [config.layer_reach(0, seq_length) for seq_length in (7, 8, 9, 16)] == [None, None, 7, 7]
    assert config.layer_reach(1, 16) is None


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match="--window-size : give LEFT,0"):
        tiny_config(window_size=())


def test_the_layers_are_those_of_megatron_core():
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention

    def theirs(pattern):
        return list(pattern) if isinstance(pattern, tuple) else pattern

    for num_layers in (1, 4, 6, 12):
        numbers = range(1, num_layers + 1)
        lists = [tuple(int(number * 7 % 5 > start) for number in numbers) for start in range(3)]
        for pattern in [*range(1, num_layers + 3), *lists]:
            found = [
                is_layer_window_attention((3, 0), theirs(pattern), number) for number in numbers
            ]
            if any(found):
                ours = tiny_config(
                    num_layers=num_layers, window_size=(3, 0), window_attn_skip_freq=pattern
                )
                windows = [ours.layer_window(each) is not None for each in range(num_layers)]
                assert windows == found, pattern
        divisors = [number for number in numbers if number > 1 and num_layers % number == 0]
        for pattern in [*divisors, *(each for each in lists if 0 in each)]:
            config = TransformerConfig(
                num_layers=num_layers,
                hidden_size=16,
                num_attention_heads=4,
                no_rope_freq=theirs(pattern),
            )
            ours = tiny_config(num_layers=num_layers, **ROPE, no_rope_freq=pattern)
            unrotated = [not ours.layer_rotates(each) for each in range(num_layers)]
            assert unrotated == config.no_rope_freq, pattern


# --- the text ---


numbers = st.integers(0, 4).map(str)
lists = st.lists(numbers, max_size=3).map(lambda items: f"[{','.join(items)}]")
expressions = st.recursive(
    lists,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("+".join),
        st.tuples(inner, numbers).map(lambda pair: f"({pair[0]})*{pair[1]}"),
        st.tuples(numbers, inner).map(lambda pair: f"{pair[0]}*({pair[1]})"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(expressions)
def test_a_list_expression_means_what_python_says(text):
    """Megatron evaluates it; the text here is one that this test made."""
    assert parse_pattern("--no-rope-freq", text) == tuple(eval(text))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1", "[1 0]", "[1]]", "[0]*x", "-1", "1.5", "[[1]]", "[1]+1", "[1]*[1]", "1,0"),
        *("2**9", "+1", "[1][0]", "(1)(2)", "__import__('os')", "99999999999", "9999999*9999999"),
        *(
            "[1]*999999999",
            "[0]*999*999",
            "[1]*2*999*999*999",
            "(" * 60 + "1" + ")" * 60,
            "+".join(["1"] * 4000),
        ),
        "1" * (LONGEST_TEXT + 1),
    ],
)
def test_other_text_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"^--no-rope-freq .* such as \(\[0\]\*3\+\[1\]\)\*2$"):
        parse_pattern("--no-rope-freq", text)


def test_a_window_is_two_numbers_with_or_without_brackets():
    for text in ("128,0", "(128,0)", " (128, 0) "):
        assert parse_window(text) == (128, 0)
    for text in ("128", "1,2,3", "a,0", "128,", "1.5,0", "", "99999999999,0"):
        with pytest.raises(ValueError, match=r"--window-size .*: give two numbers"):
            parse_window(text)
