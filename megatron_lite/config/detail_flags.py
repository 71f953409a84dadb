"""The settings of features of Megatron-LM that are not built.

Without the flag that turns the feature on they change nothing, and are accepted. With it, that flag
is refused. Each row has the flag, and the names of the settings; a name that ends with "=" takes a
value, and one that ends with "=*" takes several. `flags.py` reads the table.
"""

from __future__ import annotations

DETAILS: tuple[tuple[str, str], ...] = (
    (
        "--num-experts",
        """ep-overlap-early-attn-memory-release expert-tensor-parallel-num-weight-shards=
         expert-tensor-parallel-size= gtp-expert-remat-nccl-ub high-priority-a2a-comm-stream
         moe-apply-probs-on-input moe-aux-loss-coeff=* moe-combine-bwd-dtype=
         moe-deepep-num-sms= moe-dispatch-fwd-dtype= moe-enable-deepep
         moe-enable-routing-replay moe-expert-capacity-factor=
         moe-expert-rank-capacity-factor= moe-extended-tp moe-ffn-hidden-size=
         moe-flex-dispatcher-backend= moe-flex-dispatcher-num-sms= moe-grouped-gemm
         moe-hybridep-num-blocks-permute= moe-hybridep-num-blocks-unpermute=
         moe-hybridep-num-sms= moe-hybridep-num-sms-preprocessing=
         moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps= moe-latent-size=
         moe-layer-freq= moe-layer-recompute moe-mlp-glu-interleave-size= moe-ncclep-zero-copy
         moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference
         moe-paged-stash moe-paged-stash-buffer-size-factor-cpu=
         moe-paged-stash-buffer-size-factor-cuda= moe-paged-stash-page-size=
         moe-per-layer-logging moe-permute-fusion moe-permute-fusion-into-hybridep
         moe-router-bias-update-rate= moe-router-dtype= moe-router-enable-expert-bias
         moe-router-force-biased= moe-router-force-load-balancing moe-router-fusion
         moe-router-group-topk= moe-router-load-balancing-type=* moe-router-num-groups=
         moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
         moe-router-quantile-balancing-ema= moe-router-score-function= moe-router-topk=
         moe-router-topk-scaling-factor= moe-routing-trace-capture-hidden-states
         moe-routing-trace-capture-logits moe-routing-trace-dump-weights
         moe-routing-trace-max-training-iters= moe-routing-trace-path= moe-shared-expert-gate
         moe-shared-expert-glu-interleave-size= moe-shared-expert-intermediate-size=
         moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight
         moe-token-dispatcher-type= moe-token-drop-policy= moe-token-dropping
         moe-upcycling-granularity= moe-use-grouped-tensor moe-use-legacy-grouped-gemm
         moe-z-loss-coeff= overlap-dispatch-backward-with-experts-wgrad
         overlap-moe-expert-parallel-comm save-tokens-per-expert-interval=
         use-fused-weighted-squared-relu use-grouped-gemm-for-shared-expert""",
    ),
    (
        "--multi-latent-attention",
        """cache-mla-latents kv-lora-rank= mla-down-proj-fusion mscale= mscale-all-dim= q-lora-rank=
         qk-head-dim= qk-pos-emb-head-dim= rotary-scaling-factor= v-head-dim=""",
    ),
    (
        "--experimental-attention-variant",
        """disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
         dsa-indexer-head-dim= dsa-indexer-k-norm-epsilon= dsa-indexer-k-norm-fp32
         dsa-indexer-loss-coeff= dsa-indexer-n-heads= dsa-indexer-rope-interleaved
         dsa-indexer-skip-topk-offset=
         dsa-indexer-topk= dsa-indexer-topk-freq= dsa-indexer-use-sparse-loss
         dsa-kernel-backend= linear-attention-freq= linear-conv-kernel-dim=
         linear-key-head-dim= linear-num-key-heads= linear-num-value-heads=
         linear-value-head-dim= no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu""",
    ),
    ("--qk-clip", """qk-clip-alpha= qk-clip-threshold="""),
    (
        "--hybrid-layer-pattern",
        """disable-mamba-mem-eff-path gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute=
         gdp-num-householder= hybrid-attention-ratio= hybrid-mlp-ratio= mamba-head-dim=
         mamba-num-groups= mamba-num-heads= mamba-state-dim= mamba-training-ssm-states-dtype=""",
    ),
    (
        "--mtp-num-layers",
        """mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern= mtp-loss-scaling-factor=
         mtp-standalone mtp-use-repeated-layer""",
    ),
    (
        "--use-mup",
        """mup-attn-scale-power= mup-base-head-dim= mup-base-hidden-size= mup-embedding-mult=
         mup-output-mult= mup-width-mult=""",
    ),
    (
        "--enable-mhc-connections",
        """mhc-init-gating-factor= mhc-num-residual-streams= mhc-recompute-layer-num=
         mhc-sinkhorn-iterations=""",
    ),
    (
        "--fp8-format",
        """disable-fp8-wgrad first-last-layers-bf16 fp8-amax-compute-algo= fp8-amax-history-len=
         fp8-interval= fp8-margin= fp8-output-proj fp8-param-gather fp8-quantizer-factory=
         fp8-recipe= keep-fp8-transpose-cache keep-fp8-transpose-cache-when-using-custom-fsdp
         no-fp8-wgrad num-layers-at-end-in-bf16= num-layers-at-start-in-bf16=
         reuse-grad-buf-for-mxfp8-param-ag""",
    ),
    ("--fp4-format", """fp4-param-gather fp4-quantizer-factory= fp4-recipe="""),
    ("--hybrid-context-parallel", """max-seqlen-per-dp-cp-rank="""),
    (
        "--optimizer-cpu-offload",
        """no-pin-cpu-grads no-pin-cpu-params optimizer-offload-fraction=
         use-torch-optimizer-for-cpu-offload""",
    ),
    ("--optimizer sgd", """sgd-momentum="""),
    ("--optimizer lion", """lion-beta1= lion-beta2="""),
    (
        "--position-embedding-type yarn",
        """no-yarn-correction-range-round-to-int yarn-beta-fast= yarn-beta-slow=
         yarn-correction-range-round-to-int yarn-original-max-position-embeddings=""",
    ),
    ("--position-embedding-type mrope", """mrope-section=*"""),
    (
        "--position-embedding-type relative",
        """relative-attention-max-distance= relative-attention-num-buckets=""",
    ),
    ("--multiple-validation-sets", """validation-set-names=*"""),
    (
        "--fim-data",
        """fim-eod-token= fim-fragment-rate= fim-middle-token= fim-no-prefix= fim-pad-token=
         fim-prefix-token= fim-rate= fim-split-sample= fim-spm-rate= fim-suffix-token=""",
    ),
    ("--sft", """sft-tokenizer-prompt-format="""),
    (
        "--perform-rl-step",
        """grpo-clamp-eps-lower= grpo-clamp-eps-upper= grpo-default-temperature= grpo-default-top-p=
         grpo-entropy-term-weight= grpo-filter-groups-with-same-reward grpo-group-size=
         grpo-iterations= grpo-kl-beta= grpo-prompts-per-step= langrl-env-config=
         langrl-external-server langrl-inference-server-conversation-template=
         langrl-inference-server-type= no-rl-inference-logprobs-is-correction
         no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts
         no-rl-persist-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs
         no-rl-use-sequence-packing no-rl-verify-model-weights-swap refit-method=
         rl-calculate-intra-group-similarity rl-consumption-granularity=
         rl-default-temperature= rl-default-top-k= rl-default-top-p= rl-durable-rollout-bank
         rl-generation-lag= rl-importance-sampling-truncation-coef=
         rl-inference-expert-model-parallel-size=
         rl-inference-expert-tensor-model-parallel-size= rl-inference-logprobs-is-correction
         rl-inference-model-unified-memory-level= rl-inference-parsers=*
         rl-inference-pipeline-model-parallel-size= rl-inference-tensor-model-parallel-size=
         rl-kv-cache-management-mode= rl-max-inflight-requests=
         rl-offload-inference-model-weights-when-idle rl-offload-kv-cache-during-training
         rl-offload-optimizer-during-inference rl-partial-rollouts rl-persist-cuda-graphs
         rl-profile rl-profile-dir= rl-prompts-per-eval= rl-remove-kv-cache-during-training
         rl-reset-cuda-graphs rl-rollout-bank-dir= rl-rollout-bank-max-bytes=
         rl-sequence-packing-algo= rl-sequence-packing-bin-size=
         rl-sequence-packing-max-sequences-per-bin= rl-skip-bos-token
         rl-submission-granularity= rl-training-cuda-graphs rl-use-sequence-packing
         rl-verify-model-weights-swap""",
    ),
    (
        "--logits-save-dir",
        """logits-save-dtype= logits-save-top-k= logits-save-top-p= logits-save-top-p-min-k=""",
    ),
    (
        "--logits-load-dir",
        """logits-load-decode-threads= logits-load-ignore-errors logits-load-kd-loss-alpha=
         logits-load-msc-prefetch-depth= logits-load-prefetch-factor=""",
    ),
    (
        "--non-persistent-save-interval",
        """non-persistent-ckpt-type= non-persistent-global-ckpt-dir= non-persistent-local-ckpt-algo=
         non-persistent-local-ckpt-dir= replication replication-factor= replication-jump=""",
    ),
    ("--error-injection-rate", """error-injection-type="""),
    (
        "--fault-injector-fault-types",
        """fault-injector-delay-start-iteration= fault-injector-fault-delay=
         fault-injector-fault-probabilities= fault-injector-mtti-seconds=
         fault-injector-num-ranks= fault-injector-offset-seconds= fault-injector-ranks=
         fault-injector-seed=""",
    ),
    (
        "--retro-add-retriever",
        """retro-attention-gate= retro-cyclic-train-iters= retro-encoder-attention-dropout=
         retro-encoder-hidden-dropout= retro-encoder-layers= retro-no-verify-neighbor-count
         retro-num-neighbors= retro-num-retrieved-chunks= retro-project-dir=
         retro-return-doc-ids retro-workdir=""",
    ),
)
