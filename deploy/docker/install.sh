#!/usr/bin/env bash
# Inside a build: install what an image with these EXTRAS needs, but for Troupe's own code, into /opt/troupe/venv.
#
#   install.sh EXTRAS
set -euo pipefail
extras=${1:?usage: install.sh EXTRAS}
# An empty build argument is set all the same, and pip would take it at its word.
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_FIND_LINKS; do
  [ -n "${!name:-}" ] || unset "$name"
done
export PIP_FIND_LINKS="/wheels ${PIP_FIND_LINKS:-}"
# Without packages in the folder this installs the requirements, the command and the metadata.
bash /src/deploy/scripts/install.sh "$extras" /src
echo docker >/opt/troupe/venv/troupe-image  # errors say how to build an image with another extra
# Nothing is installed in a container: pip would only be weight, and one thing more to keep patched.
useless=(pip)
[ "$extras" != replay ] || useless+=(setuptools)
/opt/troupe/venv/bin/python -m pip --quiet uninstall --yes "${useless[@]}"
