#!/usr/bin/env bash
# Trains on a Cloud TPU slice, and on a new one when it was preempted.
#
#   export NAME=spanbert ZONE=us-central2-b ACCELERATOR=v4-32 RUNTIME=tpu-ubuntu2204-base
#   launch/tpu_vm.sh [--dry-run] up --config=configs/large.py --workdir=/shared/run ...
#
#   create    waits for the slice, stops what runs there and installs the repository's
#             HEAD on all its hosts
#   run ...   stops what runs there, then trains, once
#   delete    gives the slice back
#   up ...    all of it as often as the policy of restart.sh says; then deletes the
#             slice, but leaves it after a signal and when it gives up with 69
#
#   SPOT=1    asks for a Spot slice
#   SETUP     a command that each host runs before the installation, such as the mount
#             of the shared directory that holds corpus and work directory
#   POLL      seconds between two looks at the slice's state (default 60)
#
# Run it from the repository's root. Needs gcloud with a project and, for several hosts,
# its key in the agent: ssh-add ~/.ssh/google_compute_engine

# shellcheck source=launch/restart.sh
source "$(dirname "$0")/restart.sh"

dry=
[[ ${1:-} != --dry-run ]] || { dry=1 && shift; }
task=${1:-}
shift $(($# > 0))
arguments=("$@")
for variable in NAME ZONE ACCELERATOR RUNTIME; do
  [[ -n ${!variable:-} ]] || { say "$variable is not set; see the head of $0" && exit 2; }
done

# A process outlives an ssh that breaks: the lock keeps a second one from the chips, and
# the installation from its files.
lock="flock --conflict-exit-code=69"
kill_there="pkill -TERM -f '^[^ ]*python -m spanbert_jax.main'"
stop_there="mkdir -p spanbert_jax; $kill_there; \
$lock --timeout=300 spanbert_jax/lock true"
# After a signal nothing of this call may start on a host, also not from an ssh that is
# still on its way. One that has looked at the mark already is there a second later.
mark=$(uname -n)-$$-$(date +%s)
look_there="{ ! grep -qsxF $mark spanbert_jax/stopped || exit 75; }"
train_there="$look_there && cd spanbert_jax && exec $lock --nonblock lock \
$(show .venv/bin/python -m spanbert_jax.main --distributed "$@")"
end_there="mkdir -p spanbert_jax; echo $mark >spanbert_jax/stopped; \
{ $kill_there || { sleep 1; $kill_there; }; } && echo stopping || true"
install_there="$look_there && rm -rf spanbert_jax/spanbert_jax && mkdir -p spanbert_jax \
&& tar -xzf spanbert_jax.tar.gz -C spanbert_jax && { ${SETUP:-true}; } \
&& cd spanbert_jax && export PIP_BREAK_SYSTEM_PACKAGES=1 \
&& python3 -m pip install --user --quiet uv \
&& python3 -m uv venv --quiet --allow-existing --python=3.12 .venv \
&& python3 -m uv pip install --quiet -r requirements.txt 'jax[tpu]'"

spot=()
[[ ${SPOT:-0} != 1 ]] || spot=(--spot)

step() { if [[ -n $dry ]]; then show "$@"; else "$@"; fi; }

# on_hosts WHICH COMMAND: of several codes gcloud returns the first that is not 0. It
# tries a dead host ten times; the options let it see in minutes that one is dead.
on_hosts() {
  step gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker="$1" \
    --ssh-flag=-oConnectTimeout=20 --ssh-flag=-oServerAliveInterval=30 --command="$2"
}

# A list is empty where there is nothing; a failure is one of gcloud.
list() {
  gcloud compute tpus "$1" list --zone="$ZONE" --filter="name~/$NAME\$" --format="value($2)"
}

# QUEUE/NODE: the state of the queued resource and of its slice.
state() {
  local queue node
  queue=$(list queued-resources state.state) && node=$(list tpu-vm state) &&
    echo "$queue/$node"
}

request() {
  step gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" \
    --zone="$ZONE" --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME" \
    ${spot[@]+"${spot[@]}"}
}

delete() {
  step gcloud compute tpus queued-resources delete "$NAME" --zone="$ZONE" --force --quiet
}

create() {
  local state
  [[ -z $dry ]] || { request && return; }
  while :; do
    # An outage here says nothing about the slice, so it is no attempt either.
    if ! state=$(state); then
      say "gcloud fails: looking again in ${POLL:-60} s"
      sleep "${POLL:-60}"
      continue
    fi
    case $state in
    ACTIVE/READY | /READY) return 0 ;;
    /) request || return 69 ;;
    FAILED/*) say "the request failed" && delete && return 69 ;;
    ACCEPTED/* | WAITING_FOR_RESOURCES/* | PROVISIONING/* | CREATING/* | DELETING/* | \
      SUSPENDING/* | ACTIVE/CREATING | ACTIVE/STARTING | ACTIVE/RE*) sleep "${POLL:-60}" ;;
    *) say "the slice is $state: a new one" && delete || return 69 ;;
    esac
  done
}

stop() { on_hosts all "$stop_there"; }

install() {
  step gcloud compute tpus tpu-vm scp "$archive" "$NAME:spanbert_jax.tar.gz" \
    --zone="$ZONE" --worker=all && on_hosts all "$install_there"
}

train() { on_hosts all "$train_there"; }

attempt() {
  local code
  create || return
  stop && install && train
  code=$?
  [[ $code != 0 && -z $dry ]] || return "$code"
  [[ $(state) =~ ^(ACTIVE)?/READY$ ]] || return 75
  # gcloud says 1 when it fails itself and 255 when ssh does.
  [[ $code != 1 && $code != 255 ]] || code=69
  return "$code"
}

# Where the hosts train, they save and end the command here; else it is ended here.
pass_on() {
  local answers
  # A second signal must not take the ssh from the first.
  answers=$(trap '' INT TERM HUP && on_hosts all "$end_there") ||
    say "not every host could be told to stop"
  [[ $answers == *stopping* ]] || kill -s TERM -- "-$2"
}

list_checkpoints() {
  on_hosts 0 "cd spanbert_jax && ls $(show "$(workdir_of "${arguments[@]}")/checkpoints")"
}

archive=${TMPDIR:-/tmp}/$NAME.tar.gz
pack() { step git archive --format=tar.gz --output="$archive" HEAD; }

case $task in
create) pack && start eval 'create && stop && install' ;;
run) start eval 'stop && train' ;;
delete) delete ;;
up)
  pack || exit
  supervise attempt
  code=$?
  if [[ -n $stopped ]]; then
    say "stopped; the slice is still there: launch/tpu_vm.sh delete"
  elif [[ $code == 69 ]]; then
    # Perhaps it is the network here that fails, and all is well there.
    say "gave up; if there is a slice, it is still there: launch/tpu_vm.sh delete"
  else
    delete || code=69
  fi
  exit "$code"
  ;;
*) say "no task ${task:-given}: create, run, delete or up" && exit 2 ;;
esac
