"""The boundary head in PyTorch: the text of a module, for the card of an export."""

from spanbert_jax.model.encoder import LAYER_NORM_EPSILON
from spanbert_jax.model.heads import Sbo

CLASS = "SpanBoundaryHead"

_MODULE = '''\
import torch
from torch import nn


class {name}(nn.Module):
    """Predicts the tokens of a span from the hidden states at its boundaries."""

    def __init__(self):
        super().__init__()
        self.position_embedding = nn.Embedding({positions}, {position_size})
{layers}
        self.bias = nn.Parameter(torch.zeros({vocab_size}))

    def forward(self, {sides}, place, table):
        """Returns logits, [n, {vocab_size}].

        {sides}: hidden states, [n, {hidden_size}]{each}.
        place: the tokens' numbers within their spans, from 0, [n].
        table: the model's token embedding, [{vocab_size}, {hidden_size}].
        """
        y = torch.cat([{sides}, self.position_embedding(place)], dim=-1)
{steps}
        return y @ table.T + self.bias
'''

_USAGE = """\
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForMaskedLM.from_pretrained(".").eval()
head = {name}()
head.load_state_dict(load_file("{weights}"))

masks = " ".join([tokenizer.mask_token] * {count})
inputs = tokenizer(f"The {{masks}} won the game.", return_tensors="pt")
span = (inputs.input_ids[0] == tokenizer.mask_token_id).nonzero()[:, 0]
place, table = torch.arange(len(span)), model.get_input_embeddings().weight
with torch.no_grad():
    states = model.base_model(**inputs).last_hidden_state[0]
{boundaries}
    logits = head({sides}, place, table)
print(tokenizer.convert_ids_to_tokens(logits.argmax(-1).tolist()))
"""

# Most tokens of the span in the example.
_EXAMPLE = 3


def module_text(form: Sbo, hidden_size: int, vocab_size: int) -> str:
    """A PyTorch module that computes what `SboHead` does.

    Its parameters have the names and shapes of `names.to_tensors`, without "sbo.".

    Args:
        form: of the head.
        hidden_size: D.
        vocab_size: V.

    Returns:
        Python source that defines the class `CLASS`.
    """
    width = len(form.sides) * hidden_size + form.position_size
    layers, steps = [], []
    for number in range(1, form.depth + 1):
        dense = f"self.dense_{number}"
        norm = f"self.norm_{number}"
        layers += [
            f"{dense} = nn.Linear({width}, {hidden_size})",
            f"{norm} = nn.LayerNorm({hidden_size}, eps={LAYER_NORM_EPSILON})",
        ]
        steps.append(f"y = {norm}(nn.functional.gelu({dense}(y)))")
        width = hidden_size
    return _MODULE.format(
        name=CLASS,
        positions=form.positions,
        position_size=form.position_size,
        layers=_indented(layers, 8),
        steps=_indented(steps, 8),
        sides=", ".join(form.sides),
        each=" each" if len(form.sides) > 1 else "",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )


def usage_text(form: Sbo, weights: str) -> str:
    """Python source that fills a span by the module, in the export's directory.

    Args:
        form: of the head.
        weights: name of the file with the head's parameters.

    Returns:
        The source; to be run after that of `module_text`.
    """
    places = {"left": "span[0] - 1", "right": "span[-1] + 1"}
    if form.internal:
        places = {"left": "span[0]", "right": "span[-1]"}
    boundaries = [
        f"{side} = states[{places[side]}].expand(len(span), -1)" for side in form.sides
    ]
    return _USAGE.format(
        name=CLASS,
        weights=weights,
        count=min(form.positions, _EXAMPLE),
        boundaries=_indented(boundaries, 4),
        sides=", ".join(form.sides),
    )


def _indented(lines: list[str], spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in lines)
