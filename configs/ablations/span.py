"""Ablation of masking: spans of geometric length, on pairs with NSP.

Reproduces: the row "geometric spans" of the paper's Table 6, masking schemes: as far as
the table shows, all of them on pairs with NSP and without SBO.
Expected: none was measured here; compare with the other schemes.
Cost: that of configs/base.py less the SBO head.
Command: python -m spanbert_jax.main --config=configs/ablations/span.py \
    --config.data.corpus=DIR --workdir=runs/span
"""

from ml_collections import ConfigDict

from configs.ablations import pairs_nsp


def get_config() -> ConfigDict:
    """The row of pairs_nsp: its masking is that of spans."""
    return pairs_nsp.get_config()
