"""The curves: a run's losses by step, as a PNG."""

import io

import matplotlib
from matplotlib.figure import Figure

from spanbert_jax.interop.history import History

_INCHES = (8, 4.5)
_DOTS_PER_INCH = 120
# By the name of a loss: what it is called, and its colour.
_HEADS = {
    "mlm_loss": ("MLM", "tab:blue"),
    "sbo_loss": ("SBO", "tab:orange"),
    "nsp_loss": ("next sentence", "tab:green"),
}
# By split: what it is called, and how its lines look.
_SPLITS = {
    "train": ("training", {"linewidth": 0.8, "alpha": 0.5}),
    "valid": ("held out", {"linewidth": 1.5, "marker": "o", "markersize": 3}),
}
_UNIGRAM = "unigram_loss"


def draw_curves(history: History) -> bytes:
    """Draws each head's loss, in training and on held-out text.

    Args:
        history: at least one record.

    Returns:
        A PNG; the same bytes for the same history and version of matplotlib.
    """
    # Whatever the user has set up for figures of their own, and no state of pyplot.
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot()
        for name, (head, colour) in _HEADS.items():
            for split, (kind, style) in _SPLITS.items():
                if points := _points(history, split, name):
                    line = {"color": colour, "label": f"{head}, {kind}", **style}
                    axes.plot(*zip(*points, strict=True), **line)
        if points := _points(history, "valid", _UNIGRAM):
            axes.axhline(points[-1][1], color="grey", linestyle="--", label="unigram")
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("loss, nats")
        axes.grid(alpha=0.3)
        axes.legend()
        file = io.BytesIO()
        # By default it names the program and its version.
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _points(history: History, split: str, name: str) -> list[tuple[int, float]]:
    return [
        (record["step"], record[name])
        for record in history
        if record["split"] == split and name in record
    ]
