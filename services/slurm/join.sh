#!/usr/bin/env bash
# More actors for the run in @run_dir@, written by `troupe slurm --join`: a job for each node.
# Any of them may be preempted or cancelled: its places in the run are free for others then.
#SBATCH --job-name=troupe-actors
#SBATCH --output=@output@/slurm/%A-%a.log --open-mode=append
#SBATCH --requeue --array=1-@nodes@
@parts@
set -euo pipefail

export troupe=@program@
export run=@run_dir@
export TROUPE_NET__KEYS_DIR=@keys_dir@@modules@
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
# Written by the job of the learner.
learner=$(cat "$run/slurm/address")
export learner

@keep@
export -f keep

# Without a learner for ten minutes they end.
srun --cpus-per-task=1 --kill-on-bad-exit=0 bash -c \
  'keep "$troupe" actor --learner "$learner" --name "actor-$SLURM_JOB_ID-$SLURM_PROCID" --relay \
    --join-timeout-s 600 --log-file "$run/logs/actor-$SLURM_JOB_ID-$SLURM_PROCID.log"' &
step=$!
trap 'again=1' TERM
ended "$step"
