"""Writes a run's model as a Hugging Face directory, for PyTorch's transformers.

python -m spanbert_jax.export --workdir=runs/mine --output=exports/mine
"""

from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from spanbert_jax import errors
from spanbert_jax.interop import verify
from spanbert_jax.interop.card import CARD, OPEN
from spanbert_jax.interop.huggingface import check_output, write_export
from spanbert_jax.training.saved import read_saved

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
    if _VERIFY.value and not verify.verify(saved, output):
        return 1
    return 0


if __name__ == "__main__":
    errors.run(main)
