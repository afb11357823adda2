"""The launch scripts: what they print, what they run, when they start again."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import runs

LAUNCH = runs.REPOSITORY / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh"))
ARGUMENTS = ["--config=configs/large.py", "--workdir=/shared/a run"]
TYPED = r"--config=configs/large.py --workdir=/shared/a\ run"
TPU = {"NAME": "bert", "ZONE": "z", "ACCELERATOR": "v4-32", "RUNTIME": "base"}
GKE = {
    "NAME": "bert",
    "IMAGE": "registry/image:1",
    "VOLUME": "claim",
    "ACCELERATOR": "tpu-v5-lite-podslice",
    "TOPOLOGY": "4x8",
}
SSH = (
    "gcloud compute tpus tpu-vm ssh bert --zone=z --worker=all"
    " --ssh-flag=-oConnectTimeout=20 --ssh-flag=-oServerAliveInterval=30 --command="
)

# Does what the next line of `plan` says, and logs its call.
PLANNED = """
echo "$(basename "$0") $*" >>log
read -r next <plan
sed -i 1d plan
eval "$next"
"""
# A slice whose states are the files `queue` and `node`.
GCLOUD = """
case "$*" in
*queued-resources\\ list*) cat queue 2>/dev/null; exit 0 ;;
*tpu-vm\\ list*) cat node 2>/dev/null; exit 0 ;;
*queued-resources\\ create*) echo create >>log; echo ACTIVE >queue; echo READY >node ;;
*queued-resources\\ delete*) echo delete >>log; rm -f queue node ;;
*tpu-vm\\ scp*) echo copy >>log ;;
*python3*) echo install >>log ;;
*stopping*) echo stop >>log; touch stop; echo stopping ;;
*pkill*) echo stop >>log ;;
*spanbert_jax.main*)
  echo train >>log
  read -r next <plan
  sed -i 1d plan
  eval "$next"
  ;;
*checkpoints*) echo look >>log; ls checkpoints ;;
*) exit 99 ;;
esac
"""
# Counts the signals that come, then ends as main does after a save.
WAITING = """
import signal, time
caught = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: caught.append(number))
print("ready", flush=True)
while not caught:
    time.sleep(0.01)
time.sleep(0.1)
print(*(signal.Signals(number).name for number in caught), flush=True)
raise SystemExit(75)
"""


def write_tool(directory: Path, name: str, script: str) -> Path:
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{script}")
    path.chmod(0o755)
    return path


def write_plan(directory: Path, *lines: str) -> None:
    (directory / "plan").write_text("".join(f"{line}\n" for line in lines))


def read_log(directory: Path) -> list[str]:
    path = directory / "log"
    return path.read_text().splitlines() if path.exists() else []


def make_environment(directory: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(directory),
        "PAUSE": "0",
        "POLL": "0",
        **more,
    }


def start(
    directory: Path, script: str, *arguments: str, **more: str
) -> subprocess.Popen[str]:
    """Starts a script in a directory that looks like the repository's root."""
    if not (directory / "launch").exists():
        (directory / "launch").symlink_to(LAUNCH)
    return subprocess.Popen(
        [f"launch/{script}", *arguments],
        cwd=directory,
        env=make_environment(directory, more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(directory: Path, script: str, *arguments: str, **more: str) -> runs.Exit:
    return runs.wait(start(directory, script, *arguments, **more), seconds=60)


# ---- What stands there


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_parses_a_script(script: str) -> None:
    assert os.access(LAUNCH / script, os.X_OK)
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)


def test_shellcheck_finds_nothing() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    if shellcheck is None:
        pytest.skip("no shellcheck; pip install -r requirements-dev.txt")
    done = subprocess.run(
        [shellcheck, "--external-sources", *(f"launch/{name}" for name in SCRIPTS)],
        cwd=runs.REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")


# ---- Dry runs


def dry_run(directory: Path, script: str, *arguments: str, **more: str) -> list[str]:
    """The lines that it prints; a call of any tool fails."""
    for tool in ("gcloud", "git", "kubectl", "python", "sbatch", "scontrol", "srun"):
        write_tool(directory, tool, "echo called >>log; exit 99")
    done = run(directory, script, "--dry-run", *arguments, **more)
    assert (done.code, done.errors, read_log(directory)) == (0, "", [])
    return done.output.splitlines()


def test_dry_run_of_a_command(tmp_path: Path) -> None:
    assert dry_run(tmp_path, "restart.sh", "python", "a b") == [r"python a\ b"]


def test_dry_run_on_a_host(tmp_path: Path) -> None:
    assert dry_run(tmp_path, "host.sh", *ARGUMENTS) == [
        f"python -m spanbert_jax.main {TYPED}"
    ]


def test_dry_run_under_slurm(tmp_path: Path) -> None:
    srun = "srun --kill-on-bad-exit=0 --wait=600 python -m spanbert_jax.main"
    devices = r"env JAX_LOCAL_DEVICE_IDS=0\,1\,2\,3\,4\,5\,6\,7"
    assert dry_run(tmp_path, "slurm.sh", *ARGUMENTS) == [
        f"sbatch launch/slurm.sh {TYPED}",
        f"{devices} {srun} --distributed {TYPED}",
        "scontrol requeue JOB",
    ]
    # With a process for each GPU, jax takes the right one.
    lines = dry_run(tmp_path, "slurm.sh", *ARGUMENTS, SLURM_NTASKS_PER_NODE="8")
    assert lines[1] == f"{srun} --distributed {TYPED}"


def test_dry_run_on_a_tpu_slice(tmp_path: Path) -> None:
    lines = dry_run(tmp_path, "tpu_vm.sh", "up", *ARGUMENTS, SPOT="1", **TPU)
    archive = tmp_path / "bert.tar.gz"
    assert lines[:2] == [
        f"git archive --format=tar.gz --output={archive} HEAD",
        "gcloud compute tpus queued-resources create bert --node-id=bert --zone=z"
        " --accelerator-type=v4-32 --runtime-version=base --spot",
    ]
    assert lines[3] == (
        f"gcloud compute tpus tpu-vm scp {archive} bert:spanbert_jax.tar.gz"
        " --zone=z --worker=all"
    )
    assert all(lines[index].startswith(SSH) for index in (2, 4, 5))
    assert "pkill" in lines[2]
    assert "requirements.txt" in lines[4]
    assert "spanbert_jax.main" in lines[5]
    assert lines[6:] == [
        "gcloud compute tpus queued-resources delete bert --zone=z --force --quiet"
    ]


@pytest.mark.parametrize(
    ("task", "verbs"),
    [("create", ["git", "create", "ssh", "scp", "ssh"]), ("run", ["ssh"] * 2)],
)
def test_dry_run_of_a_task(tmp_path: Path, task: str, verbs: list[str]) -> None:
    lines = dry_run(tmp_path, "tpu_vm.sh", task, *ARGUMENTS, SPOT="0", **TPU)
    assert len(lines) == len(verbs)
    assert not any("--spot" in line for line in lines)
    for line, verb in zip(lines, verbs, strict=True):
        assert f"{verb} " in line


def test_the_command_for_the_hosts_survives_its_quoting(tmp_path: Path) -> None:
    """A shell reads the printed line, then gcloud's ssh hands it to another one."""
    line = dry_run(tmp_path, "tpu_vm.sh", "run", *ARGUMENTS, **TPU)[-1]
    write_tool(tmp_path, "flock", 'printf "%s\\n" "$@"')
    (tmp_path / "spanbert_jax").mkdir()
    remote = subprocess.run(
        [
            "bash",
            "-c",
            f'set -- {line}; bash -c "${{@: -1:1}}"'.replace("--command=", ""),
        ],
        cwd=tmp_path,
        env=make_environment(tmp_path, {}),
        capture_output=True,
        text=True,
        check=True,
    )
    words = remote.stdout.splitlines()
    assert words[3:] == [
        ".venv/bin/python",
        "-m",
        "spanbert_jax.main",
        "--distributed",
        *ARGUMENTS,
    ]


@pytest.mark.parametrize(
    ("script", "arguments", "more", "message"),
    [
        ("restart.sh", [], {}, "which command"),
        ("slurm.sh", ARGUMENTS, {}, "sbatch"),
        ("tpu_vm.sh", ["up"], {**TPU, "ZONE": ""}, "ZONE is not set"),
        ("tpu_vm.sh", ["start"], TPU, "no task start"),
        ("tpu_vm.sh", [], TPU, "no task given"),
        ("gke.sh", ARGUMENTS, {**GKE, "IMAGE": ""}, "IMAGE is not set"),
        ("gke.sh", ARGUMENTS, {**GKE, "TOPOLOGY": "3x3"}, "9 chips, which CHIPS=4"),
        ("gke.sh", ARGUMENTS, {**GKE, "TOPOLOGY": "4x"}, "TOPOLOGY=4x is none"),
        ("gke.sh", ARGUMENTS, {**GKE, "TOPOLOGY": "4 x 8"}, "TOPOLOGY=4 x 8 is none"),
        ("gke.sh", ARGUMENTS, {**GKE, "CHIPS": "0"}, "CHIPS=0 is no number"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path,
    script: str,
    arguments: list[str],
    more: Mapping[str, str],
    message: str,
) -> None:
    write_tool(tmp_path, "envsubst", "exit 99")
    done = run(tmp_path, script, *arguments, **more)
    assert (done.code, done.output) == (2, "")
    assert len(done.errors.splitlines()) == 1
    assert done.errors.startswith(f"{script}: ")
    assert message in done.errors


# ---- The policy


def restart(
    directory: Path, *plan: str, code: int, starts: int, retries: int = 2
) -> runs.Exit:
    command = write_tool(directory, "command", PLANNED)
    write_plan(directory, *plan)
    done = run(
        directory, "restart.sh", str(command), "--workdir=run", RETRIES=str(retries)
    )
    assert (done.code, len(read_log(directory))) == (code, starts), done
    return done


def test_a_finished_command_is_not_started_again(tmp_path: Path) -> None:
    restart(tmp_path, "exit 0", code=0, starts=1)
    assert read_log(tmp_path) == ["command --workdir=run"]


def test_a_saved_one_is_started_again_without_end(tmp_path: Path) -> None:
    restart(tmp_path, *["exit 75"] * 10, "exit 0", code=0, starts=11)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 130, 255])
def test_a_failed_one_stops_with_its_code(tmp_path: Path, code: int) -> None:
    restart(tmp_path, f"exit {code}", code=code, starts=1)


@pytest.mark.parametrize(
    "end", ["exit 69", "exit 253", "kill -KILL $$", "kill -ABRT $$"]
)
def test_a_lost_one_is_started_again(tmp_path: Path, end: str) -> None:
    restart(tmp_path, end, end, "exit 0", code=0, starts=3)


def test_retries_without_a_checkpoint_are_bounded(tmp_path: Path) -> None:
    unfinished = "mkdir -p run/checkpoints/10.orbax-checkpoint-tmp"
    plan = ["exit 69", f"{unfinished}; kill -KILL $$", "exit 69", "exit 0"]
    done = restart(tmp_path, *plan, code=69, starts=3)
    assert "giving up" in done.errors


def test_a_checkpoint_renews_the_retries(tmp_path: Path) -> None:
    save = "mkdir -p run/checkpoints/{}"
    plan = [
        f"{save.format(9)}; exit 69",
        "exit 69",
        # As a number it is the newer one.
        f"{save.format(10)}; exit 69",
        "exit 75",
        "exit 69",
        "exit 69",
        "exit 0",
    ]
    restart(tmp_path, *plan, code=69, starts=6)


def test_no_retries(tmp_path: Path) -> None:
    restart(tmp_path, "exit 75", "exit 69", code=69, starts=2, retries=0)


# ---- Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("script", ["restart.sh", "host.sh"])
def test_a_signal_reaches_the_command_once(
    tmp_path: Path, script: str, number: signal.Signals
) -> None:
    """The whole group gets it, as from a terminal."""
    (tmp_path / "waiting.py").write_text(WAITING)
    write_tool(tmp_path, "python", f'exec "{sys.executable}" waiting.py')
    process = start(tmp_path, script, "python")
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    got = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert runs.wait(process, seconds=60) == runs.Exit(75, f"{got.name}\n", "")


def test_a_signal_at_any_moment_of_a_start_is_passed_on_once(tmp_path: Path) -> None:
    """It comes before the first, the second, ... command of the script."""
    (tmp_path / "launch").symlink_to(LAUNCH)
    script = """
    source launch/restart.sh
    pass_on() { echo "$1" >>"passed$moment"; kill -s "$1" -- "$2"; }
    set -T # functions have the trap too
    for moment in {1..9}; do
      stopped='' count=0
      trap '((BASHPID != $$ || ++count != moment)) || kill -s TERM $$' DEBUG
      start sleep 60
      echo $?
      trap - DEBUG
    done
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["143"] * 9, done.stderr
    passed = [(tmp_path / f"passed{moment}").read_text() for moment in range(1, 10)]
    assert passed == ["TERM\n"] * 9


def test_a_signal_between_two_starts_ends_the_wait(tmp_path: Path) -> None:
    write_plan(tmp_path, "exit 75", "exit 0")
    command = write_tool(tmp_path, "command", PLANNED)
    process = start(tmp_path, "restart.sh", str(command), PAUSE="600")
    assert "starting again" in process.stderr.readline()
    process.terminate()
    assert runs.wait(process, seconds=60).code == 75
    assert len(read_log(tmp_path)) == 1


def test_a_command_that_ignores_the_signal_is_waited_for(tmp_path: Path) -> None:
    command = write_tool(
        tmp_path, "command", "trap '' TERM; echo ready; sleep 0.3; exit 4"
    )
    process = start(tmp_path, "restart.sh", str(command))
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert runs.wait(process, seconds=60).code == 4


# ---- SLURM


def start_job(directory: Path, state: str, *plan: str) -> subprocess.Popen[str]:
    write_tool(directory, "srun", 'echo "$JAX_LOCAL_DEVICE_IDS" >>log\n' + PLANNED)
    write_tool(directory, "scontrol", 'echo "scontrol $*" >>log')
    write_tool(directory, "squeue", f"echo {state}")
    write_plan(directory, *plan)
    return start(
        directory,
        "slurm.sh",
        *ARGUMENTS,
        SLURM_JOB_ID="7",
        SLURM_NTASKS_PER_NODE="1",
        SLURM_GPUS_ON_NODE="2",
    )


@pytest.mark.parametrize(
    ("state", "end", "requeued"),
    [
        ("RUNNING", "exit 75", True),
        ("RUNNING", "exit 137", True),
        ("RUNNING", "exit 4", False),
        ("COMPLETING", "exit 75", False),
    ],
)
def test_a_job_with_a_warning_queues_itself_again(
    tmp_path: Path, state: str, end: str, requeued: bool
) -> None:
    """Unless it has failed or was cancelled."""
    wait = f"trap '{end}' TERM; echo ready; while :; do sleep 0.05; done"
    process = start_job(tmp_path, state, wait)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert runs.wait(process, seconds=60).code == int(end.split()[1])
    log = read_log(tmp_path)
    assert log[0] == "0,1"
    assert log[1].startswith("srun --kill-on-bad-exit=0")
    assert log[2:] == ["scontrol requeue 7"] * requeued


def test_a_job_that_lost_a_process_goes_on_in_place(tmp_path: Path) -> None:
    process = start_job(tmp_path, "RUNNING", "exit 137", "exit 75", "exit 0")
    assert runs.wait(process, seconds=60).code == 0
    assert [line.split()[0] for line in read_log(tmp_path)] == ["0,1", "srun"] * 3


# ---- Cloud TPU


@pytest.fixture
def tpu(tmp_path: Path) -> Path:
    write_tool(tmp_path, "gcloud", GCLOUD)
    write_tool(tmp_path, "git", "exit 0")
    return tmp_path


ATTEMPT = ["stop", "copy", "install", "train"]


def test_up_outlives_preemptions(tpu: Path) -> None:
    preempted = "echo SUSPENDED >queue; echo PREEMPTED >node"
    write_plan(
        tpu,
        "exit 75",
        # It stood there long enough to save, then did not, then was gone.
        f"{preempted}; exit 75",
        *[f"{preempted}; exit 255"] * 3,
        "rm node; exit 1",
        "exit 0",
    )
    done = run(tpu, "tpu_vm.sh", "up", *ARGUMENTS, RETRIES="0", **TPU)
    assert done.code == 0, done
    again = ["delete", "create", *ATTEMPT]
    assert read_log(tpu) == ["create", *ATTEMPT, *ATTEMPT, *again * 5, "delete"]


@pytest.mark.parametrize("code", [2, 3, 4])
def test_up_ends_with_what_cannot_be_mended(tpu: Path, code: int) -> None:
    write_plan(tpu, f"exit {code}")
    done = run(tpu, "tpu_vm.sh", "up", *ARGUMENTS, **TPU)
    assert done.code == code
    assert read_log(tpu) == ["create", *ATTEMPT, "delete"]


@pytest.mark.parametrize("code", [1, 69, 137, 255])
def test_up_bounds_its_retries_while_the_slice_stands(tpu: Path, code: int) -> None:
    (tpu / "checkpoints").mkdir()
    save = "mkdir checkpoints/10; "
    write_plan(tpu, *[f"exit {code}"] * 2, f"{save}exit {code}", *[f"exit {code}"] * 9)
    done = run(tpu, "tpu_vm.sh", "up", *ARGUMENTS, RETRIES="2", **TPU)
    assert done.code == (69 if code in (1, 255) else code)
    attempt = [*ATTEMPT, "look"]
    # What looks like lost hosts may be the network here, and the slice be well.
    deleted = ["delete"] * (code == 137)
    assert read_log(tpu) == ["create", *attempt * 5, *deleted]


def test_up_waits_in_the_queue(tpu: Path) -> None:
    """Transient states are waited out; no slice is deleted for them."""
    states = "ACCEPTED/ WAITING_FOR_RESOURCES/ ACTIVE/CREATING ACTIVE/REPAIRING"
    (tpu / "states").write_text("".join(f"{state}\n" for state in states.split()))
    wait = """
    if [[ "$*" == *tpu-vm\\ list* && -s states ]]; then cut -d/ -f2 states | head -n 1
      sed -i 1d states; exit
    fi
    if [[ "$*" == *queued-resources\\ list* && -s states ]]; then
      cut -d/ -f1 states | head -n 1; exit
    fi
    if [[ "$*" == *list* ]]; then echo ACTIVE >queue; echo READY >node; fi
    """
    write_tool(tpu, "gcloud", wait + GCLOUD)
    write_plan(tpu, "exit 0")
    done = run(tpu, "tpu_vm.sh", "up", *ARGUMENTS, **TPU)
    assert done.code == 0, done
    assert read_log(tpu) == [*ATTEMPT, "delete"]


# While the file `outage` has lines, it fails to list, a line each time.
OUTAGE = """
if [[ "$*" == *\\ list* && -s outage ]]; then sed -i 1d outage; exit 1; fi
"""


def test_a_failure_of_gcloud_is_no_missing_slice(tpu: Path) -> None:
    write_tool(tpu, "gcloud", OUTAGE + GCLOUD)
    (tpu / "queue").write_text("ACTIVE\n")
    (tpu / "node").write_text("READY\n")
    (tpu / "outage").write_text("\n" * 7)
    done = run(tpu, "tpu_vm.sh", "create", **TPU)
    assert (done.code, read_log(tpu)) == (0, ATTEMPT[:3])
    assert done.errors.count("gcloud fails") == 7


def test_an_outage_of_gcloud_costs_no_retry(tpu: Path) -> None:
    write_tool(tpu, "gcloud", OUTAGE + GCLOUD)
    outage = "printf '\\n\\n\\n' >outage; exit 255"
    write_plan(tpu, outage, outage, "exit 0")
    done = run(tpu, "tpu_vm.sh", "up", *ARGUMENTS, RETRIES="0", **TPU)
    assert done.code == 0, done
    assert read_log(tpu) == ["create", *ATTEMPT * 3, "delete"]


def test_up_that_gives_up_leaves_the_slice(tpu: Path) -> None:
    write_plan(tpu, "exit 69")
    done = run(tpu, "tpu_vm.sh", "up", *ARGUMENTS, RETRIES="0", **TPU)
    assert done.code == 69
    assert read_log(tpu) == ["create", *ATTEMPT, "look"]
    assert "still there" in done.errors


def test_a_request_that_failed_is_taken_back(tpu: Path) -> None:
    (tpu / "queue").write_text("FAILED\n")
    done = run(tpu, "tpu_vm.sh", "create", **TPU)
    assert (done.code, read_log(tpu)) == (69, ["delete"])


def test_create_run_and_delete_alone(tpu: Path) -> None:
    write_plan(tpu, "exit 75")
    codes = [
        run(tpu, "tpu_vm.sh", *task, **TPU).code
        for task in (["create"], ["run", *ARGUMENTS], ["delete"])
    ]
    assert codes == [0, 75, 0]
    assert read_log(tpu) == ["create", *ATTEMPT[:3], "stop", "train", "delete"]


def test_a_signal_stops_the_hosts_and_leaves_the_slice(tpu: Path) -> None:
    wait = "rm -f stop; echo ready; until [[ -e stop ]]; do sleep 0.05; done; exit 75"
    write_plan(tpu, wait)
    process = start(tpu, "tpu_vm.sh", "up", *ARGUMENTS, **TPU)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    done = runs.wait(process, seconds=60)
    assert done.code == 75
    assert read_log(tpu) == ["create", *ATTEMPT, "stop"]
    assert "still there" in done.errors


def test_a_signal_ends_the_wait_in_the_queue(tpu: Path) -> None:
    """There is no host that one could stop, so the scripts themselves end."""
    unreachable = 'if [[ "$*" == *ssh* ]]; then exit 1; fi\n'
    write_tool(tpu, "gcloud", unreachable + GCLOUD)
    write_tool(tpu, "sleep", 'echo waiting; exec "$(command -p which sleep)" 600')
    (tpu / "queue").write_text("WAITING_FOR_RESOURCES\n")
    process = start(tpu, "tpu_vm.sh", "up", *ARGUMENTS, **TPU)
    assert process.stdout.readline() == "waiting\n"
    process.terminate()
    # Their end of the pipe is closed only when all of them have ended.
    assert runs.wait(process, seconds=60).code == 143
    assert read_log(tpu) == []


# Runs a command in each directory of `hosts`, as ssh does on all hosts.
HOSTS = """
if [[ $* != *\\ ssh\\ * ]]; then exit 99; fi
call=$*
command=${call##*--command=}
if [[ -e late && $command == *distributed* ]]; then
  echo "$command" >late; echo ready; exec sleep 60
fi
pids=()
for host in hosts/*; do
  (cd "$host" && exec bash -c "$command") & pids+=($!)
done
first=0
for pid in "${pids[@]}"; do
  wait "$pid"; code=$?; ((first)) || first=$code
done
exit "$first"
"""
# Training does what the host's `plan` says; the files of a host are its processes.
PYTHON = (
    "cd .. && touch started running; source ./plan; rm running; echo ended; exit 75"
)
PKILL = "[[ -e running ]] && touch stop"


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    write_tool(tmp_path, "gcloud", HOSTS)
    write_tool(tmp_path, "pkill", PKILL)
    directories = [tmp_path / "hosts" / name for name in "ab"]
    for host in directories:
        (host / "spanbert_jax" / ".venv").mkdir(parents=True)
        write_tool(host / "spanbert_jax" / ".venv", "python", PYTHON)
        (host / "plan").write_text("")
    return directories


def test_a_signal_waits_for_the_hosts_that_save(
    tmp_path: Path, hosts: list[Path]
) -> None:
    """One of them has nothing left that one could stop."""
    (hosts[1] / "plan").write_text(
        "echo ready; until [[ -e stop ]]; do sleep 0.05; done; sleep 1.5; touch saved"
    )
    process = start(tmp_path, "tpu_vm.sh", "run", *ARGUMENTS, **TPU)
    lines = {process.stdout.readline() for _ in hosts}
    assert lines == {"ready\n", "ended\n"}
    process.terminate()
    assert runs.wait(process, seconds=60).code == 75
    assert (hosts[1] / "saved").exists()


def test_nothing_starts_on_a_host_after_a_signal(
    tmp_path: Path, hosts: list[Path]
) -> None:
    """The signal overtakes the ssh that is to start the training."""
    late = tmp_path / "late"
    late.touch()
    (hosts[0] / "spanbert_jax" / "stopped").write_text("another\n")
    process = start(tmp_path, "tpu_vm.sh", "run", *ARGUMENTS, **TPU)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert runs.wait(process, seconds=60).code == 143
    command = late.read_text()
    for host in hosts:
        assert subprocess.run(["bash", "-c", command], cwd=host).returncode == 75
        assert not (host / "started").exists()
    # The next call trains there.
    late.unlink()
    assert run(tmp_path, "tpu_vm.sh", "run", *ARGUMENTS, **TPU).code == 75
    assert all((host / "started").exists() for host in hosts)


def test_the_installation_waits_for_the_process_that_runs(
    tmp_path: Path, hosts: list[Path]
) -> None:
    """One that an ssh left behind saves before its files go."""
    line = dry_run(tmp_path, "tpu_vm.sh", "create", *ARGUMENTS, **TPU)[2]
    (stop,) = [
        word.removeprefix("--command=")
        for word in shlex.split(line)
        if word.startswith("--command=")
    ]
    (hosts[0] / "plan").write_text(
        "echo ready; until [[ -e stop ]]; do sleep 0.05; done; sleep 1"
    )
    left = subprocess.Popen(
        ["flock", "lock", ".venv/bin/python"],
        cwd=hosts[0] / "spanbert_jax",
        stdout=subprocess.PIPE,
        text=True,
    )
    assert left.stdout.readline() == "ready\n"
    environment = make_environment(tmp_path, {})
    subprocess.run(["bash", "-c", stop], cwd=hosts[0], env=environment, check=True)
    assert not (hosts[0] / "running").exists()
    assert left.communicate(timeout=60) == ("ended\n", None)
    assert left.returncode == 75


# ---- GKE

needs_envsubst = pytest.mark.skipif(
    shutil.which("envsubst") is None, reason="no envsubst; install gettext"
)


@needs_envsubst
def test_the_manifest_of_a_slice(tmp_path: Path) -> None:
    quoted = "--config.data.corpus='a', \"b\" ${HOME} $NAME: #"
    more = {"SPOT": "1", "RETRIES": "7", "PAUSE": "9"}
    lines = dry_run(tmp_path, "gke.sh", *ARGUMENTS, quoted, **more, **GKE)
    assert lines[-1] == "# kubectl apply --filename=-"
    manifest = yaml.safe_load("\n".join(lines))
    assert manifest["kind"] == "JobSet"
    assert manifest["metadata"]["name"] == "bert"
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 20
    assert policy["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    (job,) = manifest["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    spec = job["template"]["spec"]
    # 32 chips, 4 a host.
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (8, 8, 0)
    assert spec["completionMode"] == "Indexed"
    rules = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in spec["podFailurePolicy"]["rules"]
    ]
    # 69 and death by signal match none: they fail the job, which starts all again.
    assert rules == [
        ("FailJob", [1, 2, 3, 4, 130]),
        ("Ignore", [75]),
        ("Ignore", None),
    ]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x8",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["image"] == "registry/image:1"
    assert container["command"][0] == "launch/restart.sh"
    assert container["args"] == ["--distributed", *ARGUMENTS, quoted]
    assert container["env"] == [
        {"name": "RETRIES", "value": "7"},
        {"name": "PAUSE", "value": "9"},
    ]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]
    claim = pod["volumes"][0]["persistentVolumeClaim"]
    assert claim == {"claimName": "claim"}


@needs_envsubst
def test_the_manifest_of_a_host(tmp_path: Path) -> None:
    more = {"TOPOLOGY": "2x2", "MOUNT": "/mnt", "SPOT": "0"}
    lines = dry_run(tmp_path, "gke.sh", *ARGUMENTS, **{**GKE, **more})
    (job,) = yaml.safe_load("\n".join(lines))["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 1
    pod = job["template"]["spec"]["template"]["spec"]
    assert "cloud.google.com/gke-spot" not in pod["nodeSelector"]
    assert pod["containers"][0]["args"] == ARGUMENTS
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/mnt"


@needs_envsubst
def test_the_manifest_is_applied(tmp_path: Path) -> None:
    printed = dry_run(tmp_path, "gke.sh", *ARGUMENTS, **GKE)
    write_tool(tmp_path, "kubectl", 'echo "kubectl $*"; cat')
    done = run(tmp_path, "gke.sh", *ARGUMENTS, **GKE)
    assert (done.code, done.errors) == (0, "")
    assert done.output.splitlines() == ["kubectl apply --filename=-", *printed[:-1]]
