"""Small Hugging Face checkpoints on the disk, and conversions as a user runs them."""

import time

import torch
from safetensors.torch import load_file, save_file

from megatron_lite.tools.convert import main
from tests.support.commands import ended
from tests.support.hf import PEERS

# transformers writes this length where there is none
TOKENIZER_CONFIG = (
    '{"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", '
    '"model_max_length": 1000000000000000019884624838656}'
)
WORDS = ("<|endoftext|>", "to", "be", "or", "not")


def saved_peer(name, folder):
    """Saves a randomly initialised model of transformers, and returns it."""
    model = PEERS[name]()
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder, words=WORDS, added=()):
    """Saves a tokenizer of a few words, as save_pretrained does."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="not"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(TOKENIZER_CONFIG)


def converted(folder, way, *flags):
    """Runs the tool on folders below this one. Returns its exit status.

    way: such as "hf theirs -> megatron-lite ours".
    """
    from_format, source, _, to_format, target = way.split()
    words = ["--from", from_format, "--load", str(folder / source), "--to", to_format]
    return main([*words, "--save", str(folder / target), *flags])


def refusal(folder, way, *flags):
    """Returns the error of a conversion, which must end with it within seconds."""
    began = time.process_time()
    found = ended(lambda words: converted(folder, way, *words), flags)
    assert found.status == 2 and time.process_time() - began < 5.0, found
    return found.err


def weights_in(folder):
    """Returns all tensors of a folder of safetensors files."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same_weights(first, second):
    """Returns whether both have the same names, dtypes and bits."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def there_and_back(folder):
    """Converts the checkpoint `theirs` to `ours`, and that to `again`, which must be the same."""
    assert converted(folder, "hf theirs -> megatron-lite ours") == 0
    assert converted(folder, "megatron-lite ours -> hf again") == 0
    assert same_weights(weights_in(folder / "theirs"), weights_in(folder / "again"))


def rewrite(folder, change):
    """Changes the tensors of model.safetensors: `change(tensors)` edits the dict."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})
