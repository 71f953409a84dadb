"""All flags of Megatron-LM that this program refuses, grouped by the reason.

A flag is refused if it would change numbers, or if it promises something that the user would miss,
such as a file. Each entry has the reason with the nearest setting that works, and the names of the
flags without their leading dashes. `flags.py` reads the table. The flags that change nothing are in
`ignored_flags.py` and `detail_flags.py`.
"""

from __future__ import annotations

from megatron_lite.config.optimizer_settings import REFUSED_OPTIMIZER_FLAGS

REFUSED_FAMILIES: tuple[tuple[str, str], ...] = (
    (
        (
            "read a run from a file with --config-json FILE (as --dump-config prints it); flags "
            "override it"
        ),
        """yaml-cfg""",
    ),
    (
        (
            "activations go to host memory by a policy; use --recompute-policy '*:none@host' or "
            "the like"
        ),
        """activation-offload-fraction delay-offload-until-cuda-graph
         delta-offload-bytes-across-pp-ranks
         fine-grained-offloading-max-inflight-offloads gtp-remat-opt-in-modules""",
    ),
    (
        "stages get equal numbers of layers, but for the first and last rank; use "
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        """pipeline-model-parallel-layout""",
    ),
    (
        (
            "all sequences have one length, and one group of ranks shares each; use "
            "--context-parallel-size alone"
        ),
        """hybrid-context-parallel""",
    ),
    (
        "data-parallel ranks share out optimizer states with --use-distributed-optimizer, and "
        "weights and gradients too with --use-torch-fsdp2; there is no other way",
        """tensor-parallel-num-weight-shards use-custom-fsdp""",
    ),
    (
        "weights, gradients and their sums are float32 beside the weights of --bf16 or --fp16; use "
        "--grad-reduce-in-bf16",
        """megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype
         megatron-fsdp-main-params-dtype""",
    ),
    (
        "every rank of a run is a process; use --dry-run-memory to see what ranks need without "
        "their machines",
        """fake-process-group""",
    ),
    (
        "mixture-of-experts layers are not built; train a dense model without the expert flags",
        """activation-func-clamp-value expert-model-parallel-size glu-linear-offset
         moe-use-upcycling num-experts quick-geglu""",
    ),
    (
        "multi-latent attention is not built; use --group-query-attention",
        """multi-latent-attention""",
    ),
    (
        "attention is causal multi-head or grouped-query attention over the whole sequence or a "
        "window; use --group-query-attention or --window-size",
        """attention-output-gate experimental-attention-variant qk-clip qk-l2-norm softmax-type""",
    ),
    (
        "state-space and hybrid layers are not built; every layer is a transformer layer",
        """hybrid-layer-pattern hybrid-override-pattern is-hybrid-model""",
    ),
    (
        "multi-token prediction is not built; the loss is next-token cross-entropy",
        """mtp-num-layers""",
    ),
    (
        "muP and hyper-connections are not built; set --init-method-std and --lr",
        """enable-mhc-connections use-mup""",
    ),
    (
        (
            "this position embedding is not built; use --position-embedding-type learned_absolute, "
            "rope or none"
        ),
        """rope-type rotary-interleaved""",
    ),
    (
        (
            "this variant of the layer or of its initial weights is not built; see --help for the "
            "model flags"
        ),
        """apply-residual-connection-post-layernorm data-parallel-random-init
         embedding-init-method-std heterogeneous-layers-config-encoded-json
         heterogeneous-layers-config-path init-method-xavier-uniform openai-gelu spec""",
    ),
    (
        "8-bit and 4-bit arithmetic is not built; use --bf16",
        """fp4-format fp8-e4m3 fp8-format fp8-hybrid kitchen-config-file kitchen-recipe-number
         kitchen-attention-backend te-precision-config-file use-kitchen-attention""",
    ),
    (
        (
            "the precision of a run is float32, or --bf16 or --fp16 with float32 losses, gradients "
            "and master weights"
        ),
        """disable-bf16-reduced-precision-matmul embedding-weights-in-fp32 fp16-lm-cross-entropy
         output-logit-dtype""",
    ),
    REFUSED_OPTIMIZER_FLAGS,
    (
        "one learning rate and one constant weight decay (none for biases and norms) hold for all "
        "weights; use --lr and --weight-decay",
        """apply-wd-to-qk-layernorm end-weight-decay
         freeze-all-layers no-weight-decay-cond-type start-weight-decay
         weight-decay-incr-style""",
    ),
    (
        "a run ends after --train-iters, --train-samples, --exit-interval, --exit-duration-in-mins "
        "or by --exit-signal-handler, and resumes with --load",
        """exit-signal-handler-for-training iterations-to-skip""",
    ),
    (
        (
            "validation runs --eval-iters batches of the validation split every --eval-interval "
            "iterations"
        ),
        """eval-global-batch-size eval-micro-batch-size full-validation multiple-validation-sets
         skip-train start-eval-at-iter""",
    ),
    (
        "--load DIR reads the iteration named in DIR/latest_checkpointed_iteration.txt",
        """ckpt-step load-main-params-from-ckpt override-ckpt-iteration pretrained-checkpoint""",
    ),
    (
        "only checkpoints are written; use --save, --save-interval and --save-retain-interval",
        """save-activations-interval save-dgrads-interval save-params-interval
         save-wgrads-interval""",
    ),
    (
        (
            "checkpoints have one format, safetensors and JSON, which loads at every "
            "tensor-parallel size"
        ),
        """ckpt-convert-format ckpt-convert-save non-persistent-save-interval""",
    ),
    (
        (
            "documents are kept apart by --reset-attention-mask, --reset-position-ids and "
            "--eod-mask-loss"
        ),
        """dataloader-inter-document-masking""",
    ),
    (
        "data comes from --data-path cut by --split, from --train-data-path and the like, or from "
        "--mock-data",
        """fim-data mid-level-dataset-surplus phase-transition-iterations
         renormalize-blend-weights""",
    ),
    (
        (
            "the vocabulary is padded to a multiple of --make-vocab-size-divisible-by and the "
            "tensor-parallel size"
        ),
        """disable-pad-vocab-size no-pad-vocab-size padded-vocab-size vocab-extra-ids""",
    ),
    (
        (
            "tokenizers are read as their files say; use --tokenizer-type HuggingFaceTokenizer "
            "with --tokenizer-model"
        ),
        """chat-template disable-tokenizer-sentencepiece-ignore-extra-whitespaces
         no-tokenizer-sentencepiece-ignore-extra-whitespaces null-tokenizer-eod-id
         null-tokenizer-pad-id
         tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-metadata
         tokenizer-sentencepiece-legacy use-gigatoken""",
    ),
    (
        (
            "the data is plain text without prompts; prepare it with "
            "megatron_lite.tools.preprocess_data"
        ),
        """sft""",
    ),
    ("this program pretrains and does not do reinforcement learning", """perform-rl-step"""),
    (
        "kernels are chosen by --attention-backend and --deterministic-mode; leave the flag out",
        """batch-invariant-backend batch-invariant-mode""",
    ),
    (
        "the loss is next-token cross-entropy of the data, without a teacher",
        """logits-load-dir logits-save-dir""",
    ),
    (
        "a run reports to the terminal, --metrics-jsonl and --tensorboard-dir",
        """log-device-memory-used log-memory-interval""",
    ),
    (
        "no Chakra trace is written; --profile --use-pytorch-profiler writes a Chrome trace",
        """pytorch-profiler-collect-chakra""",
    ),
    (
        "no faults are injected into a run; leave the flag out",
        """error-injection-rate fault-injector-fault-types""",
    ),
    ("the model is a GPT; BERT, T5 and retrieval models are not built", """retro-add-retriever"""),
)
