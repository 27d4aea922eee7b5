#!/usr/bin/env bash
# Install Troupe into /opt/troupe on Debian 12, Ubuntu 24.04 or an image made of them: machines and containers alike.
#
#   install.sh EXTRAS SOURCE
#
# EXTRAS  extras of the package, such as `learner`, `actor,evaluator`, or `replay` (no torch)
# SOURCE  a wheel, or a folder with pyproject.toml and constraints.txt
#
# Environment: TORCH_INDEX names an index of torch wheels (PyPI's own need CUDA and gigabytes); the usual PIP_*
# variables work too. Run as root. Safe to run again.
set -euo pipefail
extras=${1:?usage: install.sh EXTRAS SOURCE}
source=${2:?usage: install.sh EXTRAS SOURCE}
here=$(cd "$(dirname "$0")" && pwd)
home=/opt/troupe

# Images of Python bring all that is needed here.
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends ca-certificates python3 python3-venv >/dev/null
  rm -rf /var/lib/apt/lists/*
fi

id troupe >/dev/null 2>&1 || useradd --system --home-dir /var/lib/troupe --shell /usr/sbin/nologin troupe
install -d -m 755 "$home" "$home/bin"
install -d -m 750 -o troupe -g troupe /var/lib/troupe /var/log/troupe

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "install.sh: error: Python 3.11 or newer is needed" >&2; exit 2; }
test -x "$home/venv/bin/python" || python3 -m venv "$home/venv"
constraints=$home/constraints.txt
if [ -d "$source" ]; then
  install -m 644 "$source/constraints.txt" "$constraints"
else
  install -m 644 "$(dirname "$source")/constraints.txt" "$constraints"
fi
pip() { "$home/venv/bin/python" -m pip install --quiet --no-cache-dir -c "$constraints" "$@"; }
case ",$extras," in
  *,learner,*|*,actor,*|*,evaluator,*|*,all,*)
    if [ -n "${TORCH_INDEX:-}" ]; then
      pip --index-url "$TORCH_INDEX" --extra-index-url "${PIP_INDEX_URL:-https://pypi.org/simple}" torch
    fi ;;
esac
pip "troupe-rl[$extras] @ file://$(realpath "$source")"
ln -sf "$home/venv/bin/troupe" "$home/bin/troupe"
install -m 755 "$here/start.sh" "$home/bin/troupe-start"
version=$("$home/venv/bin/python" -c 'import importlib.metadata as m; print(m.version("troupe-rl"))')
echo "install.sh: troupe $version, extras $extras"
