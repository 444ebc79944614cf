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


def figures_table(name: str) -> list[dict[str, str]]:
    with open(ROOT / "figures" / f"{name}.csv") as handle:
        return list(csv.DictReader(handle))


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def assert_shown(cell: str, exact: dict[str, str], column: str) -> None:
    """The README shows three decimals, the table four digits."""
    assert number(cell) == pytest.approx(float(exact[column]), abs=6e-4), column


def assert_interval(cell: str, exact: dict[str, str]) -> None:
    for part, column in zip(cell.split("[")[1].split(","), ("low", "high"), strict=True):
        assert_shown(part, exact, column)


def test_the_adapters_shown_hold_the_measured_numbers() -> None:
    measured = {entry["adapter"]: entry for entry in figures_table("phase2_screen")}
    rows = [cells(line) for line in README.splitlines() if line.startswith("| `") and "**" in line]
    assert len(rows) >= 8
    columns = ("alpha_base", "alpha_adapted", "delta_alpha")
    columns += ("delta_alpha_greedy", "delta_alpha_general", "delta_overlap")
    for name, _, *shown in rows:
        entry = measured[name.strip("`")]
        for cell, column in zip(shown, columns, strict=True):
            assert_shown(cell, entry, column)
        assert_interval(shown[2], entry)


def test_the_families_shown_hold_the_measured_numbers() -> None:
    for entry in figures_table("phase2_families"):
        (row,) = [cells(line) for line in README.splitlines() if line.startswith(f"| {entry['family']} |")]
        _, adapters, mean, lowest, highest, greedy, general, counts = row
        assert [int(n) for n in re.findall(r"\d+", adapters)] == [
            int(entry["adapters"]),
            int(entry["domains"]),
        ]
        assert_interval(mean, entry)
        shown = {"mean": mean, "lowest": lowest, "highest": highest, "mean_greedy": greedy}
        for column, cell in (shown | {"mean_general": general}).items():
            assert_shown(cell, entry, column)
        assert [int(n) for n in counts.split("/")] == [int(entry[c]) for c in ("down", "none", "up")]


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
