#!/usr/bin/env bash
# What run.yaml has each machine do.
#
#   start.sh setup | learner | actors
#
# Environment: TROUPE_RUN_FILE   preset or TOML file (learner)
#              TROUPE_KEY_SET    the folder of keys, as tar in base64; it leaves the environment at once
#              TROUPE_LEARNER_HOST, TROUPE_BUCKET   for other names than run.yaml's
set -euo pipefail
role=${1:?usage: start.sh setup|learner|actors}
venv=$HOME/troupe

if [ "$role" = setup ]; then
  python3 -m venv "$venv"
  exec "$venv/bin/pip" install -c constraints.txt '.[learner,actor,replay,evaluator]'
fi

export PATH=$venv/bin:$PATH OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TROUPE_NET__KEYS_DIR=$HOME/keys
host=${TROUPE_LEARNER_HOST:-learner-0.${SKYPILOT_JOBGROUP_NAME:-}}
bucket=${TROUPE_BUCKET:-/runs}/run
run=$HOME/run
wanted=()
# A spot machine is anybody's tomorrow: it has no use for the other keys.
if [ "$role" = actors ]; then wanted=(./actor.secret ./learner.public ./replay.public); fi
(umask 077 && mkdir -p "$HOME/keys" && base64 -d <<<"$TROUPE_KEY_SET" |
  tar -C "$HOME/keys" --no-same-owner -x "${wanted[@]}")
unset TROUPE_KEY_SET

# Run a command, and again when it dies; not when all is over (0), nor after a mistake in the configuration (2), keys (4)
# or checkpoints (5).
keep() {
  local status
  while :; do
    status=0
    "$@" || status=$?
    if [[ $status =~ ^(0|2|4|5)$ ]]; then return "$status"; fi
    sleep 5
  done
}

# The stored experience stays where it is: it is in mapped files, which no bucket has.
copy() { rsync -a --inplace --exclude /replay "$1/" "$2/"; }

case $role in
  learner)
    mkdir -p "$run" "$bucket"
    copy "$bucket" "$run"
    keep troupe replay serve --learner tcp://127.0.0.1:5550 --join-timeout-s 600 --adopt \
      --data-dir "$run/replay/shard-0" --bind tcp://0.0.0.0:5560 --advertise "tcp://$host:5560" &
    keep troupe evaluator --learner tcp://127.0.0.1:5550 --join-timeout-s 600 &
    (while sleep 120; do copy "$run" "$bucket"; done) &
    copies=$!
    status=0
    keep troupe learner "$TROUPE_RUN_FILE" --run-dir "$run" --resume --linger-s 120 --control tcp://0.0.0.0:5550 \
      --announce tcp://0.0.0.0:5551 --inference tcp://0.0.0.0:5552 || status=$?
    kill "$copies"
    copy "$run" "$bucket"
    exit "$status" ;;
  actors)
    for ((i = 0; i < ${TROUPE_ACTORS:-$(nproc)}; i++)); do
      keep troupe actor --learner "tcp://$host:5550" --name "actor-$(hostname)-$i" --relay --join-timeout-s 600 &
    done
    wait ;;
  *)
    echo "start.sh: error: unknown role '$role'; one of setup, learner, actors" >&2
    exit 2 ;;
esac
