#!/usr/bin/env bash
# pong-apex: a heterogeneous job of learner and replay, actors, and evaluators, written by `troupe slurm`.
# Change what does not suit. `sbatch /shared/runs/pong/slurm/job.sh` begins the run or goes on with it; `scancel JOB` stops it
# with a checkpoint.
#SBATCH --job-name=troupe-pong-apex
#SBATCH --output=/shared/runs/pong/slurm/%j.log --open-mode=append
# USR1 comes two minutes before the time is over: time for a checkpoint, and to be queued again.
#SBATCH --requeue --signal=B:USR1@120
# Learner and replay:
#SBATCH --partition=main
#SBATCH --time=12:00:00
#SBATCH --account=lab
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH hetjob
# Actors: a node of theirs may fail, and the others go on
#SBATCH --partition=main
#SBATCH --time=12:00:00
#SBATCH --account=lab
#SBATCH --nodes=2 --ntasks-per-node=16 --cpus-per-task=1
#SBATCH --no-kill
#SBATCH hetjob
# Evaluators:
#SBATCH --partition=main
#SBATCH --time=12:00:00
#SBATCH --account=lab
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=1
set -euo pipefail

export troupe=/shared/venv/bin/troupe
export run=/shared/runs/pong
# Keys are files of mode 0600: only their folder is named.
export TROUPE_NET__KEYS_DIR=/shared/runs/pong/slurm/keys
export TROUPE_MODULES=my_envs
# Jobs may share a node, so ports follow from the job's number.
port=$((10000 + SLURM_JOB_ID % 1000 * 20))
host=$(hostname)
export learner=tcp://$host:$port
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

# Run a command, and again when it dies; not where it ends with 0 (complete), 2 (configuration), 4 (keys) or 5 (checkpoint).
keep() {
  local child='' status=0 stop='' again
  # TERM comes from Slurm, to every process of the job. USR1 is for this one, which tells its command.
  trap 'stop=1 again=1' TERM
  trap 'stop=1 again=1; kill -TERM "$child" 2>/dev/null || true' USR1
  while [ -z "$stop" ]; do
    "$@" &
    child=$! again=1
    # It was not told of a signal that came before its number was known.
    if [ -n "$stop" ]; then kill -TERM "$child" 2>/dev/null || true; fi
    # A signal ends a wait, not the process that is waited for.
    while [ -n "$again" ]; do
      again='' status=0
      wait "$child" || status=$?
    done
    if [ -n "$stop" ] || [[ $status =~ ^(0|2|4|5)$ ]]; then break; fi
    echo "$(date +%T) $(hostname): $2 ended with status $status and is started again" >&2
    sleep 5
  done
  return "$status"
}

# Wait for the end of a process, also while signals come; its status.
ended() {
  local status
  again=1
  while [ -n "$again" ]; do
    again='' status=0
    wait "$1" || status=$?
  done
  return "$status"
}
export -f keep

members=("$SLURM_JOB_ID_HET_GROUP_1" "$SLURM_JOB_ID_HET_GROUP_2")
tell_members() {
  local part
  for part in "${members[@]}"; do scancel --signal=TERM "$part" 2>/dev/null || true; done
}

mkdir -p "$run/logs"
echo "$learner" >"$run/slurm/address"
echo "$(date +%T) job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: learner and replay on $host"
keep "$troupe" learner /shared/runs/pong/slurm/pong-apex.toml --run-dir "$run" --resume --linger-s 60 --log-file "$run/logs/learner.log" \
  --control "tcp://0.0.0.0:$port" --announce "tcp://0.0.0.0:$((port + 1))" \
  --inference "tcp://0.0.0.0:$((port + 2))" \
  --run.seed=3 \
  '--env.kwargs={mode = 1}' &
learner_pid=$! stopping=''
trap 'stopping=1 again=1; kill -USR1 "$learner_pid"; tell_members' USR1
trap 'again=1' TERM
shards=()
for ((i = 0; i < 2; i++)); do
  keep "$troupe" replay serve --learner "$learner" --index "$i" --adopt --join-timeout-s 600 \
    --data-dir "$run/replay/shard-$i" --log-file "$run/logs/replay-$i.log" \
    --bind "tcp://0.0.0.0:$((port + 3 + i))" --advertise "tcp://$host:$((port + 3 + i))" &
  shards+=($!)
done
srun --het-group=1 --cpus-per-task=1 --kill-on-bad-exit=0 --no-kill bash -c \
  'keep "$troupe" actor --learner "$learner" --name "actor-$SLURM_PROCID" --relay --join-timeout-s 600 \
    --log-file "$run/logs/actor-$SLURM_PROCID.log"' &
steps=($!)
srun --het-group=2 --cpus-per-task=1 --kill-on-bad-exit=0 bash -c \
  'keep "$troupe" evaluator --learner "$learner" --name "evaluator-$SLURM_PROCID" --join-timeout-s 600 \
    --log-file "$run/logs/evaluator-$SLURM_PROCID.log"' &
steps+=($!)
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
