"""Weights and tokenizers to and from other codebases."""
