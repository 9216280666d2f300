#!/bin/sh
# Run a command in an image without a container engine, as in a pod: as an unnamed user on a
# read-only root, with only /tmp, /dev/shm and /workspace writable. Needs root and
# buildah; the command uses this machine's network.
#
#   docker/offline_run.sh d2plm-trainer:0.1.0 d2plm --help
#   docker/offline_run.sh d2plm-mmseqs2:0.1.0 sh -s < docker/smoke/mmseqs2.sh
#   WORKSPACE=/srv/data docker/offline_run.sh d2plm-trainer:0.1.0 d2plm train …
#
# WORKSPACE is a folder to which user 12345 (or RUN_AS=uid:gid) can write; without it, /workspace is in memory.
set -eu
image=$1
shift
container=$(buildah from --pull-never "$image")
trap 'buildah umount "$container" > /dev/null; buildah rm "$container" > /dev/null' EXIT
root=$(buildah mount "$container")
environment=$(buildah inspect --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$container")
mkdir -p "$root/proc" "$root/dev" "$root/workspace"
# Written as by a container engine, because torchrun's workers look up their own host name.
echo "127.0.0.1 localhost $(hostname)" > "$root/etc/hosts"

# A separate mount namespace ensures that nothing stays mounted.
root="$root" environment="$environment" unshare --mount --pid --fork sh -eu -c '
    mount --bind "$root" "$root"
    mount -o remount,bind,ro "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    if [ -n "${WORKSPACE:-}" ]; then
        mount --bind "$WORKSPACE" "$root/workspace"
    else
        mount -t tmpfs -o mode=1777 tmpfs "$root/workspace"
    fi
    exec chroot --userspec="${RUN_AS:-12345:12345}" "$root" /usr/bin/env -i $environment \
        sh -c "cd /workspace && exec \"\$@\"" sh "$@"
' sh "$@"
