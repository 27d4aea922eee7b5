# Run a command, and again when it dies; not where it ends with @final_words@.
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
    if [ -n "$stop" ] || [[ $status =~ ^(@final@)$ ]]; then break; fi
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
