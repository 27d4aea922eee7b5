#!/usr/bin/env bash
# More actors for the run in /shared/runs/pong, written by `troupe slurm --join`: a job for each node.
# Any of them may be preempted or cancelled: its places in the run are free for others then.
#SBATCH --job-name=troupe-actors
#SBATCH --output=/shared/runs/pong/slurm/%A-%a.log --open-mode=append
#SBATCH --requeue --array=1-8
#SBATCH --partition=spare
#SBATCH --nodes=1 --ntasks=16 --cpus-per-task=1
set -euo pipefail

export troupe=/shared/venv/bin/troupe
export run=/shared/runs/pong
export TROUPE_NET__KEYS_DIR=/shared/runs/pong/slurm/keys
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
# Written by the job of the learner.
learner=$(cat "$run/slurm/address")
export learner

# Run a command, and again when it dies; not where it ends with 0 (complete), 2 (configuration), 3 (no learner), 4 (keys) or 5 (checkpoint).
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
    if [ -n "$stop" ] || [[ $status =~ ^(0|2|3|4|5)$ ]]; then break; fi
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

# Without a learner for ten minutes they end.
srun --cpus-per-task=1 --kill-on-bad-exit=0 bash -c \
  'keep "$troupe" actor --learner "$learner" --name "actor-$SLURM_JOB_ID-$SLURM_PROCID" --relay \
    --join-timeout-s 600 --log-file "$run/logs/actor-$SLURM_JOB_ID-$SLURM_PROCID.log"' &
step=$!
trap 'again=1' TERM
ended "$step"
