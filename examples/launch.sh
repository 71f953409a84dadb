# Sourced by the launch scripts, pretrain_*.sh, recompute/*.sh and large/*.sh: how pretrain_gpt.py is started.
#
#   launch FLAGS...     torchrun with $NPROC_PER_NODE ranks on this machine. Of several, $NNODES, it is number $NODE_RANK, and
#                       they meet at $MASTER_ADDR, port $MASTER_PORT. With LAUNCHER=srun this is a task of srun: one rank.
#   EXPLAIN=1           prints what --explain-recompute says, from one process, without a GPU, and nothing starts
#   DRY_RUN=1           prints the command, and nothing starts
#
# torchrun is that of $VENV (default: ROOT/.venv, which quickstart.sh makes), else that on the PATH.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH="${VENV:-$root/.venv}/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

launch() {
    local DISTRIBUTED_ARGS=(
        --standalone
        --local-addr 127.0.0.1  # the machine's own name need not resolve
        --nproc_per_node "$NPROC_PER_NODE"
    )
    if ((${NNODES:-1} > 1)); then
        DISTRIBUTED_ARGS=(
            --nnodes "$NNODES"
            --node_rank "${NODE_RANK:=}"
            --master_addr "${MASTER_ADDR:=}"
            --master_port "${MASTER_PORT:-6000}"
            --nproc_per_node "$NPROC_PER_NODE"
        )
    fi
    local command=(torchrun "${DISTRIBUTED_ARGS[@]}" "$root/pretrain_gpt.py" "$@")
    if [[ ${EXPLAIN:-} ]]; then
        command=(python "$root/pretrain_gpt.py" "$@" --explain-recompute)
    elif [[ ${LAUNCHER:-} == srun ]]; then
        command=(python -u "$root/pretrain_gpt.py" "$@")
    fi
    if [[ ${DRY_RUN:-} ]]; then
        printf '%q ' "${command[@]}"
        echo
    elif [[ ${command[0]} == torchrun && ${NNODES:-1} != 1 && ! (${NODE_RANK} && ${MASTER_ADDR}) ]]; then
        echo "error: on $NNODES machines set MASTER_ADDR, the name of the first, and on each NODE_RANK, 0 to $((NNODES - 1));" \
            "or NNODES=1; or start one task for each GPU: LAUNCHER=srun srun ... bash $0" >&2
        exit 2
    else
        exec "${command[@]}"
    fi
}
