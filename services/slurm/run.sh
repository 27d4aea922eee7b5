#!/usr/bin/env bash
# @name@: a heterogeneous job of learner and replay, actors, and evaluators, written by `troupe slurm`.
# Change what does not suit. `sbatch @file@` begins the run or goes on with it; `scancel JOB` stops it
# with a checkpoint.
#SBATCH --job-name=@job_name@
#SBATCH --output=@output@/slurm/%j.log --open-mode=append
# USR1 comes two minutes before the time is over: time for a checkpoint, and to be queued again.
#SBATCH --requeue --signal=B:USR1@120
@parts@
set -euo pipefail

export troupe=@program@
export run=@run_dir@
# Keys are files of mode 0600: only their folder is named.
export TROUPE_NET__KEYS_DIR=@keys_dir@@modules@
# Jobs may share a node, so ports follow from the job's number.
port=$((10000 + SLURM_JOB_ID % 1000 * 20))
host=$(hostname)
export learner=tcp://$host:$port
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

@keep@
export -f keep

members=(@members@)
tell_members() {
  local part
  for part in "${members[@]}"; do scancel --signal=TERM "$part" 2>/dev/null || true; done
}

mkdir -p "$run/logs"
echo "$learner" >"$run/slurm/address"
echo "$(date +%T) job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: learner and replay on $host"
keep "$troupe" learner @config@ --run-dir "$run" --resume --linger-s 60 --log-file "$run/logs/learner.log" \
  --control "tcp://0.0.0.0:$port" --announce "tcp://0.0.0.0:$((port + 1))" \
  --inference "tcp://0.0.0.0:$((port + 2))"@fields@ &
learner_pid=$! stopping=''
trap 'stopping=1 again=1; kill -USR1 "$learner_pid"; tell_members' USR1
trap 'again=1' TERM
shards=()
for ((i = 0; i < @shards@; i++)); do
  keep "$troupe" replay serve --learner "$learner" --index "$i" --adopt --join-timeout-s 600 \
    --data-dir "$run/replay/shard-$i" --log-file "$run/logs/replay-$i.log" \
    --bind "tcp://0.0.0.0:$((port + 3 + i))" --advertise "tcp://$host:$((port + 3 + i))" &
  shards+=($!)
done
srun --het-group=1 --cpus-per-task=1 --kill-on-bad-exit=0 --no-kill bash -c \
  'keep "$troupe" actor --learner "$learner" --name "actor-$SLURM_PROCID" --relay --join-timeout-s 600 \
    --log-file "$run/logs/actor-$SLURM_PROCID.log"' &
steps=($!)
@evaluators@
status=0
ended "$learner_pid" || status=$?
# Replay is last: the others hand in what they have.
tell_members
for step in "${steps[@]}"; do ended "$step" || true; done
for shard in "${shards[@]}"; do kill -USR1 "$shard" 2>/dev/null || true; done
for shard in "${shards[@]}"; do ended "$shard" || true; done
if [ -n "$stopping" ] && [[ ! $status =~ ^(2|4|5)$ ]]; then
  echo "$(date +%T) job $SLURM_JOB_ID: two minutes were left, it is queued again"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
