"""Ablation: single sequences, span masking, SBO: the full recipe.

Reproduces: the row "single sequence, span masking, SBO" of the paper's Table 7 (formats
and auxiliary objectives), with the recipe and at the size of configs/base.py.
Expected: none was measured here; compare with single.py, which lacks SBO.
Cost: that of configs/base.py.
Command: python -m spanbert_jax.main --config=configs/ablations/single_sbo.py \
    --config.data.corpus=DIR --workdir=runs/single_sbo
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """The base recipe, unchanged."""
    return base.get_config()
