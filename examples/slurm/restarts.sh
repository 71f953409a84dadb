# The job scripts beside this file source it. It runs the training as one step of the Slurm job.
# When the step ends, it finishes the job, or puts it back into the queue. A requeued job continues
# from its newest checkpoint.
#
#   check_flags FLAGS...   ends the job if the flags are wrong or ask for help. Else it sets GOAL and
#                          SAVE, the values of --train-iters and --save.
#   train COMMAND...       runs COMMAND, and does not return
#
# Variables:
#
#   MAX_STARTS             so many starts from the same checkpoint are tried (default: 3). If they
#                          all fail, another start would not help either, and the job ends.
#   SAVE_SECONDS           so many seconds have the ranks to save when the job's time is over
#                          (default: 120). It must be less than #SBATCH --signal leaves.
#   ASK_PAUSES             the seconds between the tries of a scontrol that fails (default: "5 10 20")
# shellcheck disable=SC2154  # the scripts define root

PATH="${VENV:-$root/.venv}/bin:$PATH"
MAX_STARTS=${MAX_STARTS:-3}
ASK_PAUSES=${ASK_PAUSES-5 10 20}
SAVE_SECONDS=${SAVE_SECONDS:-120}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

check_flags() {
    local config
    config=$(python "$root/pretrain_gpt.py" "$@" --dump-config) || exit 2
    if [[ $config != \{* ]]; then  # the answer to a flag such as --help
        echo "$config"
        exit 0
    fi
    # A path can hold any byte except zero. So a zero byte ends each value, and every path arrives
    # unchanged.
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

# Prints the iteration of the newest checkpoint, or 0 if there is none.
saved_iteration() {
    local found=0
    read -r found 2>/dev/null <"$SAVE/latest_checkpointed_iteration.txt" || :
    if [[ $found =~ ^[0-9]{1,9}$ ]]; then echo "$((10#$found))"; else echo 0; fi
}

# Counts the starts of this job from the checkpoint of iteration $1, and prints the number of this
# one. The count is in a file, because Slurm can also requeue a job by itself. If the count cannot be
# kept, as on a full disk, this start is the last: without a count the job would start for ever.
count_start() {
    local job='' iteration='' starts=0 file=$SAVE/slurm_starts.txt
    read -r job iteration starts 2>/dev/null <"$file" || :
    if [[ $job != "$SLURM_JOB_ID" || $iteration != "$1" ]]; then starts=0; fi
    starts=$((starts + 1))
    if ! { echo "$SLURM_JOB_ID $1 $starts" >"$file.tmp" && mv -f "$file.tmp" "$file"; }; then
        echo "warning: $file cannot be written, so this start counts as the last one" >&2
        starts=$MAX_STARTS
    fi
    echo "$starts"
}

# Runs scontrol with these words, and again after a pause if it fails: the controller may not answer
# for a moment.
ask_slurm() {
    local pause
    for pause in 0 $ASK_PAUSES; do
        sleep "$pause"
        if scontrol "$@"; then return; fi
    done
    echo "error: scontrol $1 failed at every try, so the job is not requeued: submit it again, and" \
        "it continues from $SAVE" >&2
    return 1
}

requeue() {
    local state
    state=$(ask_slurm show job --oneliner "$SLURM_JOB_ID")
    if [[ $state == *" JobState=RUNNING "* ]]; then
        echo "requeued: job $SLURM_JOB_ID continues from iteration $(saved_iteration) of $GOAL"
        ask_slurm requeue "$SLURM_JOB_ID"
    fi  # else the job was cancelled, or Slurm requeues it by itself
}

# The handler of USR1 and TERM: the job's time is over, or Slurm takes its nodes back. It tells the
# ranks to save and stop.
stop() {
    woken=1
    if [[ ! $stopping ]]; then
        stopping=1
        # $! must be read before this function starts processes itself.
        step=${step:-${!:-}}
        echo "stopping: the ranks are told to save"
        scancel --signal=TERM "$SLURM_JOB_ID" || :  # reaches the job's steps, not this shell
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
    woken='' stopping='' step='' deadline=''  # stop sets these
    mkdir -p "$SAVE"
    begun=$(saved_iteration)
    starts=$(count_start "$begun")
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}:" \
        "start $starts from iteration $begun of $GOAL"
    trap stop USR1 TERM
    "$@" &
    step=${step:-$!}
    while woken='' status=0; do
        wait "$step" || status=$?  # a signal ends the wait early
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
    echo "error: start $starts from iteration $begun came no further (status $status):" \
        "the job is not requeued" >&2
    exit $((status ? status : 1))
}
