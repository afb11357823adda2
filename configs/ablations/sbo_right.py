"""Variant of SBO, of our own: predicts a span from its right boundary alone.

Reproduces: nothing; the paper has one form of SBO, that of single_sbo.py.
Expected: none was measured here; compare with single_sbo.py.
Cost: that of configs/base.py.
Command: python -m spanbert_jax.main --config=configs/ablations/sbo_right.py \
    --config.data.corpus=DIR --workdir=runs/sbo_right
"""

from ml_collections import ConfigDict

from configs.ablations import single_sbo


def get_config() -> ConfigDict:
    """The full recipe with x_{e+1} in SBO and without x_{s-1}."""
    config = single_sbo.get_config()
    config.sbo.boundaries = "right"
    return config
