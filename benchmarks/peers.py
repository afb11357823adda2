"""Peers: the interpreter that they are installed in, beside this project's own."""

import argparse
import sys
from pathlib import Path

_DIRECTORY = Path(__file__).resolve().parent
_DEFAULT = _DIRECTORY.parent / ".venv-bench" / "bin" / "python"
_REQUIREMENTS = _DIRECTORY / "requirements.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --peer_python and --nopeers."""
    parser.add_argument(
        "--peer_python",
        type=Path,
        default=_DEFAULT,
        help="the peers' interpreter; default: .venv-bench/bin/python",
    )
    parser.add_argument(
        "--nopeers", dest="peers", action="store_false", help="ours alone"
    )


def check(arguments: argparse.Namespace) -> None:
    """Ends the process, with how to make it, if the peers' interpreter is not there."""
    if not arguments.peers or arguments.peer_python.exists():
        return
    environment = arguments.peer_python.parent.parent
    print(
        f"error: there is no {arguments.peer_python}; make it with: python3 -m venv"
        f" {environment} && {environment}/bin/pip install -r {_REQUIREMENTS}",
        file=sys.stderr,
    )
    sys.exit(2)
