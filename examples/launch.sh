# The launch scripts (pretrain_*.sh, recompute/*.sh, large/*.sh) source this file.
# It defines
#
#   launch FLAGS...     starts pretrain_gpt.py with FLAGS
#
# These variables say how:
#
#   NPROC_PER_NODE      torchrun starts so many ranks on this machine
#   NNODES              the number of machines (default: 1). With several,
#                       $NODE_RANK is the number of this one, and they meet at
#                       $MASTER_ADDR, port $MASTER_PORT.
#   LAUNCHER=srun       this script is a task of srun: it starts one rank, without
#                       torchrun
#   EXPLAIN=1           prints the report of --explain-recompute; needs no GPU and
#                       trains nothing
#   DRY_RUN=1           prints the command instead of running it
#
# torchrun and python are those of $VENV (default: ROOT/.venv, which quickstart.sh
# makes). If it does not exist, they are those on the PATH.
#
# --help, alone or as the last word, prints what the script does and these
# variables. --help TOPIC goes to pretrain_gpt.py: --help all lists all flags.

# Prints the comment at the top of a script.
comment_of() {
    awk '/^#!/ || /^# shellcheck/ { next }
        /^#( |$)/ { sub(/^# ?/, ""); print; next }
        { exit }' "$1"
}

if [[ ${*: -1} == --help || ${*: -1} == -h ]]; then
    echo "usage: bash $0 [FLAGS OF pretrain_gpt.py]"
    echo
    comment_of "$0"
    for sourced in "${BASH_SOURCE[@]:0:${#BASH_SOURCE[@]}-1}"; do
        echo
        comment_of "$sourced"
    done
    exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH="${VENV:-$root/.venv}/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

launch() {
    local DISTRIBUTED_ARGS=(
        --standalone
        --local-addr 127.0.0.1  # works even if the machine's own name does not resolve
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
    elif [[ ${command[0]} == torchrun && ${NNODES:-1} != 1 \
        && ! (${NODE_RANK} && ${MASTER_ADDR}) ]]; then
        echo "error: on $NNODES machines set MASTER_ADDR, the name of the first one, and on each" \
            "machine NODE_RANK, 0 to $((NNODES - 1)). Or set NNODES=1, or start one task per GPU:" \
            "LAUNCHER=srun srun ... bash $0" >&2
        exit 2
    else
        exec "${command[@]}"
    fi
}
