"""Models and runs that a flag names, as values by topic and field; and well-known models by name.

known_models.json has the sizes of the papers and of the models' published configurations: Llama
(arXiv 2407.21783, 2307.09288), Qwen3 (2505.09388), Mixtral (2401.04088), and 22b to 1t (2205.05198,
table 3). Every preset has its published number of parameters (tests/config/test_json.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .checks import LARGEST_TEXT, InputError, Values, input_faults, parse_json, quoted


class KnownModel(NamedTuple):
    """A model that a name or a config.json of Hugging Face describes.

    fields: those of ModelConfig that differ from the defaults. vocab_size: V, the rows of its
        embedding.
    family: its model_type in a config.json.
    inexact: what is left out of a config.json although it changes results, in words. The sizes are
        right.
    notes: `inexact`, and what was not read.
    token_ids: the ids of special tokens that a config.json has.
    """

    fields: Values
    vocab_size: int
    family: str = ""
    inexact: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    token_ids: Mapping[str, Any] = {}

    def exact_fields(self, source: object) -> Values:
        """Returns the fields. Raises InputError if the source does not map exactly."""
        if self.inexact:
            raise InputError(f"{source} does not map exactly: {'; '.join(self.inexact)}")
        return dict(self.fields)


PRESETS = {
    name: KnownModel(vocab_size=row.pop("vocab_size"), fields=row)
    for name, row in parse_json(Path(__file__).with_name("known_models.json").read_text()).items()
}


def model_of(name: str, source: str) -> tuple[Values, KnownModel]:
    """Returns the values of the model that `--model SOURCE` or `--hf-config SOURCE` names, and it.

    They have the vocabulary of NullTokenizer, which adds one id to its size.
    Raises InputError for an unknown name.
    """
    if name == "--model":
        if source not in PRESETS:
            raise InputError(
                f"--model {quoted(source)} is not known: give one of {', '.join(PRESETS)}; for "
                "another model give --hf-config FILE, or the flags of its sizes"
            )
        model = PRESETS[source]
    else:
        from .hf_config import read_hf_file

        model = read_hf_file(Path(source))
    return {**model.fields, "vocab_size": model.vocab_size - 1}, model


# A file of --dump-config holds these derived values. A flag may change the values from which they
# are derived, and they must be derived again.
DERIVED_FIELDS = ("kv_channels", "ffn_hidden_size", "rope_type")


def stored_values(path: str) -> Values:
    """Returns the values of a --dump-config file.

    A derived value becomes None if it equals the value that would be derived anyway.
    Raises InputError if it is no such file.
    """
    from .input_file import read_input_text
    from .run import RunConfig
    from .run_flags import is_derived

    try:
        text = read_input_text(path, LARGEST_TEXT)
    except (InputError, OSError) as error:  # which name the file
        raise InputError(f"--config-json {error}") from error
    with input_faults(f"--config-json {path}: "):
        config = RunConfig.from_json(text)
    values = config.values
    for field in DERIVED_FIELDS:
        if is_derived(config.model, field, None):
            values[field] = None
    return values
