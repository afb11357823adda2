#!/usr/bin/env bash
# Runs a command and starts it again as its exit code says: the one policy of launch/.
#
#   launch/restart.sh [--dry-run] COMMAND... [--workdir=DIR ...]
#
#   0                     done
#   75                    saved after a signal: again, without end
#   69, 253, a signal     the job lost a process: again, up to RETRIES times (default 5)
#                         without a new checkpoint under DIR in between
#   else                  stop with that code; 130, Ctrl-C, is no death by signal
#
# PAUSE is the seconds between two starts (default 5). SIGTERM, SIGINT and SIGHUP (as
# SIGTERM) are passed on to the command; the script then ends with the command's code.
# Sourced, it only defines `supervise`, `start` and what they call.

# A child in a process group of its own gets a Ctrl-C from us alone, so once.
set -m

stopped=     # the last signal that came
interrupted= # one came during a wait
child=       # the process that runs, if any
passed=      # one has been passed on to it

say() { echo "${0##*/}: $*" >&2; }

# A command as one could type it.
show() {
  local line
  printf -v line '%q ' "$@"
  echo "${line% }"
}

# workdir_of ARGUMENT...: the value of --workdir.
workdir_of() {
  local word before='' directory=''
  for word in "$@"; do
    [[ $word != --workdir=* ]] || directory=${word#*=}
    [[ $before != --workdir ]] || directory=$word
    before=$word
  done
  echo "$directory"
}

# Two functions for launchers to replace whose command runs on other machines:
# pass_on SIGNAL PID sends a signal to the command.
pass_on() { kill -s "$1" -- "$2"; }

# list_checkpoints COMMAND... prints the names in the checkpoints directory, one a line.
list_checkpoints() {
  local directory
  directory=$(workdir_of "$@")
  [[ -z $directory ]] || ls "$directory/checkpoints" 2>/dev/null
}

# Unfinished checkpoints have longer names.
newest_checkpoint() { list_checkpoints "$@" | grep -xE '[0-9]+' | sort -n | tail -n 1; }

# Whether an exit code means a lost process; srun says 253 when memory ran out.
lost() { [[ $1 == 69 || $1 == 253 ]] || ((128 < $1 && $1 <= 192 && $1 != 130)); }

on_signal() {
  stopped=$1 interrupted=1
  [[ -n $child ]] || return 0
  passed=1
  pass_on "$1" "$child"
}
trap 'on_signal TERM' TERM HUP
trap 'on_signal INT' INT

# start COMMAND...: runs it to its end and returns its code, whatever signals come.
start() {
  local code
  passed=
  "$@" </dev/null &
  child=$!
  # One that came before there was a child; a second SIGINT would end it unsaved.
  [[ -z $stopped || -n $passed ]] || pass_on "$stopped" "$child"
  while :; do
    interrupted=
    wait "$child"
    code=$?
    [[ -n $interrupted ]] || break
  done
  child=
  return "$code"
}

# supervise COMMAND...: the policy; returns the last code.
supervise() {
  local code newest seen=-1 left=${RETRIES:-5}
  while :; do
    start "$@"
    code=$?
    [[ -z $stopped ]] || return "$code"
    if lost "$code"; then
      newest=$(newest_checkpoint "$@")
      ((${newest:--1} <= seen)) || seen=$newest left=${RETRIES:-5}
      if ((left == 0)); then
        say "exit code $code, and no checkpoint after ${RETRIES:-5} retries: giving up"
        return "$code"
      fi
      left=$((left - 1))
    elif [[ $code != 75 ]]; then
      return "$code"
    fi
    say "exit code $code: starting again in ${PAUSE:-5} s"
    start sleep "${PAUSE:-5}"
    [[ -z $stopped ]] || return "$code"
  done
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  command=supervise
  [[ ${1:-} != --dry-run ]] || { command=show && shift; }
  (($#)) || { say "which command? launch/restart.sh COMMAND..." && exit 2; }
  "$command" "$@"
fi
