"""SpanBERT: the encoder with its heads."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from flax import linen as nn

from spanbert_jax.model.encoder import Encoder, Geometry
from spanbert_jax.model.heads import MlmHead, NspHead, Sbo, SboHead, gather


class Logits(NamedTuple):
    """What the heads say; None where the model lacks the head.

    P is the vocabulary with its padding; the padding has probability 0.

    Attributes:
        mlm: float32 [R, M, P], of each target slot from the token's own hidden state.
        sbo: float32 [R, M, P], of each target slot from the boundaries of its span.
        nsp: float32 [R, K, 2], of each block: its second segment follows, or does not.
    """

    mlm: jax.Array
    sbo: jax.Array | None
    nsp: jax.Array | None


class SpanBert(nn.Module):
    """The model that is pretrained.

    Attributes:
        geometry: the encoder's size.
        sbo: the form of the SBO head; None for a model without it.
        nsp: whether there is a next-sentence head.
    """

    geometry: Geometry
    sbo: Sbo | None
    nsp: bool

    def setup(self) -> None:
        """Declares the submodules."""
        g = self.geometry
        self.encoder = Encoder(g)
        self.mlm_head = MlmHead(g.vocab_size, g.dtype)
        if self.sbo:
            self.sbo_head = SboHead(g.vocab_size, self.sbo, g.dtype)
        if self.nsp:
            self.nsp_head = NspHead(g.dtype)

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
        table_PxD = self.encoder.token_table()
        mlm = self.mlm_head(gather(x_RxLxD, batch["target_positions"]), table_PxD)
        sbo = nsp = None
        if self.sbo:
            places = self.sbo.boundary_places(batch)
            boundaries = [gather(x_RxLxD, places_RxM) for places_RxM in places]
            sbo = self.sbo_head(boundaries, batch["span_offsets"], table_PxD)
        if self.nsp:
            nsp = self.nsp_head(gather(x_RxLxD, batch["nsp_positions"]))
        return Logits(mlm, sbo, nsp)
