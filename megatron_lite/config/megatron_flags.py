"""All flags of Megatron-LM that this program refuses, grouped by the reason.

Each entry has the reason with the nearest setting that works, and the names of the flags without
their leading dashes. `flags.py` reads the table.
"""

from __future__ import annotations

from megatron_lite.config.optimizer_settings import REFUSED_OPTIMIZER_FLAGS

REFUSED_FAMILIES: tuple[tuple[str, str], ...] = (
    (
        "the model is a decoder; use --num-layers and --seq-length",
        """decoder-num-layers decoder-seq-length encoder-num-layers encoder-seq-length""",
    ),
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
        """activation-offload-fraction cpu-offloading-num-layers
         cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph
         delta-offload-bytes-across-pp-ranks fine-grained-activation-offloading
         fine-grained-offloading-max-inflight-offloads gtp-remat-opt-in-modules
         min-offloaded-tensor-size offload-modules""",
    ),
    (
        "stages get equal numbers of layers, but for the first and last rank; use "
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
        """account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
         pipeline-model-parallel-layout""",
    ),
    (
        (
            "ranks are numbered tensor-parallel first, then context-parallel, data-parallel, and "
            "by pipeline stage; leave the flag out"
        ),
        """use-tp-pp-dp-mapping""",
    ),
    (
        (
            "the pipeline runs 1F1B, interleaved with --num-virtual-stages-per-pipeline-rank; "
            "leave the flag out"
        ),
        """defer-embedding-wgrad-compute microbatch-group-size-per-virtual-pipeline-stage
         overlap-p2p-communication-warmup-flush pipeline-model-parallel-comm-backend
         use-ring-exchange-p2p wgrad-deferral-limit""",
    ),
    (
        (
            "all sequences have one length, and one group of ranks shares each; use "
            "--context-parallel-size alone"
        ),
        """hierarchical-context-parallel-sizes hybrid-context-parallel max-seqlen-per-dp-cp-rank""",
    ),
    (
        "data-parallel ranks share out optimizer states with --use-distributed-optimizer, and "
        "weights and gradients too with --use-torch-fsdp2; there is no other way",
        """data-parallel-sharding-strategy disable-strict-fsdp-dtensor-load
         enable-full-sharding-in-hsdp fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer
         fsdp-manual-registration init-model-with-meta-device
         megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype
         megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
         megatron-fsdp-max-pool-double-buffer megatron-fsdp-version no-align-param-gather
         no-strict-fsdp-dtensor-load no-use-layer-wise-param-layout
         num-distributed-optimizer-instances outer-dp-sharding-strategy
         overlap-param-gather-with-optimizer-step use-megatron-fsdp""",
    ),
    (
        "communication is not tuned further; leave the flag out, the results are the same",
        """create-all-gather-group ddp-average-in-collective ddp-num-buckets
         ddp-pad-buckets-for-high-nccl-busbw
         ddp-param-name-patterns-for-fp32-local-accumulation
         ddp-reduce-scatter-with-fp32-accumulation delay-wgrad-compute
         disable-align-grad-reduce disable-clone-scatter-output-in-embedding
         disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
         disable-flight-recorder-include-only-active disable-symmetric-registration
         disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag
         disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
         fake-process-group flight-recorder-dump-path flight-recorder-include-stack-trace
         flight-recorder-trace-buffer-size gtp-remat-nccl-ub
         gtp-remat-reduce-scatter-with-fp32-accumulation high-priority-stream-groups
         lazy-mpu-init nccl-all-reduce-for-prefill nccl-communicator-config-path
         no-align-grad-reduce no-clone-scatter-output-in-embedding
         no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
         no-flight-recorder-include-only-active no-gradient-reduce-div-fusion
         no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag
         no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs
         overlap-cpu-optimizer-d2h-h2d sharp-enabled-group suggested-communication-unit-size
         symmetric-ar-type tensor-parallel-num-weight-shards tp-comm-bootstrap-backend
         tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad use-nccl-ub use-sharp""",
    ),
    (
        "mixture-of-experts layers are not built; train a dense model without the expert flags",
        """activation-func-clamp-value ep-overlap-early-attn-memory-release
         expert-model-parallel-size expert-tensor-parallel-num-weight-shards
         expert-tensor-parallel-size glu-linear-offset gtp-expert-remat-nccl-ub
         high-priority-a2a-comm-stream moe-apply-probs-on-input moe-aux-loss-coeff
         moe-combine-bwd-dtype moe-deepep-num-sms moe-dispatch-fwd-dtype moe-enable-deepep
         moe-enable-routing-replay moe-expert-capacity-factor moe-expert-rank-capacity-factor
         moe-ffn-hidden-size moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms
         moe-grouped-gemm moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute
         moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing
         moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps moe-latent-size
         moe-layer-freq moe-layer-recompute moe-mlp-glu-interleave-size moe-ncclep-zero-copy
         moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference
         moe-paged-stash moe-paged-stash-buffer-size-factor-cpu
         moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size
         moe-per-layer-logging moe-permute-fusion moe-permute-fusion-into-hybridep
         moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
         moe-router-force-biased moe-router-force-load-balancing moe-router-fusion
         moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups
         moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
         moe-router-quantile-balancing-ema moe-router-score-function moe-router-topk
         moe-router-topk-scaling-factor moe-routing-trace-capture-hidden-states
         moe-routing-trace-capture-logits moe-routing-trace-dump-weights
         moe-routing-trace-max-training-iters moe-routing-trace-path moe-shared-expert-gate
         moe-shared-expert-glu-interleave-size moe-shared-expert-intermediate-size
         moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight
         moe-token-dispatcher-type moe-token-drop-policy moe-upcycling-granularity
         moe-use-grouped-tensor moe-use-upcycling moe-z-loss-coeff num-experts
         overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm
         quick-geglu save-tokens-per-expert-interval use-fused-weighted-squared-relu
         use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert""",
    ),
    (
        "multi-latent attention is not built; use --group-query-attention",
        """cache-mla-latents kv-lora-rank mla-down-proj-fusion mscale mscale-all-dim
         multi-latent-attention q-lora-rank qk-head-dim qk-pos-emb-head-dim
         rotary-scaling-factor v-head-dim""",
    ),
    (
        "attention is causal multi-head or grouped-query attention over the whole sequence or a "
        "window; use --group-query-attention or --window-size",
        """attention-output-gate disable-dsa-indexer-rotate-activation
         disable-dsa-indexer-scoring-relu dsa-indexer-head-dim dsa-indexer-k-norm-epsilon
         dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff dsa-indexer-n-heads
         dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset dsa-indexer-topk
         dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend
         experimental-attention-variant flash-attention-version linear-attention-freq
         linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads
         linear-num-value-heads linear-value-head-dim no-dsa-indexer-rotate-activation
         no-dsa-indexer-scoring-relu qk-clip qk-clip-alpha qk-clip-threshold qk-l2-norm
         softmax-type""",
    ),
    (
        "state-space and hybrid layers are not built; every layer is a transformer layer",
        """disable-mamba-mem-eff-path gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute
         gdp-num-householder hybrid-layer-pattern hybrid-override-pattern is-hybrid-model
         mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim
         mamba-training-ssm-states-dtype""",
    ),
    (
        "multi-token prediction is not built; the loss is next-token cross-entropy",
        """mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern mtp-loss-scaling-factor
         mtp-num-layers mtp-standalone mtp-use-repeated-layer""",
    ),
    (
        "muP and hyper-connections are not built; set --init-method-std and --lr",
        """enable-mhc-connections mhc-init-gating-factor mhc-num-residual-streams
         mhc-recompute-layer-num mhc-sinkhorn-iterations mup-attn-scale-power
         mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult
         mup-width-mult use-mup""",
    ),
    (
        (
            "this position embedding is not built; use --position-embedding-type learned_absolute, "
            "rope or none"
        ),
        """mrope-section no-yarn-correction-range-round-to-int relative-attention-max-distance
         relative-attention-num-buckets rope-type rotary-interleaved yarn-beta-fast yarn-beta-slow
         yarn-correction-range-round-to-int yarn-original-max-position-embeddings""",
    ),
    (
        (
            "this variant of the layer or of its initial weights is not built; see --help for the "
            "model flags"
        ),
        """apply-residual-connection-post-layernorm config-logger-dir
         data-parallel-random-init embedding-init-method-std fused-residual-rmsnorm
         heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path
         init-method-xavier-uniform mlp-chunks-for-training no-initialization onnx-safe
         openai-gelu spec use-te-activation-func use-transformer-engine-op-fuser""",
    ),
    (
        "8-bit and 4-bit arithmetic is not built; use --bf16",
        """disable-fp8-wgrad first-last-layers-bf16 fp4-format fp4-param-gather
         fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo fp8-amax-history-len
         fp8-format fp8-interval fp8-margin fp8-output-proj fp8-param-gather
         fp8-quantizer-factory fp8-recipe keep-fp8-transpose-cache kitchen-attention-backend
         no-fp8-wgrad num-layers-at-end-in-bf16 num-layers-at-start-in-bf16
         reuse-grad-buf-for-mxfp8-param-ag te-precision-config-file use-kitchen-attention""",
    ),
    (
        (
            "the precision of a run is float32, or --bf16 or --fp16 with float32 losses, gradients "
            "and master weights"
        ),
        """disable-bf16-reduced-precision-matmul fp16-lm-cross-entropy
         output-logit-dtype""",
    ),
    REFUSED_OPTIMIZER_FLAGS,
    (
        "one learning rate and one constant weight decay (none for biases and norms) hold for all "
        "weights; use --lr and --weight-decay",
        """apply-wd-to-qk-layernorm decoupled-lr decoupled-min-lr end-weight-decay
         freeze-all-layers no-weight-decay-cond-type start-weight-decay
         weight-decay-incr-style""",
    ),
    (
        (
            "the learning rate always follows the flags; give the flags of the run that saved the "
            "checkpoint"
        ),
        """use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler""",
    ),
    (
        "every batch must be divisible by --micro-batch-size x data-parallel size; use "
        "--global-batch-size and --rampup-batch-size, whose steps are equal",
        """decrease-batch-size-if-needed step-batch-size-schedule""",
    ),
    (
        "a run ends after --train-iters, --train-samples, --exit-interval, --exit-duration-in-mins "
        "or by --exit-signal-handler, and resumes with --load",
        """exit-signal-handler-for-dataloader exit-signal-handler-for-training
         iterations-to-skip result-rejected-tracker-filename train-sync-interval""",
    ),
    (
        "the loss and the gradient norm are checked for NaN at each iteration; use "
        "--skip-update-on-spike for losses far above their mean",
        """check-for-large-grads check-for-spiky-loss gpu-sniff-test-interval""",
    ),
    (
        (
            "validation runs --eval-iters batches of the validation split every --eval-interval "
            "iterations"
        ),
        """eval-global-batch-size eval-micro-batch-size full-validation multiple-validation-sets
         skip-train start-eval-at-iter test-mode validation-set-names""",
    ),
    (
        "a background save is one thread of each rank; use --async-save alone",
        """async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm async-strategy
         use-persistent-ckpt-worker""",
    ),
    (
        (
            "a checkpoint always holds the optimizer and the random streams; use --no-load-optim "
            "and --no-load-rng"
        ),
        """no-save-optim no-save-rng""",
    ),
    (
        "the model comes from the flags; give them again, or --config-json FILE",
        """use-checkpoint-args use-mp-args-from-checkpoint-args""",
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
        """ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
         ckpt-drop-redundant-extra-state ckpt-fully-parallel-load-exchange-algo
         ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group
         ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
         ckpt-pg-tensors-cache-path disable-ckpt-load-validate-sharding-integrity
         disable-save-tokenizer-assets dist-ckpt-save-pre-mcore-014
         distrib-optim-fully-reshardable-mem-efficient
         no-ckpt-load-validate-sharding-integrity no-save-tokenizer-assets
         non-persistent-ckpt-type non-persistent-global-ckpt-dir
         non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir
         non-persistent-save-interval replication replication-factor replication-jump""",
    ),
    (
        (
            "documents are kept apart by --reset-attention-mask, --reset-position-ids and "
            "--eod-mask-loss"
        ),
        """dataloader-inter-document-masking""",
    ),
    (
        "the indices of the data are built once a node, and mapped when the run starts",
        """dataloader-defer-npy-index-mmap dataloader-fast-cache-load""",
    ),
    (
        "data comes from --data-path cut by --split, from --train-data-path and the like, or from "
        "--mock-data",
        """allow-ambiguous-pad-tokens disable-msc enable-msc fim-data
         fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token
         fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token
         mid-level-dataset-surplus object-storage-cache-path per-dataset-sequences-path
         phase-transition-iterations""",
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
         null-tokenizer-pad-id tiktoken-num-special-tokens tiktoken-pattern
         tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-metadata
         tokenizer-sentencepiece-legacy tokenizer-special-tokens use-gigatoken""",
    ),
    (
        (
            "the data is plain text without prompts; prepare it with "
            "megatron_lite.tools.preprocess_data"
        ),
        """sft sft-tokenizer-prompt-format""",
    ),
    (
        "this program pretrains and does not do reinforcement learning",
        """grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight
         grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta
         grpo-prompts-per-step langrl-env-config no-rl-inference-logprobs-is-correction
         no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts
         no-rl-persist-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs
         no-rl-use-sequence-packing no-rl-verify-model-weights-swap perform-rl-step
         refit-method rl-consumption-granularity rl-default-temperature rl-default-top-k
         rl-default-top-p rl-durable-rollout-bank rl-generation-lag
         rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
         rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
         rl-inference-model-unified-memory-level rl-inference-parsers
         rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size
         rl-kv-cache-management-mode rl-max-inflight-requests
         rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference
         rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir
         rl-prompts-per-eval rl-rollout-bank-dir rl-rollout-bank-max-bytes
         rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token
         rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing
         rl-verify-model-weights-swap""",
    ),
    (
        "this program trains; generate text with python -m megatron_lite.tools.generate",
        """batch-invariant-backend batch-invariant-mode decode-only-cuda-graphs
         enable-chunked-prefill flash-decode inference-batch-times-seqlen-threshold
         inference-coordinator-port inference-cuda-graph-all-prefills
         inference-cuda-graph-max-tokens inference-cuda-graph-scope
         inference-disable-ep-consensus inference-disable-triton-nvls-kernels
         inference-dynamic-batching inference-dynamic-batching-async-sched-mode
         inference-dynamic-batching-block-size inference-dynamic-batching-buffer-size-gb
         inference-dynamic-batching-cuda-graph-mixed-prefill-count
         inference-dynamic-batching-cuda-graph-sizing-distribution
         inference-dynamic-batching-logprobs-mode
         inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
         inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
         inference-dynamic-batching-paused-buffer-size-gb
         inference-dynamic-batching-prefix-caching
         inference-dynamic-batching-prefix-caching-coordinator-policy
         inference-dynamic-batching-prefix-caching-eviction-policy
         inference-dynamic-batching-prefix-caching-mamba-gb
         inference-dynamic-batching-prefix-caching-routing-alpha
         inference-dynamic-batching-sampling-backend
         inference-dynamic-batching-track-generated-token-events
         inference-dynamic-batching-track-paused-request-events
         inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication
         inference-grouped-gemm-backend inference-logging-step-interval inference-max-requests
         inference-max-seq-length inference-moe-disable-fused-quant-kernels
         inference-moe-token-dispatcher-type inference-shards
         inference-text-gen-server-logging inference-use-synchronous-zmq-collectives
         inference-wandb-logging mamba-inference-conv-states-dtype
         mamba-inference-ssm-states-dtype max-tokens-to-oom mlp-chunks-for-prefill
         no-inference-disable-ep-consensus no-inference-dynamic-batching-prefix-caching
         no-inference-text-gen-server-logging no-inference-use-synchronous-zmq-collectives
         no-inference-wandb-logging num-speculative-tokens use-legacy-static-engine
         use-same-sampling-seed-across-dp-ranks""",
    ),
    (
        "CUDA graphs are not captured; leave the flag out",
        """cuda-graph-impl cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps
         enable-cuda-graph external-cuda-graph""",
    ),
    (
        "the loss is next-token cross-entropy of the data, without a teacher",
        """logits-load-decode-threads logits-load-dir logits-load-ignore-errors
         logits-load-kd-loss-alpha logits-load-msc-prefetch-depth logits-load-prefetch-factor
         logits-save-dir logits-save-dtype logits-save-top-k logits-save-top-p
         logits-save-top-p-min-k""",
    ),
    (
        "the model is a GPT; BERT, T5 and retrieval models are not built",
        """bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim
         biencoder-shared-query-context-model block-data-path embedding-path
         evidence-data-path ict-head-size ict-load indexer-batch-size indexer-log-interval
         mask-prob output-bert-embeddings query-in-block-prob retriever-report-topk-accuracies
         retriever-score-scaling sample-rate short-seq-prob titles-data-path use-one-sent-docs""",
    ),
    (
        "the model reads text; vision models are not built",
        """classes-fraction data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer
         dino-head-hidden-size dino-local-crops-number dino-local-img-size
         dino-norm-last-layer dino-teacher-temp dino-warmup-teacher-temp
         dino-warmup-teacher-temp-epochs head-lr-mult img-h img-w iter-per-epoch mask-factor
         mask-type num-channels num-classes patch-dim swin-backbone-type
         vision-backbone-type vision-pretraining vision-pretraining-type""",
    ),
    (
        "a run reports to the terminal, --metrics-jsonl and --tensorboard-dir",
        """adlr-autoresume adlr-autoresume-interval app-tag-run-name app-tag-run-version
         disable-log-loss-scale-to-tensorboard disable-straggler-on-startup
         log-device-memory-used log-energy log-max-attention-logit log-memory-interval
         log-progress log-world-size-to-tensorboard no-log-loss-scale-to-tensorboard
         one-logger-async one-logger-project one-logger-run-name otel-enabled
         otel-service-name otel-span-groups run-workload-inspector-server straggler-ctrlr-port
         tensorboard-log-interval wandb-entity wandb-exp-name wandb-project wandb-save-dir""",
    ),
    (
        "there is no profiler inside; run the program under one, or use --log-throughput",
        """memory-snapshot-path nvtx-ranges profile profile-ranks profile-step-end
         profile-step-start pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
         pytorch-profiler-collect-shapes record-memory-history record-shapes
         use-pytorch-profiler""",
    ),
    (
        "a stopped run is started again with --load DIR, and there is no supervisor inside",
        """calc-ft-timeouts enable-ft-package error-injection-rate error-injection-type
         fault-injector-delay-start-iteration fault-injector-fault-delay
         fault-injector-fault-probabilities fault-injector-fault-types
         fault-injector-mtti-seconds fault-injector-num-ranks fault-injector-offset-seconds
         fault-injector-ranks fault-injector-seed ft-num-warmup-iters
         inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout
         inprocess-empty-cuda-cache inprocess-granularity inprocess-hard-timeout
         inprocess-heartbeat-interval inprocess-heartbeat-timeout inprocess-last-call-wait
         inprocess-max-iterations inprocess-monitor-process-interval
         inprocess-monitor-thread-interval inprocess-progress-watchdog-interval
         inprocess-restart inprocess-soft-timeout inprocess-termination-grace-time rerun-mode""",
    ),
)
