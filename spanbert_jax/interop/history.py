"""The history: what a run recorded of itself up to a step."""

import json
from pathlib import Path
from typing import Any

from spanbert_jax.errors import InputError
from spanbert_jax.training.sinks import FILE

History = list[dict[str, Any]]


def read_history(workdir: Path, step: int) -> History:
    """The records of metrics.jsonl, in the order of their steps.

    Args:
        workdir: of a run, which may be going on.
        step: the last one to read.

    Returns:
        The records; none if there is no such file.

    Raises:
        InputError: the file cannot be read.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    try:
        text = path.read_text()
        # What follows the last line end is still being written, or was torn by a kill.
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [record for record in map(json.loads, whole) if record["step"] <= step]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def last_evaluation(history: History) -> dict[str, Any] | None:
    """The newest record of the held-out text; None if there is none."""
    return next((r for r in reversed(history) if r["split"] == "valid"), None)
