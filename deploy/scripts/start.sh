#!/usr/bin/env bash
# Become one service of a run. Systemd units and containers call it; so may anything else that sets the same variables.
#
#   troupe-start learner | learner-peer | replay | evaluator | tensorboard | board | actor NUMBER
#
# Environment:
#   TROUPE_RUN_DIR   directory of the run (learner, tensorboard, board) or of the stored items (replay)
#   TROUPE_LEARNER   control address of the learner, such as tcp://learner.pong.troupe.internal:5550
#   TROUPE_KEYS      folder with this role's secret key and everybody's public ones
#   TROUPE_HOST      name of this machine in the run; actors and evaluators are named after it
#   TROUPE_INDEX     number of the replay shard; its port is 5560 + number. `free`: the first that no other process has
#                    whose TROUPE_RUN_DIR is the same, on port 5560, for shards with addresses of their own
#   TROUPE_ADVERTISE address by which others reach this shard; default: the one by which it reaches the learner
#   TROUPE_LOGS      folder of log files; without it the log goes to stderr
#   TROUPE_LINGER_S  how long the learner of a run that is complete already tells so to whoever comes; default: 120
#   TROUPE_PRESET    the learner begins a run from this preset where TROUPE_RUN_DIR holds none, and else goes on
#   TROUPE_RUN_FILE  the same from a TOML file
#   TROUPE_LOGDIR    what TensorBoard and the board show; default: this run
#   TROUPE_BOARD_HOST       where the board listens, on port 6007; default: loopback
#   TROUPE_BOARD_PUBLISHED  HOST:PORT under which browsers reach it there; default: the same
#   TROUPE_NET__LEARNER_NETWORK  network in which learners exchange gradients, unencrypted; `own`: that of this container,
#                    whose only network is the run's
#   TROUPE_YIELD_TO  host of another learner; where there is one, this learner has nothing to do
#   TROUPE_RELAY     folder in which this machine's actors find each other: one fetches the parameters for all
#   TROUPE_HOLD      set where whoever restarts services does so after every status but 0: a service that ends with one
#                    that no restart would mend stays, as this script, until it is told to stop
#   TROUPE_METRICS_PORT, TROUPE_METRICS_HOST  where /metrics, /healthz and /readyz are; default: nowhere, loopback
set -euo pipefail
role=${1:?usage: troupe-start learner|learner-peer|replay|evaluator|tensorboard|board|actor [NUMBER]}
troupe=${TROUPE_BIN:-/opt/troupe/venv/bin}
# Machines come in any order; systemd starts a service again that gave up.
patience_s=600

# Options that every service has, one word a line: its log file, its status port.
common() {
  [ -z "${TROUPE_LOGS:-}" ] || printf '%s\n' --log-file "$TROUPE_LOGS/$1.log"
  [ -z "${TROUPE_METRICS_PORT:-}" ] ||
    printf '%s\n' --metrics-port "$TROUPE_METRICS_PORT" --metrics-host "${TROUPE_METRICS_HOST:-127.0.0.1}"
}

# Be the service, whose end is this script's.
become() {
  [ -n "${TROUPE_HOLD:-}" ] || exec "$@"
  local child status stop='' again=1
  "$@" &
  child=$!
  trap 'stop=1 again=1; kill -TERM "$child" 2>/dev/null || true' TERM INT HUP
  # A signal ends the wait, not the service.
  while [ -n "$again" ]; do
    again='' status=0
    wait "$child" || status=$?
  done
  # 2: configuration, 4: keys, 5: checkpoint. Everything else heals, or is the end of the run.
  if [ -z "$stop" ] && [[ $status =~ ^(2|4|5)$ ]]; then
    echo "troupe-start: $role ended with status $status, which no restart would mend: see above, put it right" \
      "and start this service again; it waits until it is told to stop" >&2
    trap 'exit "$status"' TERM INT HUP
    while :; do sleep 3600 & wait $!; done
  fi
  exit "$status"
}

# Take the first shard number that is free, as long as this process and what it becomes live.
free_index() {
  local number
  mkdir -p "$TROUPE_RUN_DIR/replay"
  for number in {0..63}; do
    exec 9>"$TROUPE_RUN_DIR/replay/shard-$number.lock"
    if flock --nonblock 9; then
      index=$number
      return
    fi
  done
  echo "troupe-start: error: 64 shards have $TROUPE_RUN_DIR/replay: start fewer" >&2
  exit 2
}

# Print the network of this container's first interface: 172.18.0.0/16.
own_network() {
  local to via mask bits=0 number
  while read -r _ to via _ _ _ _ mask _; do
    # The route to the network itself has no gateway.
    if [ "$via" = 00000000 ] && [ "$mask" != 00000000 ]; then
      for ((number = 0x$mask; number; number >>= 1)); do bits=$((bits + (number & 1))); done
      # The kernel writes addresses from their last byte on.
      printf '%d.%d.%d.%d/%d\n' "0x${to:6:2}" "0x${to:4:2}" "0x${to:2:2}" "0x${to:0:2}" "$bits"
      return
    fi
  done < <(tail -n +2 /proc/net/route)
  echo "troupe-start: error: this container has no network of its own: set TROUPE_NET__LEARNER_NETWORK" >&2
  return 2
}

case $role in
  learner)
    if [ "${TROUPE_NET__LEARNER_NETWORK:-}" = own ]; then
      TROUPE_NET__LEARNER_NETWORK=$(own_network)
      export TROUPE_NET__LEARNER_NETWORK
    fi
    if [ -n "${TROUPE_YIELD_TO:-}" ] && getent hosts "$TROUPE_YIELD_TO" >/dev/null; then
      echo "troupe-start: $TROUPE_YIELD_TO is the learner of this run"
      exit 0
    fi
    mapfile -t words < <(common learner)
    preset=${TROUPE_RUN_FILE:-${TROUPE_PRESET:-}}
    if [ -n "$preset" ]; then
      words+=("$preset" --resume)
    # A machine that replaces a lost one has fetched the checkpoints of that one.
    elif compgen -G "$TROUPE_RUN_DIR/checkpoints/step-*" >/dev/null; then
      words+=(--resume)
    fi
    # The members of a run that is complete shall hear so, and not wait for a learner.
    become "$troupe/troupe" learner --linger-s "${TROUPE_LINGER_S:-120}" --run-dir "$TROUPE_RUN_DIR" --keys "$TROUPE_KEYS" \
      --control tcp://0.0.0.0:5550 --announce tcp://0.0.0.0:5551 \
      --inference tcp://0.0.0.0:5552 "${words[@]}" ;;
  learner-peer)
    mapfile -t words < <(common "learner-$(hostname)")
    become "$troupe/troupe" learner --join "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" \
      --name "learner-${TROUPE_HOST:-$(hostname)}" --join-timeout-s "$patience_s" "${words[@]}" ;;
  replay)
    index=${TROUPE_INDEX:-0}
    if [ "$index" = free ]; then
      free_index
      port=5560
    else
      port=$((5560 + index))
    fi
    mapfile -t words < <(common "replay-$index")
    [ -z "${TROUPE_ADVERTISE:-}" ] || words+=(--advertise "$TROUPE_ADVERTISE")
    # The folder is this run's by its path, though its learner may have been lost before it had saved anything.
    become "$troupe/troupe" replay serve --adopt --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" --index "$index" \
      --bind "tcp://0.0.0.0:$port" \
      --data-dir "$TROUPE_RUN_DIR/replay/shard-$index" --join-timeout-s "$patience_s" "${words[@]}" ;;
  actor)
    name=actor-${TROUPE_HOST:-$(hostname)}-${2:?usage: troupe-start actor NUMBER}
    mapfile -t words < <(common "$name")
    [ -z "${TROUPE_RELAY:-}" ] || words+=(--relay "$TROUPE_RELAY")
    become "$troupe/troupe" actor --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" --name "$name" \
      --join-timeout-s "$patience_s" "${words[@]}" ;;
  evaluator)
    mapfile -t words < <(common evaluator)
    become "$troupe/troupe" evaluator --learner "$TROUPE_LEARNER" --keys "$TROUPE_KEYS" \
      --name "evaluator-${TROUPE_HOST:-$(hostname)}" \
      --join-timeout-s "$patience_s" "${words[@]}" ;;
  tensorboard)
    become "$troupe/python" -m tensorboard.main --logdir "${TROUPE_LOGDIR:-$TROUPE_RUN_DIR/tensorboard}" \
      --bind_all --port 6006 --reload_multifile=true --reload_interval=10 ;;
  board)
    words=(--host "${TROUPE_BOARD_HOST:-127.0.0.1}")
    [ -z "${TROUPE_BOARD_PUBLISHED:-}" ] || words+=(--published "$TROUPE_BOARD_PUBLISHED")
    become "$troupe/troupe" board "${TROUPE_LOGDIR:-$TROUPE_RUN_DIR}" --port 6007 "${words[@]}" ;;
  *)
    echo "troupe-start: error: unknown service '$role'; one of learner, learner-peer, replay, actor, evaluator, tensorboard, board" >&2
    exit 2 ;;
esac
