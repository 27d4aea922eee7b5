#!/usr/bin/env bash
# Become one service of a run. Systemd units and containers call it; so may anything else that sets the same variables.
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
#   TROUPE_PRESET    the learner begins a run from this preset where TROUPE_RUN_DIR holds none, and else goes on
#   TROUPE_LOGDIR    what TensorBoard shows; default: the events of this run
#   TROUPE_YIELD_TO  host of another learner; where there is one, this learner has nothing to do
#   TROUPE_RELAY     folder in which this machine's actors find each other: one fetches the parameters for all
#   TROUPE_METRICS_PORT, TROUPE_METRICS_HOST  where /metrics, /healthz and /readyz are; default: nowhere, loopback
set -euo pipefail
role=${1:?usage: troupe-start learner|replay|evaluator|tensorboard|actor [NUMBER]}
troupe=${TROUPE_BIN:-/opt/troupe/venv/bin}
# Machines come in any order; systemd starts a service again that gave up.
patience_s=600

# Options that every service has, one word a line: its log file, its status port.
common() {
  [ -z "${TROUPE_LOGS:-}" ] || printf '%s\n' --log-file "$TROUPE_LOGS/$1.log"
  [ -z "${TROUPE_METRICS_PORT:-}" ] ||
    printf '%s\n' --metrics-port "$TROUPE_METRICS_PORT" --metrics-host "${TROUPE_METRICS_HOST:-127.0.0.1}"
}

case $role in
  learner)
    if [ -n "${TROUPE_YIELD_TO:-}" ] && getent hosts "$TROUPE_YIELD_TO" >/dev/null; then
      echo "troupe-start: $TROUPE_YIELD_TO is the learner of this run"
      exit 0
    fi
    mapfile -t words < <(common learner)
    if [ -n "${TROUPE_PRESET:-}" ]; then
      words+=("$TROUPE_PRESET" --resume)
    # A machine that replaces a lost one has fetched the checkpoints of that one.
    elif compgen -G "$TROUPE_RUN_DIR/checkpoints/step-*" >/dev/null; then
      words+=(--resume)
    fi
    exec "$troupe/troupe" learner --run-dir "$TROUPE_RUN_DIR" --keys "$TROUPE_KEYS" \
      --control tcp://0.0.0.0:5550 --announce tcp://0.0.0.0:5551 \
      --inference tcp://0.0.0.0:5552 "${words[@]}" ;;
  replay)
    index=${TROUPE_INDEX:-0}
    mapfile -t words < <(common "replay-$index")
    # The folder is this run's by its path, though its learner may have been lost before it had saved anything.
    exec "$troupe/troupe" replay --adopt --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" --index "$index" \
      --bind "tcp://0.0.0.0:$((5560 + index))" --advertise "$TROUPE_ADVERTISE" \
      --data-dir "$TROUPE_RUN_DIR/replay/shard-$index" --join-timeout-s "$patience_s" "${words[@]}" ;;
  actor)
    name=actor-${TROUPE_HOST:-$(hostname)}-${2:?usage: troupe-start actor NUMBER}
    mapfile -t words < <(common "$name")
    [ -z "${TROUPE_RELAY:-}" ] || words+=(--relay "$TROUPE_RELAY")
    exec "$troupe/troupe" actor --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" --name "$name" \
      --join-timeout-s "$patience_s" "${words[@]}" ;;
  evaluator)
    mapfile -t words < <(common evaluator)
    exec "$troupe/troupe" evaluator --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" \
      --join-timeout-s "$patience_s" "${words[@]}" ;;
  tensorboard)
    exec "$troupe/python" -m tensorboard.main --logdir "${TROUPE_LOGDIR:-$TROUPE_RUN_DIR/tensorboard}" \
      --bind_all --port 6006 --reload_multifile=true --reload_interval=10 ;;
  *)
    echo "troupe-start: error: unknown service '$role'; one of learner, replay, actor, evaluator, tensorboard" >&2
    exit 2 ;;
esac
