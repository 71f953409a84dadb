# Sourced by the launch scripts, pretrain_*.sh and recompute/*.sh: how pretrain_gpt.py is started on the ranks of one machine.
#
#   launch FLAGS...     torchrun with $NPROC_PER_NODE ranks; with DRY_RUN=1 the command is printed and nothing starts
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
    local command=(torchrun "${DISTRIBUTED_ARGS[@]}" "$root/pretrain_gpt.py" "$@")
    if [[ ${DRY_RUN:-} ]]; then
        printf '%q ' "${command[@]}"
        echo
    else
        exec "${command[@]}"
    fi
}
