"""The settings of the data and of the tokenizer, each as one frozen class."""

from functools import partial

from .checks import flag
from .setting import (
    Settings,
    condition,
    count,
    required,
    resolve,
    setting,
    settings_of,
    several,
    switch,
)

# Each names the data of a run, as train_data_path and per_split_data_args_path do split by split.
OF_ALL_SPLITS = "data_path mock_data data_args_path"
ONE_SOURCE = "a run has one source of data"
PER_SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
# Three names of Megatron's for a tokenizer of a SentencePiece model.
SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
# The files that each type reads: the field of TokenizerConfig with the path, and the usual name.
READ_FILES = {
    "NullTokenizer": {},
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    **{kind: {"tokenizer_model": "tokenizer.model"} for kind in SENTENCEPIECE_TYPES},
    "TikTokenizer": {"tokenizer_model": "tiktoken.json"},
}
TOKENIZER_TYPES = tuple(READ_FILES)
OF_ONE_FILE = "/".join(kind for kind, files in READ_FILES.items() if "tokenizer_model" in files)
# The tokens that every vocabulary of tiktoken has, in this order unless
# --tokenizer-special-tokens names them.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
OF_BPE, OF_TIKTOKEN = "tokenizer_type=GPT2BPETokenizer", "tokenizer_type=TikTokenizer"

ONE_BY_ONE = "the splits are given one by one"


# Prefixes of datasets, or weights and prefixes in turn.
_blend = partial(several, nargs="*")
_fim = partial(setting, without="fim_data")


class DataConfig(Settings):
    """The data of a run: dataset prefixes with optional weights, split and sequence length.

    eod_mask_loss: whether tokens that end a document do not count in the loss.
    reset_position_ids: whether learned positions begin at 0 again after such a token.
    reset_attention_mask: whether no token reads an earlier document.
    Prefixes are given for all splits together (data_path, or a file with its words), or for each
    split by itself (train_data_path and the like, or a JSON file).
    data_sharding: with dataloader_type cyclic, each data-parallel rank shuffles a range of its own.
    fim_*: how data/token_datasets.py rearranges documents with fim_data.
    """

    seq_length: int = required("tokens of a sample", least=1, upto="max_position_embeddings")
    data_path: tuple[str, ...] = _blend(
        "prefix of PREFIX.bin and PREFIX.idx; several, or weight and prefix in turn, are blended"
    )
    mock_data: bool = switch(
        "made-up token ids instead of a dataset", excludes="data_path", why=ONE_SOURCE
    )
    split: str = setting(
        "shares of the documents for training, validation and test",
        "969, 30, 1",
        unless="mock_data",
        excludes="train_data_path per_split_data_args_path",
        why="each split has data of its own",
    )
    data_cache_path: str | None = setting(
        "directory of the sample and blend indices", unless="mock_data"
    )
    eod_mask_loss: bool = switch("leave tokens that end a document out of the loss")
    reset_position_ids: bool = switch(
        "let learned positions begin at 0 after the end of a document",
        without="position_embedding_type=learned_absolute",
    )
    reset_attention_mask: bool = switch("let no token read an earlier document")
    plan_attended: float = setting(
        "share of attention within documents, for predicted times",
        1.0,
        above=0.0,
        most=1.0,
        without="reset_attention_mask",
    )
    data_args_path: str | None = setting(
        "file with the words of --data-path, for lists that are too long",
        excludes="data_path mock_data",
        why=ONE_SOURCE,
    )
    train_data_path: tuple[str, ...] = _blend(
        "the same as --data-path for the train split alone, without --split",
        excludes=OF_ALL_SPLITS,
        why=ONE_SOURCE,
    )
    valid_data_path: tuple[str, ...] = _blend(
        "the same as --data-path for the valid split alone, without --split",
        needs="train_data_path",
        why=ONE_BY_ONE,
    )
    test_data_path: tuple[str, ...] = _blend(
        "the same as --data-path for the test split alone, without --split",
        needs="train_data_path",
        why=ONE_BY_ONE,
    )
    per_split_data_args_path: str | None = setting(
        'JSON file {"train": [..], "valid": [..], "test": [..]} with the words of these three',
        excludes=f"{OF_ALL_SPLITS} train_data_path",
        why=ONE_SOURCE,
    )
    dataloader_type: str = setting(
        "order of the samples: in the order of the index, or (cyclic) shuffled anew in each pass",
        "single",
        choices="single cyclic",
    )
    data_sharding: bool = setting(
        "with --dataloader-type cyclic, shuffle all samples together instead of a range for each "
        "data-parallel rank",
        True,
        name="--no-data-sharding",
        needs="dataloader_type=cyclic",
    )
    fim_data: bool = switch(
        "rearrange documents for filling in the middle",
        needs="tokenizer_type=HuggingFaceTokenizer/GPT2BPETokenizer",
        excludes="mock_data",
        why="documents are cut as texts",
    )
    fim_rate: float = _fim("share of documents rearranged", 0.5, least=0, most=1)
    fim_spm_rate: float = _fim("share of these with the suffix first", 0.5, least=0, most=1)
    fim_split_sample: str | None = _fim(
        "token between parts of a document, each rearranged by itself", needs="fim_fragment_rate"
    )
    fim_fragment_rate: float | None = _fim("share of parts rearranged", above=0, most=1)
    fim_no_prefix: str | None = _fim("text that begins no rearranged document")
    fim_prefix_token: str = _fim("token before the prefix", "<fim_prefix>")
    fim_middle_token: str = _fim("token before the middle", "<fim_middle>")
    fim_suffix_token: str = _fim("token before the suffix", "<fim_suffix>")
    fim_pad_token: str = _fim("token that fills up a sample", "<fim_pad>")
    fim_eod_token: str = _fim("token that ends a document", "<|endoftext|>")

    @property
    def document_flags(self) -> list[str]:
        """The flags that give the ends of documents a meaning."""
        names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        return [flag(name) for name in names if getattr(self, name)]

    @property
    def is_per_split(self) -> bool:
        """Tells whether each split has data of its own."""
        return bool(self.train_data_path or self.per_split_data_args_path)


class TokenizerConfig(Settings):
    """The tokenizer and the size of the vocabulary.

    tokenizer_type: None: GPT2BPETokenizer if one of its files is given, as in Megatron's
        pretrain_gpt.py, else NullTokenizer.
    vocab_size: None: the size is read from the tokenizer's files before the run starts.
    tiktoken_pattern: how TikTokenizer splits a text. None: "v2".
    tiktoken_num_special_tokens: its number of special tokens, which have the first ids.
    tokenizer_special_tokens: the names of the first of them. An empty tuple: the usual seven.
    """

    tokenizer_type: str | None = setting(
        "derived: GPT2BPETokenizer with --vocab-file and --merge-file, else NullTokenizer",
        choices=TOKENIZER_TYPES,
        megatron=dict.fromkeys(
            ("PretrainedFromHF", "TokenizerFromFile", "TokenizerFromFileWithFIM"),
            "HuggingFaceTokenizer",
        ),
    )
    tokenizer_model: str | None = setting(
        "tokenizer.json or its directory, for HuggingFaceTokenizer; a SentencePiece model, for "
        "Llama2Tokenizer and the like; a JSON list of tokens, for TikTokenizer",
        needs="tokenizer_type",
        without=f"tokenizer_type={OF_ONE_FILE}",
    )
    vocab_file: str | None = setting("vocab.json, for GPT2BPETokenizer", without=OF_BPE)
    merge_file: str | None = setting("merges.txt, for GPT2BPETokenizer", without=OF_BPE)
    vocab_size: int | None = count("token ids before padding; derived from the tokenizer's files")
    make_vocab_size_divisible_by: int = count(
        "each rank's rows of the embedding are padded to a multiple of it",
        128,
        unless="padded_vocab_size",
    )
    padded_vocab_size: int | None = count(
        "rows of the embedding in all, instead of those that the divisor gives",
        multiple_of="tensor_model_parallel_size",
        why="each rank holds an equal part",
    )
    tiktoken_pattern: str | None = setting(
        "how TikTokenizer splits a text (v2 if omitted)", choices="v1 v2", without=OF_TIKTOKEN
    )
    tiktoken_num_special_tokens: int = count(
        "special tokens of TikTokenizer", 1000, without=OF_TIKTOKEN
    )
    tokenizer_special_tokens: tuple[str, ...] = several(
        "names of its first special tokens, if they are not the usual ones", without=OF_TIKTOKEN
    )

    def check_rules(self) -> None:
        reads_bpe_files = self.vocab_file or self.merge_file
        resolve(self, "tokenizer_type", "GPT2BPETokenizer" if reads_bpe_files else "NullTokenizer")
        files = READ_FILES[str(self.tokenizer_type)]
        needed = [*files] or ["vocab_size"]
        if any(getattr(self, name) is None for name in needed):
            hint = " and ".join(files.values())
            raise ValueError(
                f"--tokenizer-type {self.tokenizer_type} needs {' and '.join(map(flag, needed))} "
                f"({hint or 'or choose a tokenizer with --tokenizer-type and its files'})"
            )
        padded = self.padded_vocab_size
        if padded and self.vocab_size and padded < self.true_vocab_size:
            raise ValueError(
                f"--padded-vocab-size {padded} is below the {self.true_vocab_size} ids of the "
                "tokenizer: give at least as many rows"
            )
        # Nothing reads these fields, as a notice says. The path may be of another machine.
        for name, one in settings_of(TokenizerConfig).items():
            if one.without and not condition(one.without, vars(self)).holds:
                object.__setattr__(self, name, one.default)
        names = self.tokenizer_special_tokens
        missing = [name for name in SPECIAL_TOKENS if name not in names]
        if names and missing:
            raise ValueError(
                f"--tokenizer-special-tokens {' '.join(names)}: {missing[0]} is missing; name it"
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

    def rows(self, tensor_model_parallel_size: int) -> int:
        """Returns `padded_vocab_size`, or V rounded up to a multiple of
        `make_vocab_size_divisible_by` x t.

        Each tensor-parallel rank then holds the same number of rows of the embedding.
        """
        if self.padded_vocab_size:
            return self.padded_vocab_size
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.true_vocab_size // multiple) * multiple
