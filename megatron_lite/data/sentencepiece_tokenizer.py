"""SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: one SentencePiece model.

Megatron's three names mean the same: the model's own ids, without a token for the start of a text,
and a document that ends with the model's end-of-sentence token. The package sentencepiece is
optional: `pip install -e '.[tokenizers]'`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import install_advice
from megatron_lite.data.tokenizer_files import contents_of
from megatron_lite.data.tokenizers import MissingPackage, check_encodes, require_files


class SentencePieceTokenizer:
    """A tokenizer from a SentencePiece model, such as Llama 2's tokenizer.model.

    path: the file, or its folder.
    Raises InputError if the package is missing or the file is no such model.
    """

    def __init__(self, path: str) -> None:
        file = os.path.join(path, "tokenizer.model") if os.path.isdir(path) else path
        require_files("--tokenizer-model", file)
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise MissingPackage(
                f"this tokenizer needs the sentencepiece package: {install_advice('tokenizers')}"
            ) from None
        content = contents_of([("tokenizer.model", Path(file))])["tokenizer.model"]
        try:
            # The processor would take any folder or longer text for a path as well.
            self._processor: Any = SentencePieceProcessor(model_proto=content)
            self.vocab_size = int(self._processor.get_piece_size())
        except Exception as error:  # the library raises nothing more specific
            raise InputError(
                f"{file}: no SentencePiece model that can be read ({error})"
            ) from error
        if self.vocab_size == 0:
            raise InputError(f"{file}: a vocabulary without tokens")
        self._source = file

    @property
    def eod(self) -> int:
        """The id of the end-of-sentence token."""
        number = int(self._processor.eos_id())
        if number < 0:
            raise InputError(
                f"{self._source} has no end-of-sentence token, which ends a document: train it "
                "with an eos_id"
            )
        return number

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text. Raises InputError for text that UTF-8 cannot encode."""
        check_encodes(text)
        return [int(number) for number in self._processor.encode_as_ids(text)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode_ids([int(number) for number in ids]))
