"""Flags of forks of Megatron-LM: each changes what it should, or nothing."""

import json
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
        ("--zero-stage 0", ""),
        ("--zero-stage=1", "--use-distributed-optimizer"),
        ("--zero-stage 3 --bf16", "--use-torch-fsdp2 --bf16"),
        ("--deepspeed --deepspeed_config ds.json --use-fused-rmsnorm --use-mpi", ""),
        ("--train-tokens 33", "--train-samples 5"),
        ("--train-tokens 33 --train-samples 3", "--train-samples 3"),
        (
            "--train-samples 50 --lr-decay-iters 7 --lr-decay-tokens 160 --lr-warmup-tokens 16",
            "--train-samples 50 --lr-decay-samples 20 --lr-warmup-samples 2",
        ),
        (
            "--train-iters 50 --global-batch-size 4 --lr-decay-tokens 640",
            "--train-iters 50 --global-batch-size 4 --lr-decay-iters 20",
        ),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path t",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t",
        ),
        ("--context-parallel-algo ulysses_cp_algo", "--cp-comm-type p2p"),  # of one rank
        ("--ds-sequence-parallel-size 2", "--context-parallel-size 2"),
        ("--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size 4", ""),
        ("--tp-2d --tp-x 1 --tp-y 1 --ulysses-degree-in-cp 1", ""),
        ("--optimizer-selection fused_torch_adamw", ""),
        (
            "--lr-decay-style WSD --lr-wsd-decay-style 1-sqrt --lr-wsd-decay-iters 3",
            "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 3",
        ),
        ("--no-cuda", "--distributed-backend gloo"),
        (f"{ROPE} --use-glm-rope", f"{ROPE} --rotary-interleaved"),
        ("--add-rmsnorm-offset", "--apply-layernorm-1p"),
        (
            f"{ROPE} --v-head-dim 5 --multi-head-latent-attention --qk-rope-head-dim 4 "
            "--qk-nope-head-dim 6",
            f"{ROPE} --v-head-dim 5 --multi-latent-attention --qk-pos-emb-head-dim 4 "
            "--qk-head-dim 6",
        ),
        ("--post-norm", "--norm-position both"),
        ("--scale-emb 12", "--embedding-multiplier 12"),
        ("--embedding-multiplier-scale 3", "--embedding-multiplier 3"),
        ("--input-embeds-norm", "--embedding-multiplier 4"),
        ("--query-pre-attn-scalar 16", "--softmax-scale 0.25"),
        ("--num-layers 4 --scale-depth 3", "--num-layers 4 --residual-multiplier 1.5"),
        ("--dim-model-base 4", "--logits-scaling 4"),
        (
            "--num-layers 5 --pipeline-model-parallel-size 2 --num-layer-list 2,3",
            "--num-layers 5 --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout Ett|tttL",
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
        ("--num-key-value-heads 1", "--group-query-attention --num-query-groups 1"),
        ("--attention-head-type multiquery", "--group-query-attention --num-query-groups 1"),
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec", ""),
        ("--zero-stage 3 --zero-stage 0", ""),
        ("--tokenizer-kwargs eos_token <|endoftext|> pad_token <|extra_0|>", ""),
        ("--attention-mask-type general --use-qk-norm", "--qk-layernorm"),
        (
            f"{MOE} --moe-router-score-function sigmoid --moe-router-pre-softmax",
            f"{MOE} --moe-router-score-function sigmoid",
        ),
        ("--combined-1f1b --combined-1f1b-recipe ep_a2a --use-wandb --wandb-group g", ""),
        ("--attn-logit-softcapping 50 --output-logit-softcapping 30",) * 2,
        (f"{MOE} --first-k-dense-replace 1", f"{MOE} --moe-layer-freq [0]*1+[1]*1"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 0",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 0",
        ),
    ],
)
def test_a_flag_of_a_fork_is_the_same_run_as_flags_of_megatron(theirs, ours):
    words = RUN.replace("--train-iters 10", "") if "--train" in theirs else RUN
    found, expected = (parsed_line(f"{words} {one}") for one in (theirs, ours))
    assert found.config == expected.config
    is_told = theirs == ours or found.notices
    assert is_told or "--zero-stage 0" in theirs or ours.endswith("a2a")


@pytest.mark.parametrize(
    "words, fault",
    [
        (
            "--tokenizer-kwargs eos_token x --eod-mask-loss",
            "--tokenizer-kwargs with --eod-mask-loss is not supported here: it has no effect where",
        ),
        ("--zero-stage 7", "--zero-stage must be one of 0, 1, 2, 3 (got '7')"),
        ("--spec a b", "--spec a b is not supported here, only local or"),
        ("--num-layer-list 2,x", "--num-layer-list 2,x must have --pipeline-model-parallel-size 1"),
        ("--scale-depth -1", "--scale-depth must be above 0"),
        ("--optimizer-selection fused_ema_adamw", "--optimizer-selection fused_ema_adamw is not"),
        ("--embed-layernorm", "MindSpeed's --embed-layernorm is not supported here: this variant"),
        ("--use-quantize-comm", "HYGON's --use-quantize-comm is not supported here: what ranks"),
        (
            "--eps-clip 0.2 --sglang-ep-size 8 --rollout-batch-size 4",
            "slime's --eps-clip, --sglang-ep-size, --rollout-batch-size are not supported here",
        ),
        ("--world-size 8", "A launcher's --world-size is not supported here: the launcher's"),
        ("--global-batch-size 4 --train-tokens 0", "--train-tokens must be at least 1 (got 0)"),
        (
            "--global-batch-size 4 --rampup-batch-size 2 2 9 --train-tokens 99",
            "--train-tokens 99 with --rampup-batch-size needs --train-samples",
        ),
        ("--padded-vocab-size 3", "--padded-vocab-size 3 is below the"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
            "--recompute-num-layers 0: a unit of --recompute-method uniform has at least 1 layer",
        ),
    ],
)
def test_a_flag_that_would_change_numbers_is_refused(words, fault):
    found = fault_of(parse_args, f"{RUN} {words}")
    assert found.removeprefix("pretrain_gpt.py: error: ").startswith(fault)


def test_a_padded_vocabulary_has_the_rows_that_were_given():
    config = parsed_line(f"{RUN} --padded-vocab-size 120").config
    assert config.tokenizer.rows(1) == config.tokenizer.rows(2) == 120


def test_a_deepspeed_file_is_read_and_may_not_contradict(tmp_path):
    file = tmp_path / "ds.json"

    def line(says, words=""):
        file.write_text(json.dumps(says))
        return f"{RUN} {words} --deepspeed-config {file}"

    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    adam = {"type": "AdamW", "params": {"lr": 0.2, "betas": [0.8, 0.9]}}
    says = {"zero_optimization": zero, "bf16": {"enabled": True}, "steps_per_print": 3}
    says |= {"gradient_clipping": 0.5, "train_batch_size": "auto", "optimizer": adam}
    says |= {"fp16": {"enabled": False, "hysteresis": 3}, "curriculum_learning": {"enabled": False}}
    parsed = parsed_line(line(says))
    ours = "--use-distributed-optimizer --bf16 --clip-grad 0.5 --optimizer-cpu-offload --lr 0.2"
    ours += " --adam-beta1 0.8 --adam-beta2 0.9"
    assert parsed.config == parsed_line(f"{RUN} {ours}").config
    unread = "not read: zero_optimization.offload_optimizer.pin_memory, steps_per_print"
    assert any(one.endswith(unread) for one in parsed.notices)
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 5}
    found = parsed_line(line({"fp16": fp16, "gradient_clipping": 0.0})).config
    assert found == parsed_line(f"{RUN} --fp16 --initial-loss-scale 32 --clip-grad 0").config
    on = {"enabled": True}
    for words, wrong, said in (
        ("", {"bf16": {"enabled": "true"}}, "bf16.enabled must be true or false (got 'true')"),
        ("", {"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3 (got 4)"),
        ("", {"zero_optimization": {"stage": [1]}}, "stage must be a whole number (got [1])"),
        ("", {"train_micro_batch_size_per_gpu": 2.0}, "must be a whole number (got 2.0)"),
        ("", [1], "the file must be an object (got [1])"),
        ("--clip-grad 1", says, "gradient_clipping 0.5 contradicts --clip-grad 1.0"),
        ("--bf16", {"bf16": {"enabled": False}}, "bf16.enabled False contradicts --bf16: make"),
        ("--no-bf16", says, "bf16.enabled True contradicts --no-bf16: make"),
        ("--zero-stage=0", says, "zero_optimization.stage 2 contradicts --zero-stage 0: make"),
        ("--use-torch-fsdp2", says, "stage 2 contradicts --use-torch-fsdp2: leave one out"),
        ("", {"zero_optimization": zero | {"stage": 3}}, "stage 3 excludes states on the host"),
        ("", {"data_types": {"grad_accum_dtype": "bf16"}}, "contradicts --main-grads-dtype fp32"),
        ("", {"communication_data_type": "fp8"}, "must be fp32 or bf16 (got 'fp8')"),
        ("", {"gradient_accumulation_steps": 3}, "needs train_batch_size or --global-batch-size"),
        ("", {"optimizer": {"type": "Lamb"}}, "optimizer.type must be adam or adamw (got 'Lamb')"),
        (
            "",
            {"curriculum_learning": on, "bf16": on, "scheduler": {"type": "OneCycle"}, "no_such": 1}
            | {"zero_optimization": {"zero_quantized_weights": True, "overlap_comm": True}}
            | {"optimizer": {"params": {"adam_w_mode": False}}},
            "not supported here: curriculum_learning, scheduler.type, no_such, "
            "zero_optimization.zero_quantized_weights, optimizer.params.adam_w_mode. Leave",
        ),
    ):
        assert said in fault_of(parse_args, line(wrong, words))


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
