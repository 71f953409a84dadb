"""Flags of forks of Megatron-LM: each changes what it should, or nothing. config/faults.json has
those that are refused."""

import re
import time

import pytest

from arguments import parse_args
from tests.support.commands import fault_of, parsed_line
from tests.test_arguments import RUN

MOE = "--num-experts 4 --disable-bias-linear"
ROPE = "--position-embedding-type rope"
PARTS = "--num-attention-heads 4 --context-parallel-size 2"
ULYSSES = "--context-parallel-algo ulysses_cp_algo"


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (
            "--zero-stage=1 --attention-head-type multiquery",
            "--use-distributed-optimizer --group-query-attention --num-query-groups 1",
        ),
        ("--deepspeed --deepspeed_config ds.json --use-fused-rmsnorm --use-mpi", ""),
        ("--train-tokens 33", "--train-samples 5"),
        ("--train-tokens 33 --train-samples 3", "--train-samples 3"),
        (
            "--train-samples 50 --lr-decay-iters 7 --lr-decay-tokens 160 --lr-warmup-tokens 16",
            "--train-samples 50 --lr-decay-samples 20 --lr-warmup-samples 2",
        ),
        (
            "--train-iters 50 --global-batch-size 4 --lr-decay-tokens 640 "
            "--num-layers 4 --scale-depth 3",
            "--train-iters 50 --global-batch-size 4 --lr-decay-iters 20 "
            "--num-layers 4 --residual-multiplier 1.5",
        ),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path t "
            "--context-parallel-algo ulysses_cp_algo",  # of one rank
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --cp-comm-type p2p",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-style 1-sqrt --lr-wsd-decay-iters 3 "
            "--ds-sequence-parallel-size 2",
            "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 3 "
            "--context-parallel-size 2",
        ),
        (
            f"{ROPE} --use-glm-rope --zero-stage 3 --bf16",
            f"{ROPE} --rotary-interleaved --use-torch-fsdp2 --bf16",
        ),
        (
            f"{ROPE} --v-head-dim 5 --multi-head-latent-attention --qk-rope-head-dim 4 "
            "--qk-nope-head-dim 6",
            f"{ROPE} --v-head-dim 5 --multi-latent-attention --qk-pos-emb-head-dim 4 "
            "--qk-head-dim 6",
        ),
        (
            "--embedding-multiplier-scale 3 --optimizer-selection fused_torch_adamw --tp-2d "
            "--no-cuda --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size 4",
            "--embedding-multiplier 3 --distributed-backend gloo",
        ),
        (
            "--scale-emb 12 --add-rmsnorm-offset --dim-model-base 4 --num-key-value-heads 1 "
            "--tp-x 1 --tp-y 1",
            "--embedding-multiplier 12 --apply-layernorm-1p --logits-scaling 4 "
            "--group-query-attention --num-query-groups 1",
        ),
        (
            "--input-embeds-norm --post-norm --query-pre-attn-scalar 16 --zero-stage 3 "
            "--zero-stage 0 --ulysses-degree-in-cp 1",
            "--embedding-multiplier 4 --norm-position both --softmax-scale 0.25",
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 4 --num-layer-list 2,1,3,2",
            "--num-layers 8 --pipeline-model-parallel-size 4 "
            "--pipeline-model-parallel-layout Ett|t|ttt|ttL",
        ),
        (f"{PARTS} {ULYSSES}", f"{PARTS} --cp-comm-type a2a"),
        (
            f"--num-query-groups 1 --group-query-attention {PARTS} {ULYSSES}",
            f"--num-query-groups 1 --group-query-attention {PARTS} --cp-comm-type p2p",
        ),
        (
            "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --combined-1f1b "
            "--combined-1f1b-recipe ep_a2a --use-wandb --wandb-group g",
            "",
        ),
        (
            "--attention-mask-type general --use-qk-norm "
            "--tokenizer-kwargs eos_token <|endoftext|> pad_token <|extra_0|>",
            "--qk-layernorm",
        ),
        (
            f"{MOE} --moe-router-score-function sigmoid --moe-router-pre-softmax",
            f"{MOE} --moe-router-score-function sigmoid",
        ),
        (
            f"{MOE} --num-layers 4 --first-k-dense-replace 1 --moe-layer-freq 2",
            f"{MOE} --num-layers 4 --moe-layer-freq [0,0,1,0]",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 0 "
            "--attn-logit-softcapping 50 --output-logit-softcapping 30",
        )
        * 2,
    ],
)
def test_a_flag_of_a_fork_is_the_same_run_as_flags_of_megatron(theirs, ours):
    words = RUN.replace("--train-iters 10", "") if "--train" in theirs else RUN
    found, expected = (parsed_line(f"{words} {one}") for one in (theirs, ours))
    assert found.config == expected.config
    known = " ".join([RUN, ours, *found.notices])
    flags = [one for one in re.split("[ =]", theirs.replace("_", "-")) if one.startswith("--")]
    assert [one for one in flags if one not in known] in ([], ["--lr-decay-iters"])


def test_a_padded_vocabulary_has_the_rows_that_were_given():
    tokenizer = parsed_line(f"{RUN} --padded-vocab-size 120").config.tokenizer
    assert tokenizer.rows(1) == tokenizer.rows(2) == 120


SAYS = (
    '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": 1}}, '
    '"optimizer": {"type": "AdamW", "params": {"lr": 0.2, "betas": [0.8, 0.9]}}, '
    '"fp16": {"enabled": false, "hysteresis": 3}, "curriculum_learning": {"enabled": false}, '
    '"bf16": {"enabled": true}, "steps_per_print": 3, "gradient_clipping": 0.5, '
    '"train_batch_size": "auto"}'
)
FP16 = (
    '{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 5}, "gradient_clipping": 0}'
)


def test_a_deepspeed_file_is_read_and_may_not_contradict(tmp_path):
    file = tmp_path / "\x1b[1m\nds.json"

    def line(says, words=""):
        file.write_text(says)
        return f"{RUN} {words} --deepspeed-config '{file}'"

    parsed = parsed_line(line(SAYS))
    ours = (
        f"{RUN} --use-distributed-optimizer --bf16 --clip-grad 0.5 --optimizer-cpu-offload "
        "--lr 0.2 --adam-beta1 0.8 --adam-beta2 0.9"
    )
    assert parsed.config == parsed_line(ours).config
    assert "not read: zero_optimization.offload_optimizer.pin_memory, steps" in parsed.notices[-1]
    ours = f"{RUN} --fp16 --initial-loss-scale 32 --clip-grad 0"
    assert parsed_line(line(FP16)).config == parsed_line(ours).config
    for words, wrong, said in (
        ("", '{"bf16": {"enabled": "true"}}', "bf16.enabled must be true or false (got 'true')"),
        ("", '{"zero_optimization": {"stage": 4}}', "stage must be 0, 1, 2 or 3 (got 4)"),
        ("", "[1]", "the file must be an object (got [1])"),
        ("--clip-grad 1", SAYS, "gradient_clipping 0.5 contradicts --clip-grad 1.0"),
        ("--bf16", '{"bf16": {"enabled": false}}', "bf16.enabled False contradicts --bf16: make"),
        ("--no-bf16", SAYS, "bf16.enabled True contradicts --no-bf16: make"),
        ("--zero-stage=0", SAYS, "zero_optimization.stage 2 contradicts --zero-stage 0: make"),
        ("--use-torch-fsdp2", SAYS, "stage 2 contradicts --use-torch-fsdp2: leave one out"),
        ("", SAYS.replace("2", "3", 1), "stage 3 excludes states on the host"),
        ("", '{"data_types": {"grad_accum_dtype": "bf16"}}', "contradicts --main-grads-dtype fp32"),
        ("", '{"communication_data_type": "fp8"}', "must be fp32 or bf16 (got 'fp8')"),
        ("", '{"gradient_accumulation_steps": 3}', "needs train_batch_size or --global-batch-size"),
        (
            "",
            '{"curriculum_learning": {"enabled": true}, "scheduler": {"type": "OneCycle"}, '
            '"no_such": 1, "zero_optimization": {"zero_quantized_weights": 1, "overlap_comm": 1}, '
            '"optimizer": {"params": {"adam_w_mode": false}}}',
            "not supported here: curriculum_learning, scheduler.type, no_such, "
            "zero_optimization.zero_quantized_weights, optimizer.params.adam_w_mode. Leave",
        ),
    ):
        fault = fault_of(parse_args, line(wrong, words))
        assert said in fault and "/\\x1b[1m\\nds.json: " in fault


def test_a_script_is_checked_flag_by_flag(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(
        "srun --mem 8 \\\n  torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $LAYERS \\\n"
        "  --fp16 --optimizer=ademamix --normalization rmsnorm --tokenizer-type $KIND --mtu 9 \\\n"
        "  --use-mc2 --goldfish-loss --xyz 3 --zero-stage 7 --softmax-type vanilla  # --geglu\n"
    )
    with pytest.raises(SystemExit) as end:
        parsed_line(f"{RUN} --check-line={script}")
    printed = " ".join(capsys.readouterr().out.split())  # at any width of the terminal
    assert end.value.code == 1
    for line in (
        "--nproc-per-node is accepted and has no effect",
        "--use-mc2 is accepted and has no effect here: it chooses a kernel",
        "--goldfish-loss is refused: ",
        "--xyz is unknown: ",
        "--zero-stage 7 is refused: ",
        "--optimizer ademamix is refused: --optimizer must be one of adam, muon, sgd",
        "--mem is read by the launcher",
        "--mtu is unknown: ",
        "taken as they are: --num-layers --fp16 --normalization --tokenizer-type --softmax-type",
        "13 flags, of which 5 are refused or unknown",
    ):
        assert line in printed
    assert "geglu" not in printed


def test_a_script_of_many_launchers_takes_no_quadratic_time(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("srun " * 40_000 + "--xyz 3")  # a minute of 200 kB, if it is looked at twice
    began = time.process_time()
    with pytest.raises(SystemExit):
        parsed_line(f"{RUN} --check-line={script}")
    assert time.process_time() - began < 5.0
