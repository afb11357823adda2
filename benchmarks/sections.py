"""Sections: the parts of the benchmarks' table, each of what one script measured."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from allocator import ALLOCATORS

Results = dict[str, Any]
Row = Sequence[str]

_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(ratio: Mapping[str, float], worth: float = 1.0) -> str:
    """A ratio with its range over the rounds: "1.71 (1.68 to 1.74)"."""
    middle, low, high = (
        _number(worth * ratio[key]) for key in ("median", "low", "high")
    )
    return f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    """Three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def millions(value: float) -> str:
    """Of tokens, in millions."""
    return f"{value / 1e6:.1f}"


def gigabytes(value: float) -> str:
    """Of bytes, in GiB."""
    return f"{value / 2**30:.2f}"


def training_section(results: Results) -> str:
    """The step against PyTorch's."""
    figures = results["training"]
    layers, hidden, heads, intermediate = figures["geometry"]
    intro = (
        f"Training step, L={layers} H={hidden} A={heads} FF={intermediate},"
        f" {figures['rows']} rows of {figures['length']}, float32, dropout"
        f" {figures['dropout']}, {figures['cores']} cores; medians of"
        f" {figures['rounds']} rounds (lowest to highest). A product of float32"
        f" matrices runs at"
        f" {figures['matmul_gflop_per_second']['matmul']['wall']:.0f} GFLOP/s there"
        f", a packed step at {figures['utilization']:.0%} of that rate."
    )
    rows = []
    fill = figures["fill"]
    for name, others in figures.get("ratios", {}).items():
        for other, ratio in others.items():
            ours, what = _STEPS[name]
            if name == "real_tokens":
                what += f": rows {fill['packed']:.1%} full against {fill['padded']:.1%}"
            rows.append(
                (ours, _PEERS[other], what, times(ratio["cpu"]), times(ratio["wall"]))
            )
    head = ("ours", "theirs", "counted", "by CPU time", "by wall time")
    rates = table(
        ("", "places/s", "places per CPU second"),
        [
            (_CASES[name], f"{rate['wall']:,}", f"{rate['cpu']:,}")
            for name, rate in figures["places_per_second"].items()
        ],
    )
    parts = [intro, table(head, rows), rates] if rows else [intro, rates]
    return "\n\n".join([*parts, *_real_tokens(results)])


def _real_tokens(results: Results) -> list[str]:
    """The same ratio at the fill of the corpus that the host was measured on."""
    figures, host = results["training"], results.get("host")
    if host is None or host["corpus"] == "generated" or "ratios" not in figures:
        return []
    fill = figures["fill"]
    gain = host["fill_packed"] / host["fill_padded"]
    worth = gain / (fill["packed"] / fill["padded"])
    found = figures["ratios"]["real_tokens"]
    shown = ", ".join(
        f"{times(ratio['cpu'], worth)} against {_PEERS[other]}"
        for other, ratio in found.items()
    )
    return [
        f"On the corpus of the host's table, whose padded rows are"
        f" {host['fill_padded']:.1%} full, packing is worth {gain:.2f}: in tokens"
        f" {shown}."
    ]


_STEPS = {
    "equal_padding": ("MLM and SBO, padded", "places"),
    "real_tokens": ("MLM and SBO, packed", "tokens"),
    "equal_work": ("MLM alone, all places, padded", "places"),
    "run_together": ("MLM and SBO, packed", "tokens: theirs run over documents' ends"),
}
_PEERS = {
    "eager": "PyTorch eager",
    "compiled": "torch.compile",
    "full": "PyTorch eager, no padding, no mask",
}
_CASES = {
    "padded": "ours, padded",
    "packed": "ours, packed",
    "everywhere": "ours, MLM alone, all places",
    **_PEERS,
}


def masking_section(results: Results) -> str:
    """Masking against collators and loops."""
    figures = results["masking"]
    intro = (
        f"Masking, {figures['tokens']:,} tokens in {figures['blocks']:,} blocks of"
        f" {_corpus(figures)}, one core, million tokens per CPU second; medians of"
        f" {figures['rounds']} rounds (lowest to highest)."
    )
    ratios, rates = figures["ratios"], figures["tokens_per_cpu_second"]
    rows = []
    for name, rate in rates.items():
        is_ours = name in ("masking", "batch", "pipeline")
        against = [
            "" if is_ours else times(ratios[f"{ours}/{name}"])
            for ours in ("masking", "batch")
        ]
        rows.append((_MASKERS[name], millions(rate), *against))
    head = ("", "rate", "our masking over it", "our batches over it")
    return f"{intro}\n\n{table(head, rows)}"


_MASKERS = {
    "masking": "ours: masking alone",
    "batch": "ours: from the store to all arrays of a batch",
    "pipeline": "ours: that through tf.data, one worker",
    "plain": "span masker, a loop over blocks, first version",
    "tight": "the same, as tight as Python gets",
    "subword_np": "transformers' collator, single tokens, NumPy",
    "subword_pt": "the same, PyTorch",
    "word_np": "transformers' collator, whole words, NumPy",
    "word_pt": "the same, PyTorch",
    "tokenizers": "`tokenizers` on the same text",
}


def _corpus(figures: Mapping[str, Any]) -> str:
    generated = figures["corpus"] == "generated"
    return "a generated text" if generated else "real text"


def host_section(results: Results) -> str:
    """The host's figures."""
    figures = results["host"]
    pairs, first = figures["pairs"], figures["first_batch_seconds"]
    rows = [
        (
            "masking, one core, tokens per CPU second",
            f"{millions(figures['masking_tokens_per_second'])} M",
        ),
        (
            "store to NumPy batch through tf.data, tokens/s on"
            f" {figures['workers']} cores",
            f"{millions(figures['pipeline_tokens_per_second'])} M",
        ),
        (
            "the same per CPU second, one worker",
            f"{millions(figures['pipeline_tokens_per_cpu_second'])} M",
        ),
        (
            "masking and store to batch, pairs of segments",
            f"{millions(pairs['masking_tokens_per_second'])} M,"
            f" {millions(pairs['pipeline_tokens_per_second'])} M",
        ),
        (
            "rows filled, packed and padded",
            f"{figures['fill_packed']:.1%}, {figures['fill_padded']:.1%}",
        ),
        (
            "first batch at " + " and ".join(f"step {int(s):,}" for s in first),
            ", ".join(f"{seconds:.2f} s" for seconds in first.values()),
        ),
    ]
    return f"Host, on {_corpus(figures)}.\n\n{table(('', ''), rows)}"


def texts_section(results: Results) -> str:
    """The host over sizes of text."""
    head = (
        "tokens",
        "planning, once",
        "its memory",
        "first batch",
        "M tokens per CPU second",
        "memory",
    )
    rows = [
        (
            f"{one['tokens']:,}",
            f"{one['plan_seconds']:.1f} s",
            f"{one['plan_peak_bytes'] / 2**20:,.0f} MiB",
            f"{one['first_batch_seconds']['0']:.2f} s",
            millions(one["pipeline_tokens_per_cpu_second"]),
            f"{one['peak_bytes'] / 2**20:,.0f} MiB",
        )
        for one in results["texts"]
    ]
    return (
        "Host over the size of the text (generated), beyond what the libraries take."
        f"\n\n{table(head, rows)}"
    )


def work_section(results: Results) -> str:
    """The step over lengths and sizes."""
    rows = []
    for kind, figures in results["work"].items():
        for name, one in figures.items():
            rows.append(
                (
                    f"{kind} {name}",
                    f"{one['rows']} x {one['length']}",
                    f"{one['gflop']:,}",
                    f"{one['places_per_second']['wall']:,}",
                    f"{one['utilization']:.0%}",
                )
            )
    head = ("step", "rows", "GFLOP", "places/s", "of the rate of a product")
    return f"Packed step over block lengths and model sizes.\n\n{table(head, rows)}"


def memory_section(results: Results) -> str:
    """Peak memory."""
    rows = []
    for name in ("memory", "memory_base"):
        if name not in results:
            continue
        figures = results[name]
        for allocator in ALLOCATORS:
            one = figures[allocator]
            rows.append(
                (
                    f"{figures['size']}, {figures['rows']} x {figures['length']}",
                    allocator,
                    gigabytes(one["state_bytes"]),
                    gigabytes(one["temporary_bytes"]),
                    *(
                        gigabytes(one[case]["peak_bytes"]) if case in one else ""
                        for case in ("update", "training", "eager")
                    ),
                )
            )
    head = (
        *("GiB", "allocator", "parameters and optimiser", "activations and the rest"),
        *("our step", "with tf.data", "PyTorch eager"),
    )
    return f"Memory, most that was resident.\n\n{table(head, rows)}"


def start_section(results: Results) -> str:
    """Starts."""
    starts = results["start"]
    rows = [
        (what, *(f"{starts[kind][clock]:.1f} s" for clock in ("wall", "cpu")))
        for kind, what in _STARTS.items()
    ]
    head = ("", "command to step 1", "CPU time of the process")
    return f"Start of the tiny config.\n\n{table(head, rows)}"


_STARTS = {
    "first": "nothing there: builds the embedded corpus, too",
    "cold": "corpus there, nothing compiled",
    "warm": "compiled programs kept",
}


# Results of step.py.
_SIZES = ("step", "step_plain", "step_base")


def step_section(results: Results) -> str:
    """The step against the machine."""
    rows = [
        (
            f"{one['size']}, dropout {one['dropout']}",
            f"{one['ms_per_step']:,.0f}",
            f"{one['tokens_per_second']:,}",
            f"{one['model_gflop']:,.0f}",
            f"{one['matmul_gflop_per_second']:.0f}",
            f"{one['matmul_fraction']:.1%}",
        )
        for one in (results[name] for name in _SIZES if name in results)
    ]
    head = ("", "ms", "tokens/s", "GFLOP", "product, GFLOP/s", "of its rate")
    return f"Packed step against a product of float32 matrices.\n\n{table(head, rows)}"


# By the result that each needs.
_SECTIONS = {
    "training": training_section,
    "step": step_section,
    "masking": masking_section,
    "host": host_section,
    "texts": texts_section,
    "work": work_section,
    "memory": memory_section,
    "start": start_section,
}


def render(results: Results) -> str:
    """All sections of which there are results."""
    sections = [
        section(results) for name, section in _SECTIONS.items() if name in results
    ]
    return "\n\n".join([f"Measured on {results['machine']}.", *sections])


def replace_table(page: str, content: str) -> str:
    """A page with its table replaced.

    Raises:
        ValueError: it lacks the markers.
    """
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n\n{content}\n\n{_END}{after}"
