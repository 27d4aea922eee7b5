#!/usr/bin/env bash
# Become one service of a run. The systemd units call it; so may anything else that sets the same variables.
#
#   troupe-start learner | replay | evaluator | tensorboard | actor NUMBER
#
# Environment:
#   TROUPE_RUN_DIR   directory of the run (learner, tensorboard) or of the stored items (replay)
#   TROUPE_LEARNER   control address of the learner, such as tcp://learner.pong.troupe.internal:5550
#   TROUPE_KEYS      folder with this role's secret key and everybody's public ones
#   TROUPE_HOST      name of this machine in the run; actors are named after it
#   TROUPE_INDEX     number of the replay shard; its port is 5560 + number
#   TROUPE_ADVERTISE address by which others reach this shard
#   TROUPE_LOGS      folder of log files; without it the log goes to stderr
set -euo pipefail
role=${1:?usage: troupe-start learner|replay|evaluator|tensorboard|actor [NUMBER]}
troupe=${TROUPE_BIN:-/opt/troupe/venv/bin}
# Machines come in any order; systemd starts a service again that gave up.
patience_s=600

log() { [ -z "${TROUPE_LOGS:-}" ] || printf -- '--log-file\n%s/%s.log\n' "$TROUPE_LOGS" "$1"; }

case $role in
  learner)
    mapfile -t words < <(log learner)
    # A machine that replaces a lost one has fetched the checkpoints of that one.
    if compgen -G "$TROUPE_RUN_DIR/checkpoints/step-*" >/dev/null; then words+=(--resume); fi
    exec "$troupe/troupe" learner --run-dir "$TROUPE_RUN_DIR" --keys "$TROUPE_KEYS" \
      --control tcp://0.0.0.0:5550 --announce tcp://0.0.0.0:5551 "${words[@]}" ;;
  replay)
    index=${TROUPE_INDEX:-0}
    mapfile -t words < <(log "replay-$index")
    # The folder is this run's by its path, though its learner may have been lost before it had saved anything.
    exec "$troupe/troupe" replay --adopt --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" --index "$index" \
      --bind "tcp://0.0.0.0:$((5560 + index))" --advertise "$TROUPE_ADVERTISE" \
      --data-dir "$TROUPE_RUN_DIR/replay/shard-$index" --join-timeout-s "$patience_s" "${words[@]}" ;;
  actor)
    name=actor-${TROUPE_HOST:-$(hostname)}-${2:?usage: troupe-start actor NUMBER}
    mapfile -t words < <(log "$name")
    exec "$troupe/troupe" actor --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" --name "$name" \
      --join-timeout-s "$patience_s" "${words[@]}" ;;
  evaluator)
    mapfile -t words < <(log evaluator)
    exec "$troupe/troupe" evaluator --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" \
      --join-timeout-s "$patience_s" "${words[@]}" ;;
  tensorboard)
    exec "$troupe/python" -m tensorboard.main --logdir "$TROUPE_RUN_DIR/tensorboard" --bind_all --port 6006 ;;
  *)
    echo "troupe-start: error: unknown service '$role'; one of learner, replay, actor, evaluator, tensorboard" >&2
    exit 2 ;;
esac
