"""A worker: updates of transformers' BertForMaskedLM, the same batch again and again.

Runs in the peers' interpreter. See rounds.py for how it is talked to, training.py for
what its cases are.
"""

import argparse
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import BertConfig, BertForMaskedLM

from rounds import Case, available_cores, peak_bytes, serve

_MATMUL_SIZE = 2048
_MATMULS = 4
# What transformers leaves out of the loss.
_IGNORED = -100

Tensors = dict[str, torch.Tensor]


def read_batch(path: Path) -> Tensors:
    """The padded batch of ours, as BertForMaskedLM takes it."""
    with np.load(path) as batch:
        token_ids, segments = batch["token_ids"], batch["segment_ids"]
        labels = np.full(token_ids.shape, _IGNORED, np.int64)
        row = np.nonzero(batch["target_weights"])[0]
        chosen = batch["target_weights"] > 0
        labels[row, batch["target_positions"][chosen]] = batch["target_ids"][chosen]
    return {
        "input_ids": torch.from_numpy(token_ids.astype(np.int64)),
        "attention_mask": torch.from_numpy((segments > 0).astype(np.int64)),
        "labels": torch.from_numpy(labels),
    }


def make_model(arguments: argparse.Namespace) -> BertForMaskedLM:
    """A model with random weights, in training."""
    layers, hidden, heads, intermediate = arguments.geometry
    config = BertConfig(
        vocab_size=arguments.vocab_size,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=arguments.length,
        hidden_dropout_prob=arguments.dropout,
        attention_probs_dropout_prob=arguments.dropout,
    )
    torch.manual_seed(0)
    return BertForMaskedLM(config).train()


def make_update(
    model: BertForMaskedLM,
    forward: Callable[..., Mapping[str, torch.Tensor]],
    batch: Tensors,
) -> Case:
    """An update; its amount is the places of the batch.

    Args:
        model: whose parameters it changes.
        forward: the model, or what was compiled of it.
        batch: of every update.
    """
    parameters = list(model.parameters())
    # Fused is the fastest of PyTorch's AdamWs on a CPU.
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
    amount = batch["input_ids"].numel()

    def work() -> dict[str, float]:
        loss = forward(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return {"amount": amount}

    return work


def matmul() -> Case:
    """Products of square float32 matrices; the amount is GFLOP."""
    square = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE)

    def work() -> dict[str, float]:
        for _ in range(_MATMULS):
            square @ square
        return {"amount": _MATMULS * 2 * _MATMUL_SIZE**3 / 1e9}

    return work


def make_cases(arguments: argparse.Namespace, batch: Tensors) -> dict[str, Case]:
    """The cases that are asked for, by name."""
    # Rows without padding: a mask of ones, which transformers then leaves out.
    full = batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}
    cases = {"matmul": matmul()}
    for case in arguments.cases:
        model = make_model(arguments)
        forward = torch.compile(model) if case == "compiled" else model
        cases[case] = make_update(model, forward, full if case == "full" else batch)
    return cases


def main() -> None:
    """Serves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument(
        "--cases", nargs="+", choices=("eager", "compiled", "full"), required=True
    )
    parser.add_argument("--geometry", nargs=4, type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--vocab_size", type=int, required=True)
    parser.add_argument("--dropout", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(len(available_cores()))
    imported = peak_bytes()
    cases = make_cases(arguments, read_batch(arguments.exchange / "batch.npz"))
    description = {
        "imported_bytes": imported,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "compiler": shutil.which("g++") or shutil.which("clang++"),
    }
    serve(description, cases)


if __name__ == "__main__":
    main()
