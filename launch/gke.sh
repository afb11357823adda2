#!/usr/bin/env bash
# Trains on a TPU slice of a GKE cluster, as the JobSet of gke_jobset.yaml.
#
#   export NAME=spanbert IMAGE=REGION-docker.pkg.dev/PROJECT/REPOSITORY/spanbert VOLUME=claim
#   export ACCELERATOR=tpu-v5-lite-podslice TOPOLOGY=8x8 SPOT=1
#   launch/gke.sh [--dry-run] --config=configs/large.py --workdir=/shared/run ...
#
#   IMAGE      holds the repository as its working directory and jax[tpu]
#   VOLUME     a claim of a ReadWriteMany volume for corpus and work directory, seen in
#              the pods as MOUNT (default /shared)
#   CHIPS      chips of a host (default 4); SPOT=1 asks for Spot nodes
#   RESTARTS   of the whole job after lost processes (default 20)
#   RETRIES, PAUSE   those of restart.sh, which runs in each pod
#
# Needs kubectl with the cluster's credentials, JobSet 0.6 or newer in the cluster, and
# envsubst (package gettext). To end the run: kubectl delete jobset NAME

set -eu

fail() {
  echo "${0##*/}: $*" >&2
  exit 2
}

dry=
[[ ${1:-} != --dry-run ]] || { dry=1 && shift; }

for variable in NAME IMAGE VOLUME ACCELERATOR TOPOLOGY; do
  [[ -n ${!variable:-} ]] || fail "$variable is not set; see the head of $0"
done
command -v envsubst >/dev/null || fail "envsubst is missing: install gettext"

export CHIPS=${CHIPS:-4} MOUNT=${MOUNT:-/shared} RESTARTS=${RESTARTS:-20}
[[ $TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*)+$ ]] ||
  fail "TOPOLOGY=$TOPOLOGY is none: it counts the slice's chips, as in 4x8 or 2x2x4"
[[ $CHIPS =~ ^[1-9][0-9]*$ ]] ||
  fail "CHIPS=$CHIPS is no number of chips: a host has 1, 4 or 8"
chips=$((${TOPOLOGY//x/ * }))
export HOSTS=$((chips / CHIPS))
((HOSTS * CHIPS == chips)) ||
  fail "TOPOLOGY=$TOPOLOGY has $chips chips, which CHIPS=$CHIPS a host does not divide"
export SPOT_SELECTOR=
[[ ${SPOT:-0} != 1 ]] || SPOT_SELECTOR='cloud.google.com/gke-spot: "true"'
# Where they are empty, restart.sh has its own.
export RETRIES=${RETRIES:-} PAUSE=${PAUSE:-}

# As YAML strings in single quotes, in which only that quote is special.
((HOSTS == 1)) || set -- --distributed "$@"
quote=\'
arguments=
for word in "$@"; do
  arguments+="${arguments:+, }$quote${word//$quote/$quote$quote}$quote"
done
export ARGUMENTS=$arguments

# shellcheck disable=SC2016
manifest=$(envsubst '$NAME $RESTARTS $HOSTS $ACCELERATOR $TOPOLOGY $SPOT_SELECTOR
  $IMAGE $ARGUMENTS $RETRIES $PAUSE $CHIPS $MOUNT $VOLUME' <"$(dirname "$0")/gke_jobset.yaml")

if [[ -n $dry ]]; then
  echo "$manifest"
  echo "# kubectl apply --filename=-"
  exit
fi
kubectl apply --filename=- <<<"$manifest"
