"""Token files for tests."""

from megatron_lite.data.indexed import indexed_writer, token_dtype


def written(prefix, documents, *, vocab_size=1000):
    """Writes a pair of token files. Returns its prefix."""
    with indexed_writer(str(prefix), token_dtype(vocab_size)) as writer:
        for ids in documents:
            writer.add_document(ids)
    return str(prefix)
