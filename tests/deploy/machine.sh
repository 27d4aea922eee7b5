#!/usr/bin/env bash
# Become a machine: files, processes and, with a CGROUP, a cgroup namespace of its own. All is gone with the command.
#
#   machine.sh ROOT CGROUP|- [SOURCE=TARGET]... -- COMMAND...
#
# ROOT    becomes / ; it gets this host's /usr, and every SOURCE at TARGET, read-only
# CGROUP  folder of a cgroup (version 2) that systemd may divide further
set -euo pipefail

if [ "$1" != --inside ]; then
  spaces=(--mount --pid --fork --uts --ipc --kill-child)
  if [ "$2" != - ]; then
    echo $$ >"$2/cgroup.procs"
    spaces+=(--cgroup)
  fi
  exec unshare "${spaces[@]}" bash "$0" --inside "$@"
fi
shift
root=$1 cgroup=$2
shift 2

read_only() {  # SOURCE TARGET
  mkdir -p "$2"
  mount --rbind "$1" "$2"
  mount -o remount,bind,ro "$2"
}

mount --make-rprivate /
mount --bind "$root" "$root"
mkdir -p "$root"/{proc,sys,dev,run,tmp,old}
for link in bin sbin lib lib64; do ln -sfn "usr/$link" "$root/$link"; done
read_only /usr "$root/usr"
while [ "$1" != -- ]; do
  read_only "${1%%=*}" "$root/${1#*=}"
  shift
done
shift
mount -t proc proc "$root/proc"
read_only "$root/proc/sys" "$root/proc/sys"  # the kernel's settings are the host's
mount -t sysfs -o ro sysfs "$root/sys"
if [ "$cgroup" != - ]; then mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"; fi
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
cd "$root"
pivot_root . old
umount -l old
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 container=netns "$@"
