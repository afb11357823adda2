"""Ablation of masking: named entities, half of the time, on pairs with NSP.

Reproduces: the row "named entities" of the paper's Table 6, masking schemes: as far as
the table shows, all of them on pairs with NSP and without SBO.
Expected: none was measured here; compare with the other schemes, span.py among them.
Cost: that of configs/base.py less the SBO head.
Corpus: prepared with --tags=entities, which finds them.
Command: python -m spanbert_jax.main --config=configs/ablations/entity.py \
    --config.data.corpus=DIR --workdir=runs/entity
"""

from ml_collections import ConfigDict

from configs.ablations import pairs_nsp


def get_config() -> ConfigDict:
    """Pairs, with named entities masked."""
    config = pairs_nsp.get_config()
    config.data.masking = "entity"
    return config
