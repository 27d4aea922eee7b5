# What `troupe`, `tensorboard` and `pip` are in the shell of a reader who copies a block:
# services go into the background, as if each had a terminal of its own, and Ctrl-C stops what trains for long.

: "${PAGE_LIMIT_S:=60}"

_served() {
  local log
  log=$(mktemp served-XXXXXX.log)
  (
    command "$@" > "$log" 2>&1 < /dev/null &
    echo "$! $log $*" >> "$PAGE_SERVED"
    code=0
    wait "$!" || code=$?
    echo "$code" > "${log%.log}.code"
  ) > /dev/null 2>&1 &
  until test -s "$log" || test -s "${log%.log}.code"; do sleep 0.2; done # its first line
  sleep 4
  if test -s "${log%.log}.code"; then
    cat "$log"
    return 1
  fi
}

# A learner of the page gets SIGTERM, for the next one goes on with its run.
_end_learner() {
  local pid log words
  while read -r pid log words; do
    case "$words" in "troupe learner "*) ;; *) continue ;; esac
    kill "$pid" 2> /dev/null || continue
    until test -s "${log%.log}.code"; do sleep 0.1; done
  done < "$PAGE_SERVED"
}

troupe() {
  local code=0
  case " $* " in
    *" --help "* | *" --export "*) command troupe "$@"; return ;;
  esac
  case " $* " in
    *" learner "*" --resume "*) _end_learner ;;
  esac
  case "$1 ${2-}" in
    "learner "* | "actor "* | "evaluator "* | "board "* | "replay serve") _served troupe "$@"; return ;;
    "train "* | "resume "* | "sweep "*)
      local limit_s=$PAGE_LIMIT_S
      # Two runs at a time, and the next block compares what both have.
      test "$1" = sweep && limit_s=$((3 * limit_s))
      timeout --preserve-status --signal=INT --kill-after=60 "$limit_s" troupe "$@" || code=$?
      test "$code" = 130 || return "$code"
      return 0
      ;;
  esac
  command troupe "$@" || code=$?
  if test "$1 $code" = "doctor 7"; then
    return 0 # it found something: this machine may be busy
  fi
  return "$code"
}

tensorboard() { _served tensorboard "$@"; }

# Into the environment of the page; everything that a package needs is there.
pip() { command pip --python .venv/bin/python "$@" --no-build-isolation --no-deps --no-index; }
