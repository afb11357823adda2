"""Ablation: single sequences and span masking, without SBO.

Reproduces: the row "single sequence, span masking" of the paper's Table 7.
Expected: none was measured here; compare with single_sbo.py and pairs_nsp.py.
Cost: that of configs/base.py less the SBO head.
Command: python -m spanbert_jax.main --config=configs/ablations/single.py \
    --config.data.corpus=DIR --workdir=runs/single
"""

from ml_collections import ConfigDict

from configs.ablations import single_sbo


def get_config() -> ConfigDict:
    """The full recipe without the SBO head."""
    config = single_sbo.get_config()
    config.sbo.weight = 0.0
    return config
