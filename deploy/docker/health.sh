#!/usr/bin/env bash
# Ask the service in this container whether it is well: the HEALTHCHECK of the images, cheap enough to be asked often.
# /readyz says that the service does its work, /healthz that its main loop still turns.
set -euo pipefail
for path in ${TROUPE_HEALTH_PATHS:-/readyz /healthz}; do
  exec 3<>"/dev/tcp/127.0.0.1/$TROUPE_METRICS_PORT"
  printf 'GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n' "$path" >&3
  read -r _ status _ <&3
  # To the end: a peer that hangs up in the middle would be an error to the service.
  last=$(tail -n 1 <&3)
  exec 3>&-
  if [ "$status" != 200 ]; then
    echo "$path: $status $last"
    exit 1
  fi
done
