"""Rows that pad the tables of words."""

from tests.support.equality import variant_config
from tests.support.models import (
    VOCAB_SIZE,
    build_tiny_model,
    padded_vocab_size,
    sample_tokens,
    tp_state,
)


def test_padding_rows_never_get_a_gradient():
    for tied in (True, False):
        with tp_state(1) as parallel:
            model = build_tiny_model(
                variant_config("gpt2", untie_embeddings_and_output_weights=not tied), parallel
            )
            model.loss(*sample_tokens()).mean().backward()
            tables = [
                model.embedding.word_embeddings.weight,
                *([] if tied else [model.output_layer.weight]),
            ]
            assert len(tables[0]) == padded_vocab_size(1) > VOCAB_SIZE
            assert not any(table.grad[VOCAB_SIZE:].any() for table in tables)
