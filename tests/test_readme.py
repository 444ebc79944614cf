"""What the README says is what the evidence, the Makefile and the command line say."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import typer

from lora_spec.cli import build_app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = {name: (ROOT / name).read_text() for name in ("README.md", "artifact_appendix.md")}


def number(cell: str) -> float:
    """First number of a table cell, whose minus signs and stars are typographic."""
    return float(re.search(r"[+-]?[\d.]+", cell.replace("−", "-"))[0])


def test_the_table_holds_the_measured_numbers() -> None:
    with open(ROOT / "figures" / "phase2_screen.csv") as handle:
        measured = list(csv.DictReader(handle))
    rows = [line for line in README.splitlines() if line.startswith("| `") and "**" in line]
    assert len(rows) == len(measured) == 12
    columns = ("alpha_base", "alpha_adapted", "delta_alpha")
    columns += ("delta_alpha_greedy", "delta_alpha_general", "delta_overlap")
    for entry in measured:
        (row,) = [line for line in rows if f"`{entry['adapter']}`" in line]
        cells = row.strip("|").split("|")[2:]  # after the name and the norm
        for cell, column in zip(cells, columns, strict=True):
            # the README shows three decimals, the table four digits
            assert number(cell) == pytest.approx(float(entry[column]), abs=6e-4), column
        low, high = (number(part) for part in cells[2].split("[")[1].split(","))
        assert low == pytest.approx(float(entry["low"]), abs=6e-4)
        assert high == pytest.approx(float(entry["high"]), abs=6e-4)


@pytest.mark.parametrize("name", TEXTS)
def test_named_targets_and_commands_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", TEXTS[name]))
    assert named and named <= targets
    commands = set(typer.main.get_command(build_app()).commands)
    used = set(re.findall(r"(?:`|bin/)lora-spec ([a-z]+)", TEXTS[name]))
    assert used and used <= commands


@pytest.mark.parametrize("name", TEXTS)
def test_named_files_exist(name: str) -> None:
    pattern = r"`((?:notebooks|lib|params|results|figures|examples|docs|requirements)/[\w./-]*)`"
    missing = [path for path in re.findall(pattern, TEXTS[name]) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_left_to_fill_in(name: str) -> None:
    assert "{{" not in TEXTS[name]
