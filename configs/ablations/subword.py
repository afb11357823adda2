"""Ablation of masking: BERT's single tokens, on pairs with NSP.

Reproduces: the row "subword tokens" of the paper's Table 6, masking schemes: as far as
the table shows, all of them on pairs with NSP and without SBO.
Expected: none was measured here; compare with the other schemes, span.py among them.
Cost: that of configs/base.py less the SBO head.
Command: python -m spanbert_jax.main --config=configs/ablations/subword.py \
    --config.data.corpus=DIR --workdir=runs/subword
"""

from ml_collections import ConfigDict

from configs.ablations import pairs_nsp


def get_config() -> ConfigDict:
    """Pairs, with single tokens masked."""
    config = pairs_nsp.get_config()
    config.data.masking = "subword"
    return config
