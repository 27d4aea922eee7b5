srun --het-group=2 --cpus-per-task=1 --kill-on-bad-exit=0 bash -c \
  'keep "$troupe" evaluator --learner "$learner" --name "evaluator-$SLURM_PROCID" --join-timeout-s 600 \
    --log-file "$run/logs/evaluator-$SLURM_PROCID.log"' &
steps+=($!)
