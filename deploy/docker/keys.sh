#!/usr/bin/env bash
# Make the run's keys once, and give each service a folder with no more of them than it needs.
#
#   troupe-keys SET FOLDER
#
# SET     the complete set; made by `troupe keys new` unless it is there
# FOLDER  gets FOLDER/learner, FOLDER/replay, FOLDER/actor, FOLDER/evaluator (volumes in docker-compose.yml)
set -euo pipefail
set_dir=${1:?usage: troupe-keys SET FOLDER}
folder=${2:?usage: troupe-keys SET FOLDER}
troupe keys new "$set_dir" --if-missing
for role in learner replay actor evaluator; do
  to=$folder/$role
  install -d -m 700 "$to"
  files=("$role.secret" learner.public replay.public)
  case $role in
    learner) files+=(allowed) ;;
    # The viewer's only looks: `troupe replay status` inside the container uses it.
    replay) files+=(allowed viewer.secret) ;;
  esac
  for file in "${files[@]}"; do
    # A wrong mode makes a service refuse a key whose content is right.
    cmp -s "$set_dir/$file" "$to/$file" && [ "$(stat -c %a "$to/$file")" = 600 ] && continue
    # Renamed over the old one: a server that reads the list meanwhile sees the one or the other.
    install -m 600 "$set_dir/$file" "$to/.$file.new"
    mv -f "$to/.$file.new" "$to/$file"
  done
done
