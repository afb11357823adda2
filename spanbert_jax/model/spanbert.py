"""SpanBERT: the encoder with its two heads."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from flax import linen as nn

from spanbert_jax.model.encoder import Encoder, Geometry
from spanbert_jax.model.heads import MlmHead, SboHead, gather


class Logits(NamedTuple):
    """What the heads say of each target slot, float32 [R, M, P].

    P is the vocabulary with its padding; the padding has probability 0.

    Attributes:
        mlm: from the token's own hidden state.
        sbo: from the boundaries of its span; None without an SBO head.
    """

    mlm: jax.Array
    sbo: jax.Array | None


class SpanBert(nn.Module):
    """The model that is pretrained.

    Attributes:
        geometry: the encoder's size.
        sbo_positions: rows of the SBO position table; 0 for a model without SBO head.
        sbo_position_size: width of that table.
    """

    geometry: Geometry
    sbo_positions: int
    sbo_position_size: int

    def setup(self) -> None:
        """Declares the submodules."""
        g = self.geometry
        self.encoder = Encoder(g)
        self.mlm_head = MlmHead(g.vocab_size, g.dtype)
        if self.sbo_positions:
            self.sbo_head = SboHead(
                g.vocab_size, self.sbo_positions, self.sbo_position_size, g.dtype
            )

    def __call__(self, batch: Mapping[str, jax.Array], deterministic: bool) -> Logits:
        """Predicts the targets of a batch.

        Args:
            batch: as `spanbert_jax.data.batch` describes it.
            deterministic: whether dropout is off.

        Returns:
            The logits.
        """
        return self.predict(self.encode(batch, deterministic), batch)

    def encode(self, batch: Mapping[str, jax.Array], deterministic: bool) -> jax.Array:
        """The final encoder outputs x: [R, L, D]."""
        return self.encoder(
            batch["token_ids"],
            batch["segment_ids"],
            batch["position_ids"],
            batch["type_ids"],
            deterministic,
        )

    def predict(self, x_RxLxD: jax.Array, batch: Mapping[str, jax.Array]) -> Logits:
        """The heads' logits, given the final encoder outputs."""
        table_PxD = self.encoder.token_embedding.embedding
        mlm = self.mlm_head(gather(x_RxLxD, batch["target_positions"]), table_PxD)
        if not self.sbo_positions:
            return Logits(mlm, None)
        left_RxMxD = gather(x_RxLxD, batch["left_positions"])
        right_RxMxD = gather(x_RxLxD, batch["right_positions"])
        sbo = self.sbo_head(left_RxMxD, right_RxMxD, batch["span_offsets"], table_PxD)
        return Logits(mlm, sbo)
