"""Writes a run's model as a Hugging Face directory, for PyTorch's transformers.

python -m spanbert_jax.export --workdir=runs/mine --output=exports/mine
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from spanbert_jax import errors
from spanbert_jax.interop import verify
from spanbert_jax.interop.card import CARD, OPEN
from spanbert_jax.interop.huggingface import check_output, write_export
from spanbert_jax.training.saved import Saved, read_saved

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The run's directory; the run may be going on."
)
_OUTPUT = flags.DEFINE_string("output", None, "The directory to make.")
_STEP = flags.DEFINE_integer(
    "step", None, "Which checkpoint; the newest that can be read if unset."
)
_VERIFY = flags.DEFINE_boolean(
    "verify",
    False,
    "Compare what the model computes here and in transformers, which with torch must be"
    " installed; a difference of more than"
    f" {verify.TOLERANCE:g} ends with exit code 1.",
)
flags.mark_flags_as_required(["workdir", "output"])


def main(argv: Sequence[str]) -> int:
    """Writes the export that the flags describe, and verifies it if asked to."""
    del argv  # Empty: errors.run refuses what is not a flag.
    # A run that is going on holds the accelerator, of which there is no need.
    jax.config.update("jax_platforms", "cpu")
    output = Path(_OUTPUT.value)
    check_output(output)
    if _VERIFY.value:
        verify.check_libraries()
    saved = read_saved(Path(_WORKDIR.value), "--workdir", _STEP.value)
    for step, reason in saved.broken.items():
        print(f"step {step} cannot be read: {reason}")
    write_export(saved, output)
    print(f"{output}: step {saved.step:,} of {saved.workdir}", flush=True)
    print(f"to be filled in: where {output / CARD} says {OPEN!r}", flush=True)
    return _verify(saved, output) if _VERIFY.value else 0


def _verify(saved: Saved, output: Path) -> int:
    """Says how an export compares; returns the exit code."""
    texts, origin = verify.find_texts(saved)
    print(f"comparing with transformers on {origin}", flush=True)
    verdict = verify.compare(saved, output, texts)
    shown = ", ".join(f"{name} {x:.1e}" for name, x in verdict.differences.items())
    print(f"largest differences over {verdict.tokens:,} tokens: {shown}", flush=True)
    if verdict.is_good:
        return 0
    fault = f"differences of more than {verify.TOLERANCE:g}"
    if verdict.misread:
        fault = (
            f"other ids for {len(verdict.misread)} texts, first {verdict.misread[0]!r}"
        )
    print(f"error: {output} is not the model of the run: {fault}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    errors.run(main)
