"""The table of the benchmarks: what it says of results, and what it leaves alone."""

from typing import Any

import pytest

from benchmarks import sections


def ratio(median: float) -> dict[str, dict[str, float]]:
    one = {"median": median, "low": 0.9 * median, "high": 1.1 * median}
    return {"cpu": one, "wall": {name: 2 * x for name, x in one.items()}}


TRAINING = {
    "geometry": [4, 256, 4, 1024],
    "rows": 8,
    "length": 512,
    "dropout": 0.1,
    "cores": 2,
    "rounds": 7,
    "utilization": 0.571,
    "fill": {"packed": 0.999, "padded": 0.666},
    "places_per_second": {"packed": {"wall": 3000, "cpu": 1500}},
    "matmul_gflop_per_second": {"matmul": {"wall": 210.4, "cpu": 105.0}},
    "ratios": {
        "equal_padding": {"eager": ratio(1.7), "compiled": ratio(1.8)},
        "real_tokens": {"eager": ratio(2.55)},
        "run_together": {"full": ratio(1.6)},
    },
}
HOST = {
    "masking_tokens_per_second": 20_000_000,
    "pipeline_tokens_per_second": 9_000_000,
    "pipeline_tokens_per_cpu_second": 5_000_000,
    "pairs": {
        "masking_tokens_per_second": 10_000_000,
        "pipeline_tokens_per_second": 4_000_000,
    },
    "fill_packed": 0.998,
    "fill_padded": 0.941,
    "first_batch_seconds": {"0": 0.1, "100000": 0.12},
    "corpus": "corpus",
    "workers": 2,
}


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_table_has_as_many_cells_in_each_row() -> None:
    drawn = cells(sections.table(("a", "b"), [("1", "2"), ("3", "4")]))
    assert drawn == [["a", "b"], ["---", "---"], ["1", "2"], ["3", "4"]]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.7049, "1.70"), (0.273, "0.27"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    middle, _ = sections.times({"median": value, "low": 0.0, "high": 0.0}).split(" (")
    assert middle == shown


def test_ratios_of_the_step_stand_by_both_clocks() -> None:
    rows = cells(sections.training_section({"training": TRAINING}))
    shown = {(row[1], row[2]): row[3:] for row in rows if len(row) == 5}
    assert shown["PyTorch eager", "places:"] == [
        "1.70 (1.53 to 1.87)",
        "3.40 (3.06 to 3.74)",
    ]
    told = "tokens: rows 99.9% full against 66.6%"
    assert shown["PyTorch eager", told][0].startswith("2.55 ")


def test_packing_is_worth_what_the_other_corpus_leaves_of_it() -> None:
    text = sections.training_section({"training": TRAINING, "host": HOST})
    # 2.55 at a gain of 1.5; there, 0.998 / 0.941.
    assert f"{2.55 / 1.5 * 0.998 / 0.941:.2f} (" in text.splitlines()[-1]
    generated = {"training": TRAINING, "host": HOST | {"corpus": "generated"}}
    assert "packing is worth" not in sections.training_section(generated)


def test_what_was_not_measured_has_no_section() -> None:
    text = sections.render({"machine": "a machine", "host": HOST})
    assert text.startswith("Measured on a machine.")
    assert "tf.data" in text
    assert "PyTorch" not in text


def test_a_step_without_peers_has_its_rates_alone() -> None:
    without: dict[str, Any] = {k: v for k, v in TRAINING.items() if k != "ratios"}
    text = sections.training_section({"training": without, "host": HOST})
    assert "ours, packed" in text
    assert "by CPU time" not in text


PAGE = "before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n"


def test_the_text_around_the_table_stays() -> None:
    once = sections.replace_table(PAGE, "| new |")
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert sections.replace_table(once, "| new |") == once


def test_a_page_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        sections.replace_table("no markers", "| new |")
