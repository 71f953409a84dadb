# Sourced by the job scripts beside it: runs the training as one step of the job and, when that ends, finishes the job or puts it
# back into the queue, from where it continues at its newest checkpoint.
#
#   check_flags FLAGS...   ends the job where the flags are wrong; else sets GOAL and SAVE, their --train-iters and --save
#   train COMMAND...       runs COMMAND, and does not return
#   MAX_STARTS             starts from one and the same checkpoint: what fails each time is not mended by another start
#   SAVE_SECONDS           for the checkpoint when the job's time is over; less than --signal leaves
# shellcheck disable=SC2154  # the scripts define root

PATH="${VENV:-$root/.venv}/bin:$PATH"
MAX_STARTS=${MAX_STARTS:-3}
SAVE_SECONDS=${SAVE_SECONDS:-120}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

check_flags() {
    local config
    config=$(python "$root/pretrain_gpt.py" "$@" --dump-config) || exit 2
    # A path is bytes without a zero byte: whatever else is in it arrives as it is.
    {
        IFS= read -r -d '' GOAL
        IFS= read -r -d '' SAVE
    } < <(python -c '
import json, os, sys
run = json.load(sys.stdin)
for value in (run["training"]["train_iters"], run["checkpoint"]["save"]):
    os.write(1, os.fsencode(str(value or "")) + bytes(1))
' <<<"$config")
    if [[ ! $GOAL || ! $SAVE ]]; then
        echo "error: a job that continues by itself needs --train-iters and --save" >&2
        exit 2
    fi
}

# The iteration of the newest checkpoint, 0 without one.
saved_iteration() {
    local found=0
    read -r found 2>/dev/null <"$SAVE/latest_checkpointed_iteration.txt" || :
    if [[ $found =~ ^[0-9]{1,9}$ ]]; then echo "$((10#$found))"; else echo 0; fi
}

# Which start of this job from the checkpoint of iteration $1 this is. Slurm requeues without asking, so starts are counted.
count_start() {
    local job='' iteration='' starts=0
    read -r job iteration starts 2>/dev/null <"$SAVE/slurm_starts.txt" || :
    if [[ $job != "$SLURM_JOB_ID" || $iteration != "$1" ]]; then starts=0; fi
    echo "$SLURM_JOB_ID $1 $((starts + 1))" >"$SAVE/slurm_starts.txt"
    echo "$((starts + 1))"
}

requeue() {
    if [[ $(scontrol show job --oneliner "$SLURM_JOB_ID") == *" JobState=RUNNING "* ]]; then
        echo "requeued: job $SLURM_JOB_ID continues from iteration $(saved_iteration) of $GOAL"
        scontrol requeue "$SLURM_JOB_ID"
    fi  # else it was cancelled, or Slurm requeues it
}

# The job's time is over, or Slurm wants its nodes: the ranks save and stop.
stop() {
    woken=1
    if [[ ! $stopping ]]; then
        stopping=1 step=${step:-${!:-}}  # before this starts a process too
        echo "stopping: the ranks are told to save"
        scancel --signal=TERM "$SLURM_JOB_ID" || :  # its steps, not this shell
        requeue_later &
        deadline=$!
    fi
}

requeue_later() {
    trap 'kill $!; exit' TERM
    sleep "$SAVE_SECONDS" &
    wait $!
    echo "the ranks did not stop within $SAVE_SECONDS s"
    requeue
}

train() {
    local begun starts status now
    woken='' stopping='' step='' deadline=''  # of stop
    mkdir -p "$SAVE"
    begun=$(saved_iteration)
    starts=$(count_start "$begun")
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}: start $starts from iteration $begun of $GOAL"
    trap stop USR1 TERM
    "$@" &
    step=${step:-$!}
    while woken='' status=0; do
        wait "$step" || status=$?  # a signal wakes it early
        if [[ ! $woken ]]; then break; fi
    done
    if [[ $deadline ]]; then kill "$deadline" 2>/dev/null || :; fi
    now=$(saved_iteration)
    if ((now >= GOAL)); then
        echo "finished: iteration $now of $GOAL, status $status"
        exit "$status"
    elif [[ $stopping ]] || ((now > begun || starts < MAX_STARTS)); then
        echo "stopped at iteration $now of $GOAL, status $status"
        requeue
        exit "$status"
    fi
    echo "error: start $starts from iteration $begun came no further (status $status): the job is not requeued" >&2
    exit $((status ? status : 1))
}
