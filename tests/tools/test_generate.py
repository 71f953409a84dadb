"""Sampling against a naive oracle, and the command on checkpoints of a small trained model."""

import itertools
import json
import math

import pytest
import torch

from megatron_lite.checkpointing.metadata import read_config
from megatron_lite.config.checks import InputError
from megatron_lite.data.tokenizers import build_tokenizer
from megatron_lite.tools.generate import Sampling, main
from megatron_lite.tools.generation import (
    config_for_ranks,
    find_step,
    generate_tokens,
    load_model,
    next_token,
    text_pieces,
    token_probabilities,
)
from tests.support.commands import Ended, ended, fault_of
from tests.support.equality import LATENT
from tests.support.models import tp_state
from tests.support.pairs import in_one_test
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 2.0, -3.0, 0.0])
PROMPT = "5 17 3"


def run_main(folder, flags, prompt=PROMPT):
    words = ["--load", folder, *flags.split(), "--distributed-backend", "gloo"]
    return ended(main, [*words, "--prompt", prompt])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Twelve iterations of a model with learned positions, at a rate that makes its predictions
    uneven. Steps 6 and 12."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    run_to_end(
        tiny_run(train_iters=12, eval_iters=0, save=folder, save_interval=6, init_method_std=0.2)
    )
    return folder


# --- sampling ---


def naive_nucleus(logits, temperature, top_k, top_p):
    """Likeliest first, ties by id: the top_k, then the shortest prefix that reaches top_p."""
    weights = [math.exp(logit / temperature) for logit in logits]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    ranked = ranked[: top_k or len(weights)]
    total, prefix = sum(weights[token] for token in ranked), []
    for token in ranked:
        prefix.append(token)
        if sum(weights[kept] for kept in prefix) / total >= top_p:
            break
    mass = sum(weights[token] for token in prefix)
    return [weights[token] / mass if token in prefix else 0.0 for token in range(len(weights))]


@in_one_test(
    "temperature, top_k, top_p",
    itertools.product((0.3, 1.0, 2.5), (0, 1, 3, 20), (0.05, 0.35, 0.7, 0.95, 1.0)),
)
def test_probabilities_are_those_of_a_naive_nucleus(temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = naive_nucleus(LOGITS.tolist(), temperature, top_k, top_p)
    assert token_probabilities(LOGITS, sampling).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("temperature", [1e-310, 5e-324, 1e-300])
def test_the_coldest_temperature_shares_all_among_the_likeliest(temperature):
    """1e-310 as a divisor makes every logit infinite unless the largest is taken off first."""
    sampling = Sampling(temperature=temperature, top_p=1.0)
    assert token_probabilities(LOGITS, sampling).tolist() == [0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0]
    assert next_token(LOGITS, sampling, torch.Generator().manual_seed(5)) in (1, 4)


# --- the loop over tokens ---


class CountingModel:
    """Its likeliest next token is the last token + 1. Records the contexts that it was shown."""

    def __init__(self):
        self.contexts = []

    def __call__(self, tokens):
        self.contexts.append(tokens[0].tolist())
        return torch.nn.functional.one_hot((tokens + 1) % 30, 30).float()


def count_from(model, prompt, max_new_tokens=1):
    with tp_state(1) as parallel:
        return list(
            generate_tokens(
                model,
                prompt,
                sampling=Sampling(greedy=True, max_new_tokens=max_new_tokens),
                eod=8,
                window=100,
                generator=torch.Generator(),
                parallel=parallel,
            )
        )


def test_generation_stops_before_the_end_of_document():
    model = CountingModel()
    assert count_from(model, [3, 4], 20) == [5, 6, 7]
    assert len(model.contexts) == 4


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(InputError, match="not finite"):
        count_from(lambda tokens: torch.full((1, tokens.shape[1], 4), math.nan), [1])


# --- text ---


class ByteTokenizer:
    """One id per byte."""

    fewest_ids, eod = 257, 256

    def tokenize(self, text):
        return list(text.encode())

    def detokenize(self, ids):
        return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_appears_once_it_is_complete():
    pieces = text_pieces(ByteTokenizer(), list(b"caf"), list("né→x".encode()))
    assert "|".join(pieces) == "n||é|||→|x|"


# --- checkpoints ---


def test_a_stored_policy_that_is_refused_today_does_not_keep_a_checkpoint_from_being_read(tmp_path):
    run = tiny_run()
    stored = json.loads(run.to_json())
    stored["recompute"]["recompute_policy"] = "stage1/*:full"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stored))
    assert read_config(tmp_path) == run
    stored["model"]["num_layers"] = 0
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match="--num-layers must be at least 1"):
        read_config(tmp_path)


def greedy_by_hand(folder, prompt, count):
    """argmax of the model's last logits over contexts of at most 16 tokens, written out."""
    saved, _ = find_step(folder)
    with tp_state(1) as parallel:
        model = load_model(saved, config_for_ranks(saved.config, 1, "gloo"), parallel)
        tokens = list(prompt)
        for _ in range(count):
            context = torch.tensor([tokens[max(0, len(tokens) - 16) :]])
            tokens.append(int(model(context)[0, -1].argmax()))
    return list(map(str, tokens))


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize(
    "sampling", ["--seed 3 --temperature 1.5 --top-k 9", "--greedy", "--seed 3"]
)
def test_tp_2_prints_what_tp_1_prints(checkpoint, sampling):
    """30 tokens past a context of 16: the window slides. Only rank 0 prints."""
    arguments = (checkpoint, f"--max-new-tokens 30 {sampling}")
    alone = run_main(*arguments)
    assert alone.status == 0 and len(alone.out.split()) >= 20
    first, second = run_ranks(lambda rank, size: run_main(*arguments), 2, detail=False)
    assert (first, second) == (alone, Ended(0, "", ""))


# Windows and layers without rotary embedding; latents and experts; Gemma 2's caps.
MODELS = {
    "windows": dict(window_size=(2, 0), window_attn_skip_freq=2, no_rope_freq=2),
    "latents": dict(LATENT, num_experts=4, moe_router_topk=2, add_bias_linear=False),
    "caps": dict(attn_logit_softcapping=0.7, final_logit_softcapping=1.5),
}


@pytest.mark.runs(daily=2, ci=3)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_argmax_of_the_models_logits(name, checkpoint, tmp_path):
    """Of learned positions, and of the models above. An empty prompt starts a document."""
    run_to_end(
        tiny_run(
            train_iters=3,
            eval_iters=0,
            save=tmp_path,
            init_method_std=0.2,
            position_embedding_type="rope",
            **MODELS[name],
        )
    )
    for folder in (checkpoint, str(tmp_path)):
        output = run_main(folder, "--greedy --max-new-tokens 20")
        found = output.out.split()
        assert len(found) > 3 and found == greedy_by_hand(folder, [5, 17, 3], 20)[: len(found)]
        assert "the last 16 tokens only" in output.err
    output = run_main(checkpoint, "--greedy --max-new-tokens 5", "")
    assert output.out.split() == greedy_by_hand(checkpoint, [98], 5)[1:]


def test_the_seed_decides_the_draw(checkpoint):
    one, again, other = (
        run_main(checkpoint, f"--temperature 2 --max-new-tokens 12 --seed {seed}")
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_ids_that_the_tokenizer_lacks_are_not_drawn(checkpoint, monkeypatch):
    monkeypatch.setattr(
        "megatron_lite.tools.generation.build_tokenizer",
        lambda config: build_tokenizer(config)._replace(vocab_size=20),
    )
    assert max(map(int, run_main(checkpoint, "--temperature 9 --top-p 1").out.split())) < 20


# --- bad input ---


def test_faults_end_with_status_2_and_one_line(checkpoint, tmp_path, monkeypatch):
    def check(output, message):
        assert (output.status, output.out) == (2, "") and message in output.err
        assert output.err.startswith("python -m megatron_lite.tools.generate: error: ")
        assert output.err.count("\n") == 1

    check(run_main(str(tmp_path), ""), f"--load {tmp_path}")
    check(run_main(checkpoint, "", "word"), "token ids")
    results = run_ranks(lambda rank, size: run_main(checkpoint, ""), 3)
    assert [result.status for result in results] == [2, 2, 2]
    check(results[0], "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3")
    monkeypatch.setattr(
        "megatron_lite.tools.generation.build_tokenizer", lambda config: ByteTokenizer()
    )
    check(run_main(checkpoint, "", "a"), "the tokenizer has 257 ids, the model 99")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--greedy --top-p 0.5", "leave out --top-p"),
        ("--temperature 0", "--temperature must be above 0"),
        ("--top-p 1.1", "--top-p must be above 0 and at most 1"),
    ],
)
def test_flags_that_contradict_are_refused(arguments, message):
    assert message in fault_of(main, f"--load x --prompt 1 {arguments}")
