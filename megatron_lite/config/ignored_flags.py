"""The flags of Megatron-LM that are accepted and change no result, grouped by the reason.

They are the flags of all releases from v1.0 to today. A name that ends with "=" takes a value, and
one that ends with "=*" takes several. `flags.py` reads the tables, with a table of its own for the
flags whose reason is theirs alone.
"""

from __future__ import annotations

IGNORED_FAMILIES: tuple[tuple[str, str], ...] = (
    (
        "how FSDP gathers weights and keeps its buffers does not change the result",
        """enable-full-sharding-in-hsdp fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer
         fsdp-manual-registration megatron-fsdp-enable-fine-grained-param-gather
         megatron-fsdp-max-pool-double-buffer megatron-fsdp-version=
         outer-dp-sharding-strategy=""",
    ),
    (
        "communication is not tuned further, which would change times only",
        """create-all-gather-group ddp-average-in-collective ddp-num-buckets=
         ddp-pad-buckets-for-high-nccl-busbw
         ddp-param-name-patterns-for-fp32-local-accumulation=*
         ddp-reduce-scatter-with-fp32-accumulation delay-param-gather delay-wgrad-compute
         disable-align-grad-reduce disable-clone-scatter-output-in-embedding
         disable-symmetric-registration disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
         disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
         disable-tp-comm-split-rs fp32-allreduce gtp-remat-nccl-ub
         gtp-remat-reduce-scatter-with-fp32-accumulation hierarchical-context-parallel-sizes=*
         high-priority-stream-groups=* lazy-mpu-init nccl-all-reduce-for-prefill
         nccl-communicator-config-path= no-align-grad-reduce no-align-param-gather
         no-clone-scatter-output-in-embedding no-delay-grad-reduce
         no-gradient-reduce-div-fusion no-scatter-gather-tensors-in-pipeline
         no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag
         no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs
         no-use-layer-wise-param-layout overlap-cpu-optimizer-d2h-h2d
         overlap-p2p-communication overlap-param-gather-with-optimizer-step
         sharp-enabled-group= suggested-communication-unit-size= symmetric-ar-type=
         tp-comm-bootstrap-backend= tp-comm-overlap tp-comm-overlap-cfg=
         tp-comm-overlap-rs-dgrad use-contiguous-buffers-in-ddp use-nccl-ub use-sharp""",
    ),
    (
        "optimizer states are shared out over all data-parallel ranks, not over groups of them",
        """num-distributed-optimizer-instances=""",
    ),
    (
        "no record of collectives is kept",
        """disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
         disable-flight-recorder-include-only-active flight-recorder-dump-path=
         flight-recorder-include-stack-trace flight-recorder-trace-buffer-size=
         no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
         no-flight-recorder-include-only-active""",
    ),
    (
        (
            "the order and the timing of a pipeline are fixed: 1F1B, interleaved with "
            "--num-virtual-stages-per-pipeline-rank"
        ),
        """defer-embedding-wgrad-compute microbatch-group-size-per-virtual-pipeline-stage=
         overlap-p2p-communication-warmup-flush pipeline-model-parallel-comm-backend=
         use-ring-exchange-p2p wgrad-deferral-limit=""",
    ),
    (
        (
            "ranks are numbered tensor-parallel first, then context-parallel, "
            "data-parallel, and by pipeline stage"
        ),
        """use-tp-pp-dp-mapping""",
    ),
    (
        "it chooses a kernel, and the operations are those of torch",
        """flash-attention-version= fused-residual-rmsnorm mlp-chunks-for-training=
         no-scaled-masked-softmax-fusion onnx-safe= scaled-upper-triang-masked-softmax-fusion=
         use-grouped-gemm-for-dense-mlp use-legacy-models use-te-activation-func
         use-transformer-engine-op-fuser""",
    ),
    (
        "CUDA graphs are not captured, which would change times only",
        """cuda-graph-impl= cuda-graph-modules=* cuda-graph-scope=* cuda-graph-warmup-steps=
         enable-cuda-graph external-cuda-graph optimizer-cuda-graph""",
    ),
    (
        "weights are always initialized, on the CPU",
        """init-model-with-meta-device no-initialization""",
    ),
    (
        "a batch that does not divide over the ranks is an error",
        """decrease-batch-size-if-needed""",
    ),
    (
        "the model is a decoder, and has no encoder-decoder settings",
        """decoder-num-layers= decoder-seq-length= encoder-pipeline-model-parallel-size=
         encoder-tensor-model-parallel-size= pipeline-model-parallel-split-rank=
         standalone-embedding-stage""",
    ),
    (
        "a background save is one thread of each rank",
        """async-ckpt-cpu-priority= async-ckpt-io-priority= async-ckpt-use-cpu-shm async-strategy=
         use-persistent-ckpt-worker""",
    ),
    (
        "checkpoints have one format, safetensors and JSON",
        """ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state
         ckpt-fully-parallel-load-exchange-algo= ckpt-fully-parallel-load-per-rank-objects
         ckpt-fully-parallel-load-process-group= ckpt-fully-parallel-save-process-group=
         ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path=
         disable-ckpt-load-validate-sharding-integrity disable-save-tokenizer-assets
         disable-strict-fsdp-dtensor-load dist-ckpt-save-pre-mcore-014
         distrib-optim-fully-reshardable-mem-efficient load-model-opt-format
         no-ckpt-load-validate-sharding-integrity no-save-tokenizer-assets
         no-strict-fsdp-dtensor-load""",
    ),
    (
        "a checkpoint always holds the optimizer and the random streams",
        """no-save-optim no-save-rng""",
    ),
    (
        (
            "the model and its sizes come from the flags, and a checkpoint of another model "
            "is an error"
        ),
        """use-checkpoint-args use-mp-args-from-checkpoint-args""",
    ),
    (
        "data files are mapped into memory, and read when a batch needs them",
        """allow-ambiguous-pad-tokens dataloader-defer-npy-index-mmap dataloader-fast-cache-load
         disable-msc enable-msc mmap-warmup object-storage-cache-path=
         per-dataset-sequences-path= s3-cache-path=""",
    ),
    (
        "what the program logs and measures does not depend on it",
        """adlr-autoresume adlr-autoresume-interval= app-tag-run-name= app-tag-run-version=
         config-logger-dir= disable-straggler-on-startup enable-one-logger
         log-batch-size-to-tensorboard log-energy log-max-attention-logit log-progress
         no-log-learnig-rate-to-tensorboard one-logger-async one-logger-entity=
         one-logger-project= one-logger-run-name= otel-enabled otel-service-name=
         otel-span-groups= run-workload-inspector-server straggler-ctrlr-port=""",
    ),
    (
        "a stopped run is started again with --load DIR, and there is no supervisor inside",
        """calc-ft-timeouts enable-ft-package exit-signal-handler-for-dataloader
         ft-num-warmup-iters= inprocess-active-world-size= inprocess-barrier-timeout=
         inprocess-completion-timeout= inprocess-empty-cuda-cache inprocess-granularity=
         inprocess-hard-timeout= inprocess-heartbeat-interval= inprocess-heartbeat-timeout=
         inprocess-last-call-wait= inprocess-max-iterations= inprocess-monitor-process-interval=
         inprocess-monitor-thread-interval= inprocess-progress-watchdog-interval=
         inprocess-restart inprocess-soft-timeout= inprocess-termination-grace-time=
         result-rejected-tracker-filename= train-sync-interval=""",
    ),
    (
        (
            "the loss and the gradient norm are checked for NaN at each iteration, and no "
            "iteration runs twice; see --skip-update-on-spike"
        ),
        """check-for-large-grads check-for-spiky-loss gpu-sniff-test-interval= rerun-mode=""",
    ),
    (
        "it is a setting of generating text, and this program trains",
        """decode-only-cuda-graphs disable-chunked-prefill enable-chunked-prefill flash-decode
         inference-batch-times-seqlen-threshold= inference-coordinator-port=
         inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens=
         inference-cuda-graph-scope= inference-disable-ep-consensus
         inference-disable-triton-nvls-kernels inference-dynamic-batching
         inference-dynamic-batching-async-sched-mode= inference-dynamic-batching-block-size=
         inference-dynamic-batching-buffer-guaranteed-fraction=
         inference-dynamic-batching-buffer-overflow-factor=
         inference-dynamic-batching-buffer-size-gb= inference-dynamic-batching-chunk-size=
         inference-dynamic-batching-cuda-graph-mixed-prefill-count=
         inference-dynamic-batching-cuda-graph-sizing-distribution=
         inference-dynamic-batching-logprobs-mode=
         inference-dynamic-batching-mamba-memory-ratio=
         inference-dynamic-batching-max-requests=
         inference-dynamic-batching-max-requests-override=
         inference-dynamic-batching-max-tokens=
         inference-dynamic-batching-max-tokens-override=
         inference-dynamic-batching-num-cuda-graphs=
         inference-dynamic-batching-paused-buffer-size-gb=
         inference-dynamic-batching-prefix-caching
         inference-dynamic-batching-prefix-caching-coordinator-policy=
         inference-dynamic-batching-prefix-caching-eviction-policy=
         inference-dynamic-batching-prefix-caching-mamba-gb=
         inference-dynamic-batching-prefix-caching-routing-alpha=
         inference-dynamic-batching-sampling-backend=
         inference-dynamic-batching-track-generated-token-events
         inference-dynamic-batching-track-paused-request-events
         inference-dynamic-batching-unified-memory-level= inference-fuse-tp-communication
         inference-grouped-gemm-backend= inference-logging-step-interval=
         inference-max-batch-size= inference-max-requests= inference-max-seq-length=
         inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type=
         inference-shards= inference-text-gen-server-logging
         inference-use-synchronous-zmq-collectives inference-wandb-logging
         mamba-inference-conv-states-dtype= mamba-inference-ssm-states-dtype=
         max-tokens-to-oom= mlp-chunks-for-prefill= no-inference-disable-ep-consensus
         no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
         no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging
         num-speculative-tokens= test-mode use-legacy-static-engine
         use-same-sampling-seed-across-dp-ranks""",
    ),
    (
        "it is a setting of BERT, T5 and retrieval models",
        """bert-embedder-type= bert-load= bert-no-binary-head biencoder-projection-dim=
         biencoder-shared-query-context-model block-data-path= embedding-path=
         evidence-data-path= faiss-use-gpu ict-head-size= ict-load= indexer-batch-size=
         indexer-log-interval= mask-prob= output-bert-embeddings query-in-block-prob=
         report-topk-accuracies=* retriever-report-topk-accuracies=* retriever-score-scaling
         retriever-seq-length= sample-rate= short-seq-prob= titles-data-path=
         use-one-sent-docs""",
    ),
    (
        "it is a setting of vision models",
        """classes-fraction= data-per-class-fraction= dino-bottleneck-size= dino-freeze-last-layer=
         dino-head-hidden-size= dino-local-crops-number= dino-local-img-size=
         dino-norm-last-layer dino-teacher-temp= dino-warmup-teacher-temp=
         dino-warmup-teacher-temp-epochs= head-lr-mult= img-dim= img-h= img-w= iter-per-epoch=
         mask-factor= mask-type= num-channels= num-classes= patch-dim=
         swin-backbone-type= vision-backbone-type= vision-pretraining vision-pretraining-type=""",
    ),
    ("there is one implementation of tokenizers", """legacy-tokenizer"""),
    ("the optimizer's states are float32 in any case", """use-precision-aware-optimizer"""),
)
