#!/usr/bin/env bash
# Install AWS's agents for Session Manager (shells without SSH) and CloudWatch (logs). Run as root, on EC2 only.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
region=${AWS_REGION:?AWS_REGION is not set}
arch=$(dpkg --print-architecture)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fetch() { python3 -c 'import sys, urllib.request as u; u.urlretrieve(sys.argv[1], sys.argv[2])' "$1" "$scratch/$2"; }

# Ubuntu's images bring the agent as a snap.
if ! command -v amazon-ssm-agent >/dev/null && ! snap list amazon-ssm-agent >/dev/null 2>&1; then
  fetch "https://s3.$region.amazonaws.com/amazon-ssm-$region/latest/debian_$arch/amazon-ssm-agent.deb" ssm.deb
  dpkg -i "$scratch/ssm.deb"
  systemctl enable amazon-ssm-agent
fi
if [ ! -x /opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl ]; then
  fetch "https://amazoncloudwatch-agent-$region.s3.$region.amazonaws.com/debian/$arch/latest/amazon-cloudwatch-agent.deb" cw.deb
  dpkg -i "$scratch/cw.deb"
fi
