"""Use of a trained model: states of tokens, embeddings of spans, words for masks."""
