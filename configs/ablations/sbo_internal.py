"""Variant of SBO, of our own: predicts a span from its own first and last token.

Reproduces: nothing; the paper has one form of SBO, that of single_sbo.py.
Expected: none was measured here; compare with single_sbo.py.
Cost: that of configs/base.py.
Command: python -m spanbert_jax.main --config=configs/ablations/sbo_internal.py \
    --config.data.corpus=DIR --workdir=runs/sbo_internal
"""

from ml_collections import ConfigDict

from configs.ablations import single_sbo


def get_config() -> ConfigDict:
    """The full recipe with x_s and x_e in SBO for x_{s-1} and x_{e+1}."""
    config = single_sbo.get_config()
    config.sbo.internal = True
    return config
