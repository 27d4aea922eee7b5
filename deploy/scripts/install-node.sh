#!/usr/bin/env bash
# Make an installed machine (install.sh) into a cloud node: the systemd units and what runs at boot. Run as root.
#
#   install-node.sh UNITS_DIR NODE_DIR
set -euo pipefail
units=${1:?usage: install-node.sh UNITS_DIR NODE_DIR}
node=${2:?usage: install-node.sh UNITS_DIR NODE_DIR}
home=/opt/troupe
# In an environment of its own: what AWS's client needs must not move the pins of what trains.
test -x "$home/node/bin/python" || python3 -m venv "$home/node"
"$home/node/bin/python" -m pip install --quiet --no-cache-dir -r "$node/requirements.txt"
install -d -m 755 "$home/lib/troupe_node" /etc/troupe
install -m 644 "$node"/troupe_node/*.py "$home/lib/troupe_node/"
printf '#!/bin/sh\nPYTHONPATH=%s/lib exec %s/node/bin/python -m troupe_node "$@"\n' "$home" "$home" >"$home/bin/troupe-node"
chmod 755 "$home/bin/troupe-node"
install -m 644 "$units"/*.service "$units"/*.timer /etc/systemd/system/
# Only what reads the machine's role starts at boot; it starts the services of that role.
install -d /etc/systemd/system/multi-user.target.wants
ln -sf ../troupe-node.service /etc/systemd/system/multi-user.target.wants/troupe-node.service
echo "install-node.sh: done"
