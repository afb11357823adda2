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

MASKING = {
    "blocks": 276,
    "tokens": 130_362,
    "corpus": "corpus",
    "rounds": 15,
    "tokens_per_cpu_second": {"masking": 24e6, "batch": 10e6, "word_np": 1.04e6},
    "ratios": {
        "masking/word_np": {"median": 23.1, "low": 22.0, "high": 24.0},
        "batch/word_np": {"median": 9.61, "low": 9.0, "high": 10.0},
    },
}
TEXTS = [
    {
        "tokens": 1_000_000,
        "plan_seconds": 0.07,
        "plan_peak_bytes": 3 * 2**20,
        "first_batch_seconds": {"0": 0.11},
        "pipeline_tokens_per_cpu_second": 5_600_000,
        "peak_bytes": 1040 * 2**20,
    }
]
STEP = {
    "size": "small",
    "dropout": 0.1,
    "ms_per_step": 1342.6,
    "tokens_per_second": 3051,
    "model_gflop": 161.3,
    "matmul_gflop_per_second": 210.4,
    "matmul_fraction": 0.571,
}
WORK = {
    "length": {
        "128": {
            "rows": 32,
            "length": 128,
            "gflop": 1161.3,
            "places_per_second": {"wall": 3100, "cpu": 1550},
            "utilization": 0.55,
        }
    },
    "size": {},
}
MEMORY_ALONE = {
    "state_bytes": 2**27,
    "temporary_bytes": 2**30,
    "update": {"peak_bytes": 2**31},
}
MEMORY = {
    "size": "small",
    "rows": 8,
    "length": 512,
    "usual": MEMORY_ALONE,
    "large": MEMORY_ALONE
    | {
        "update": {"peak_bytes": 2.5 * 2**30},
        "training": {"peak_bytes": 2.75 * 2**30},
        "eager": {"peak_bytes": 3 * 2**30},
    },
    "kept": MEMORY_ALONE,
}
START = {kind: {"wall": 7.94, "cpu": 9.95} for kind in ("first", "cold", "warm")}


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
    assert shown["PyTorch eager", "places"] == [
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


def test_maskers_stand_with_our_rates_over_theirs() -> None:
    rows = cells(sections.masking_section({"masking": MASKING}))
    assert rows[2][1:] == ["24.0", "", ""]
    assert rows[4][1:] == ["1.0", "23.1 (22.0 to 24.0)", "9.61 (9.00 to 10.0)"]


def test_other_sections_show_what_was_measured() -> None:
    results = {"step": STEP, "step_plain": STEP | {"dropout": 0.0}}
    step = cells(sections.step_section(results))
    assert step[2] == ["small, dropout 0.1", "1,343", "3,051", "161", "210", "57.1%"]
    assert [row[0] for row in step[2:]] == [
        "small, dropout 0.1",
        "small, dropout 0.0",
    ]
    text = cells(sections.texts_section({"texts": TEXTS}))[2]
    assert text == ["1,000,000", "0.1 s", "3 MiB", "0.11 s", "5.6", "1,040 MiB"]
    work = cells(sections.work_section({"work": WORK}))[2:]
    assert work == [["length 128", "32 x 128", "1,161.3", "3,100", "55%"]]
    start = cells(sections.start_section({"start": START}))
    assert [row[1:] for row in start[2:]] == [["7.9 s", "9.9 s"]] * 3


def test_memory_without_a_peer_leaves_its_cell_empty() -> None:
    usual, large, kept = cells(sections.memory_section({"memory": MEMORY}))[2:]
    assert large[1:] == ["large", "0.12", "1.00", "2.50", "2.75", "3.00"]
    assert usual[1:] == ["usual", "0.12", "1.00", "2.00", "", ""]
    assert kept[1:] == ["kept", *usual[2:]]


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
