"""The settings of the data and of the tokenizer, each as one frozen class."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.checks import require_at_least, require_one_of, resolve

TOKENIZER_TYPES = ("NullTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a run: dataset prefixes with optional weights, split and sequence length.

    eod_mask_loss: whether tokens that end a document do not count in the loss.
    reset_position_ids: whether learned positions begin at 0 again after such a token.
    reset_attention_mask: whether no token reads an earlier document.
    """

    seq_length: int
    data_path: tuple[str, ...] = ()
    mock_data: bool = False
    split: str = "969, 30, 1"
    data_cache_path: str | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "seq_length")
        object.__setattr__(self, "data_path", tuple(self.data_path))
        if self.data_path and self.mock_data:
            raise ValueError("--data-path and --mock-data are two sources of data: set one")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer and the size of the vocabulary.

    tokenizer_type: None: GPT2BPETokenizer if one of its files is given, as in Megatron's
        pretrain_gpt.py, else NullTokenizer.
    vocab_size: None: the size is read from the tokenizer's files before the run starts.
    """

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128

    def __post_init__(self) -> None:
        require_at_least(self, 1, "vocab_size", "make_vocab_size_divisible_by")
        if self.tokenizer_type is None and self.tokenizer_model is not None:
            raise ValueError(
                f"--tokenizer-model needs --tokenizer-type ({', '.join(TOKENIZER_TYPES)})"
            )
        reads_bpe_files = self.vocab_file is not None or self.merge_file is not None
        resolve(self, "tokenizer_type", "GPT2BPETokenizer" if reads_bpe_files else "NullTokenizer")
        require_one_of(self, "tokenizer_type", TOKENIZER_TYPES)
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ValueError(
                "--tokenizer-type NullTokenizer needs --vocab-size (or choose a tokenizer with "
                "--tokenizer-type and its files)"
            )
        if self.tokenizer_type == "HuggingFaceTokenizer" and self.tokenizer_model is None:
            raise ValueError(
                "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model (a "
                "tokenizer.json or its folder)"
            )
        if self.tokenizer_type == "GPT2BPETokenizer" and (
            self.vocab_file is None or self.merge_file is None
        ):
            raise ValueError(
                "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file"
            )
        if self.tokenizer_type != "HuggingFaceTokenizer" and self.tokenizer_model is not None:
            raise ValueError(
                f"--tokenizer-type {self.tokenizer_type} does not read --tokenizer-model: "
                "leave it out"
            )
        if self.tokenizer_type != "GPT2BPETokenizer" and reads_bpe_files:
            raise ValueError(
                f"--tokenizer-type {self.tokenizer_type} does not read --vocab-file or "
                "--merge-file: leave them out"
            )

    @property
    def true_vocab_size(self) -> int:
        """V, the number of ids that the tokenizer can produce.

        NullTokenizer adds one id for end-of-document, as Megatron's does. Raises ValueError if the
        size of the vocabulary is not known yet.
        """
        if self.vocab_size is None:
            raise ValueError(
                f"the vocabulary of --tokenizer-type {self.tokenizer_type} is not known yet: "
                "set --vocab-size"
            )
        return self.vocab_size + 1 if self.tokenizer_type == "NullTokenizer" else self.vocab_size

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Returns V rounded up to a multiple of `make_vocab_size_divisible_by` x t.

        Each tensor-parallel rank then holds the same number of rows of the embedding.
        """
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.true_vocab_size // multiple) * multiple
