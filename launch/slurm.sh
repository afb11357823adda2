#!/usr/bin/env bash
# Trains on the GPUs of a SLURM job, one process a node:
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/large.py --workdir=/shared/run ...
#   launch/slurm.sh --dry-run ...   prints the commands; needs no SLURM
#
# Submit from the repository's root, in the environment that the job is to have; the
# root, the corpus and the work directory must be on a file system that all nodes see.
# Options of sbatch override those below. --ntasks-per-node=8 makes it a process a GPU.
# Before a time limit or a preemption the job saves and queues itself again.
#
#SBATCH --job-name=spanbert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

# SLURM runs a copy of this script, so that $0 says nothing about where launch/ is.
if [[ ! -f launch/restart.sh ]]; then
  echo "slurm.sh: there is no launch/ in $PWD: submit from the repository's root" >&2
  exit 2
fi
# shellcheck source=launch/restart.sh
source launch/restart.sh

dry=
[[ ${1:-} != --dry-run ]] || { dry=1 && shift; }

# The first process to end must not take those with it that still save; ten minutes
# later they hang. A failed node ends the job, and --requeue queues it again.
run=(srun --kill-on-bad-exit=0 --wait=600)
run+=("${PYTHON:-python}" -m spanbert_jax.main --distributed "$@")
if [[ ${SLURM_NTASKS_PER_NODE:-1} == 1 ]]; then
  # Under SLURM jax takes one GPU a process unless it is told which are the process's.
  devices=$(seq -s, 0 $((${SLURM_GPUS_ON_NODE:-8} - 1)))
  run=(env "JAX_LOCAL_DEVICE_IDS=$devices" "${run[@]}")
fi
requeue=(scontrol requeue "${SLURM_JOB_ID:-JOB}")

if [[ -n $dry ]]; then
  show sbatch launch/slurm.sh "$@"
  show "${run[@]}"
  show "${requeue[@]}"
  exit
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
  say "this is no SLURM job: sbatch launch/slurm.sh ..., or --dry-run"
  exit 2
fi

supervise "${run[@]}"
code=$?
if [[ -n $stopped ]] && { [[ $code == 75 ]] || lost "$code"; }; then
  # A job that was cancelled is no longer RUNNING, and must not come back.
  [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) != RUNNING ]] ||
    "${requeue[@]}"
fi
exit "$code"
