#!/bin/sh
# Build the base image of docker/*.Dockerfile without a container registry: Debian 12 with
# its own Python 3.11, from a Debian mirror, under the name that FROM uses. Needs root, debootstrap
# and buildah; images built on it are for tests, not for publishing.
#
#   docker/offline_base.sh                  # as docker.io/library/python:3.11-slim-bookworm
#   MIRROR=http://mirror.example/debian docker/offline_base.sh
#
# buildah's own settings, such as STORAGE_DRIVER, apply; buildah needs no daemon.
set -eu
base=$(sed -n 's/^ARG PYTHON_IMAGE=//p' "$(dirname "$0")/trainer.Dockerfile")
root=$(mktemp -d)
container=
trap 'test -z "$container" || buildah rm "$container" >/dev/null; rm -rf "$root"' EXIT

# python3.11-venv needs python3-distutils under another name, which debootstrap cannot resolve.
debootstrap --variant=minbase \
    --include=ca-certificates,netbase,python3-distutils,python3.11-venv,tzdata \
    bookworm "$root/system" "${MIRROR:-http://deb.debian.org/debian}"
for name in python python3 python3.11; do
    ln -s /usr/bin/python3.11 "$root/system/usr/local/bin/$name"
done
rm -rf "$root/system/var/cache/apt" "$root/system/var/lib/apt/lists" "$root/system/usr/share/doc"

container=$(buildah from scratch)
buildah copy --quiet "$container" "$root/system" /
buildah config --cmd python3 \
    --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit --quiet "$container" "$base"
