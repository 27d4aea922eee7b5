#!/usr/bin/env bash
# Check an installed machine: every service of the given roles imports and prints its help, and a GPU computes.
#
#   verify.sh cpu|gpu ROLE...
#
# Packer runs it after a reboot, for a driver that does not fit the kernel shows only then.
set -euo pipefail
kind=${1:?usage: verify.sh cpu|gpu ROLE...}
shift
python=/opt/troupe/venv/bin/python
fail() { echo "verify.sh: error: $*" >&2; exit 1; }

for role in "$@"; do
  /opt/troupe/bin/troupe "$role" --help >/dev/null || fail "troupe $role does not start"
done
/opt/troupe/bin/troupe config validate >/dev/null || fail "the presets do not load"
test -x /opt/troupe/bin/troupe-start || fail "troupe-start is missing"
/opt/troupe/bin/troupe-node --help >/dev/null || fail "troupe-node does not start"
for role in "$@"; do
  compgen -G "/etc/systemd/system/troupe-$role*.service" >/dev/null || fail "no systemd unit of $role"
done
if command -v systemd-analyze >/dev/null; then
  systemd-analyze verify /etc/systemd/system/troupe-*.service || fail "a systemd unit is wrong"
fi
if [ "$kind" = gpu ]; then
  nvidia-smi >/dev/null || fail "the NVIDIA driver does not answer"
  "$python" - <<'PY' || fail "torch cannot use the GPU"
import torch

assert torch.cuda.is_available(), "torch sees no GPU"
a = torch.randn(1024, 1024, device="cuda")
assert torch.allclose(a @ torch.eye(1024, device="cuda"), a, atol=1e-3)
print("verify.sh:", torch.cuda.get_device_name(0), "torch", torch.__version__)
PY
fi
echo "verify.sh: $kind image with $* is whole"
