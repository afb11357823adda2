#!/usr/bin/env bash
# Trains on this host with all its devices, and again after a preemption or a crash.
#
#   launch/host.sh [--dry-run] --config=configs/base.py --workdir=runs/base ...
#
# Run it from the repository's root. PYTHON chooses the interpreter (default python);
# RETRIES and PAUSE are those of restart.sh, which has the policy.

options=()
[[ ${1:-} != --dry-run ]] || { options+=("$1") && shift; }
exec "$(dirname "$0")/restart.sh" ${options[@]+"${options[@]}"} \
  "${PYTHON:-python}" -m spanbert_jax.main "$@"
