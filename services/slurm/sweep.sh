#!/usr/bin/env bash
# Runs of the sweep in @folder@: one job for each, as an array, written by `troupe sweep --slurm`.
# Change what does not suit, and submit it with `sbatch @file@`.
#SBATCH --job-name=@job_name@
#SBATCH --output=@output@/slurm/%A-%a.log --open-mode=append
# USR1 comes two minutes before the time is over: time for a checkpoint, and to be queued again.
#SBATCH --requeue --signal=B:USR1@120
#SBATCH --array=0-@last@%@parallel@
@parts@
set -euo pipefail

names=(
  @names@
)
name=${names[$SLURM_ARRAY_TASK_ID]}
folder=@folder@
run=$folder/runs/$name
export PYTHONUNBUFFERED=1

# A run goes on from its checkpoint; without one there is nothing to keep, and it begins anew.
if compgen -G "$run/checkpoints/step-*" >/dev/null; then
  words=(resume "$run")
else
  if [ -e "$run/config.toml" ]; then rm -r "$run"; fi
  words=(train @preset@ --run-dir "$run")
fi
echo "$(date +%T) $(hostname): troupe ${words[*]}"
@program@ "${words[@]}" --sweep "$folder/values/$name.toml" --no-progress@fields@ &
training=$! again=1 stopping='' status=0
# TERM comes from Slurm, to every process of the job. USR1 is for this one.
trap 'again=1' TERM
trap 'stopping=1 again=1; kill -TERM "$training" 2>/dev/null' USR1
# A signal ends a wait, not the process that is waited for.
while [ -n "$again" ]; do
  again='' status=0
  wait "$training" || status=$?
done
if [ -n "$stopping" ] && [ "$status" = 0 ]; then
  echo "$(date +%T) $name: two minutes were left, it is queued again"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
