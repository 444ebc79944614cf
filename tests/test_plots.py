"""Figures and tables: what they carry, and that their bytes depend on the data alone."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from lora_spec import plots, tables
from lora_spec.errors import EvidenceError
from lora_spec.outputs import Stamp
from lora_spec.plots import style

MEASURED = Stamp("pocket", "measured")
SMOKE = Stamp("smoke", "smoke")
FAMILIES = ["language", "code", "structured", "register", "controlled"]


@pytest.fixture(autouse=True)
def figures(monkeypatch, tmp_path):
    monkeypatch.setenv("LORA_SPEC_FIGURES", str(tmp_path))
    return tmp_path


def label_frame(n: int = 12, name: str = "adapter") -> pd.DataFrame:
    delta = np.linspace(-0.2, 0.05, n)
    frame = pd.DataFrame(
        {
            "adapter": [f"{name}-{i}" for i in range(n)],
            "family": [FAMILIES[i % 5] for i in range(n)],
            "delta_alpha": delta,
            "moved": np.where(np.arange(n) % 2, "none", "down"),
            "frobenius": np.geomspace(0.5, 40, n),
            "kl": np.geomspace(0.001, 2, n),
            "delta_overlap": delta + 0.01,
            "delta_alpha_greedy": delta * 0.8,
            "delta_alpha_general": delta * 0.3,
        }
    )
    for column in [c for c in frame if c.startswith("delta_")]:
        frame[f"{column}_se"] = 0.02
    return frame


def effect_frame() -> pd.DataFrame:
    rows = [
        {
            "adapter": a,
            "traffic": t,
            "decoding": d,
            "k": k,
            "delta": -0.1,
            "low": -0.13,
            "high": -0.08,
            "verdict": "GO" if (t, d, k) == ("own", "t08", 4) else "",
        }
        for a in ("german-r16-all-s40", "shakespeare-r32-all-s40")
        for t in ("own", "general")
        for d in ("t08", "greedy")
        for k in (2, 4, 6)
    ]
    return pd.DataFrame(rows)


def position_frame(
    depths=(2, 4, 6), adapters=("german-r16-all-s40", "shakespeare-r32-all-s40")
) -> pd.DataFrame:
    around = {"rate": 0.5, "low": 0.4, "high": 0.6}
    return pd.DataFrame(
        [
            {"adapter": name, "decoding": "t08", "k": k, "arm": arm, "position": i} | around
            for name in adapters
            for k in depths
            for arm in ("base", "adapted")
            for i in range(1, k + 1)
        ]
    )


def depth_frame(depths=(2, 4, 6)) -> pd.DataFrame:
    around = {"alpha": 0.5, "alpha_low": 0.4, "alpha_high": 0.6, "al": 2.0, "al_low": 1.9, "al_high": 2.1}
    return pd.DataFrame(
        [
            {"adapter": name, "arm": arm, "k": k} | around
            for name in ("german-r16-all-s40", "shakespeare-r32-all-s40")
            for arm in ("base", "adapted", "adapted − base")
            for k in depths
        ]
    )


def looping_frame() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"decoding": d, "looping": third, "arm": arm, "alpha": 0.5, "low": 0.4, "high": 0.6}
            for d in ("t08", "greedy")
            for third in ("most", "middle", "least")
            for arm in ("base", "adapted")
        ]
    )


def relation_frame() -> pd.DataFrame:
    return pd.DataFrame({"column": ["frobenius", "kl"], "spearman": -0.5, "low": -0.7, "high": -0.2})


def all_figures(stamp: Stamp):
    labels = label_frame()
    errors = pd.DataFrame({"model": ["weights", "constant"], "mae": [0.03, 0.05], "low": 0.01, "high": 0.07})
    predictions = labels.assign(predicted=labels["delta_alpha"] * 0.5)
    return {
        "effect": plots.effect_figure(effect_frame(), 0.05, 0.95, stamp),
        "positions": plots.position_figure(position_frame(), 0.95, stamp),
        "depths": plots.depth_figure(depth_frame(), 0.95, stamp),
        "screen": plots.screen_figure(labels, 1.96, 0.05, stamp),
        "relations": plots.relation_figure(labels, relation_frame(), 1.96, stamp),
        "looping": plots.looping_figure(looping_frame(), {"t08": "T = 0.8"}, 0.95, stamp),
        "agreement": plots.agreement_figure(labels, 1.96, stamp),
        "predictor": plots.predictor_figure(predictions, errors, (0.08, 0.8), 0.95, stamp),
    }


def texts(figure) -> dict[str, str]:
    return {text.get_gid(): text.get_text() for text in figure.texts if text.get_gid()}


def test_every_figure_prints_its_evidence_and_only_smoke_has_a_watermark():
    for figure in all_figures(MEASURED).values():
        assert texts(figure) == {"stamp": "evidence: measured · tier: pocket"}
    for figure in all_figures(SMOKE).values():
        assert texts(figure)["watermark"] == "SMOKE"
        assert "smoke" in texts(figure)["stamp"]


def test_what_rests_on_two_classes_names_both():
    assert MEASURED.joined("modelled").text == "evidence: measured+modelled · tier: pocket"
    assert MEASURED.joined("measured") == MEASURED
    assert MEASURED.joined("smoke").is_smoke


def test_nothing_is_clipped_and_axes_are_labelled():
    of_other_shapes = {
        "positions at one depth": plots.position_figure(position_frame(depths=(4,)), 0.95, MEASURED),
        "positions of one adapter": plots.position_figure(position_frame(adapters=("a",)), 0.95, MEASURED),
        "one depth": plots.depth_figure(depth_frame(depths=(4,)), 0.95, MEASURED),
        "long screen": plots.screen_figure(label_frame(71), 1.96, 0.05, MEASURED),
        "screen of one": plots.screen_figure(label_frame(1), 1.96, 0.05, MEASURED),
    }
    for name, figure in (all_figures(MEASURED) | of_other_shapes).items():
        figure.draw_without_rendering()
        width, height = figure.get_size_inches() * figure.dpi
        box = figure.get_tightbbox().extents * figure.dpi
        assert box[0] >= -1 and box[1] >= -1 and box[2] <= width + 1 and box[3] <= height + 1, name
        assert any(axes.get_xlabel() for axes in figure.axes), name
        assert round(figure.get_size_inches()[0], 2) in (style.COLUMN, style.DOUBLE), name


def test_bytes_are_equal_from_process_to_process(figures):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_plots import *\n"
        "for name, figure in all_figures(MEASURED).items(): plots.save_figure(figure, name, MEASURED)\n"
    )
    env = os.environ | {"PYTHONHASHSEED": "7", "LORA_SPEC_FIGURES": str(figures / "other")}
    here = os.path.dirname(__file__)
    subprocess.run([sys.executable, "-c", script, here], env=env, check=True, timeout=300)
    for name, figure in all_figures(MEASURED).items():
        saved = plots.save_figure(figure, name, MEASURED)
        for path in (saved.pdf, saved.png):
            assert path.read_bytes() == (figures / "other" / path.name).read_bytes(), path.name


def test_files_carry_the_class_but_no_time_and_embed_truetype(figures):
    saved = plots.save_figure(plots.effect_figure(effect_frame(), 0.05, 0.95, MEASURED), "one", MEASURED)
    pdf, png = saved.pdf.read_bytes(), saved.png.read_bytes()
    assert b"CreationDate" not in pdf and b"/Type3" not in pdf and b"/CIDFontType2" in pdf
    assert b"evidence: measured" in png and b"Software" not in png
    assert saved._repr_png_() == png


def test_a_readers_own_style_changes_nothing(figures):
    import matplotlib

    def draw(name):
        return plots.save_figure(plots.effect_figure(effect_frame(), 0.05, 0.95, MEASURED), name, MEASURED)

    first = draw("one").png.read_bytes()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20, "savefig.dpi": 30}):
        second = draw("one").png.read_bytes()
    assert first == second


def test_smoke_never_reaches_the_checkouts_own_figures(monkeypatch):
    monkeypatch.delenv("LORA_SPEC_FIGURES")
    with pytest.raises(EvidenceError, match="smoke"):
        tables.save_table(label_frame(), "one", SMOKE)
    with pytest.raises(EvidenceError, match="smoke"):
        plots.save_figure(plots.agreement_figure(label_frame(), 1.96, SMOKE), "one", SMOKE)


def test_long_names_keep_both_ends_and_stay_apart():
    long = [f"{'very-' * 12}long-name-{i}" for i in range(3)]
    short = style.short_names(long, 30)
    assert len(set(short)) == 3 and all(
        len(name) == 30 and name.endswith(str(i)) for i, name in enumerate(short)
    )
    same_ends = ["a" * 30 + "1" + "b" * 30, "a" * 30 + "2" + "b" * 30]
    assert style.short_names(same_ends, 30) == same_ends


@pytest.mark.parametrize("count", [12, 71, 90])
def test_many_adapters_with_long_names_fit_the_page(count):
    frame = label_frame(count, "a-rather-long-name-of-an-adapter-from-a-hub")
    figure = plots.screen_figure(frame, 1.96, 0.05, MEASURED)
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    assert height < 9 and figure.get_tightbbox().x1 <= width + 0.01
    shown = 0
    for axes in figure.axes:
        labels = axes.get_yticklabels()
        boxes = [label.get_window_extent() for label in labels]
        assert all(a.y0 >= b.y1 - 0.5 for a, b in pairwise(boxes))
        assert min(box.x0 for box in boxes) >= 0
        assert min(label.get_size() for label in labels) >= 5.5
        shown += len(labels)
    assert shown == count + len(FAMILIES)


def test_a_panel_of_a_family_is_sorted_by_effect():
    frame = label_frame(71)
    for order in (frame, frame.sample(frac=1, random_state=3)):
        figure = plots.screen_figure(order, 1.96, 0.05, MEASURED)
        names = [tick.get_text() for axes in figure.axes for tick in axes.get_yticklabels()]
        effects = frame.set_index("adapter")["delta_alpha"]
        for start, end in pairwise([i for i, n in enumerate(names) if n not in effects] + [len(names)]):
            inside = effects[names[start + 1 : end]]
            assert inside.is_monotonic_increasing and names[start].endswith(f"({len(inside)})")


def test_labels_that_were_not_measured_leave_gaps_not_errors():
    labels = label_frame()
    labels.loc[0, ["delta_alpha_general", "delta_alpha_general_se", "delta_overlap"]] = np.nan
    plots.screen_figure(labels, 1.96, 0.05, MEASURED)
    plots.relation_figure(labels.assign(kl=np.nan), relation_frame().iloc[:1], 1.96, MEASURED)
    plots.agreement_figure(labels, 1.96, MEASURED)
    plots.agreement_figure(labels.assign(delta_overlap=np.nan), 1.96, MEASURED)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.123456, "0.1235"), (-0.0, "0"), (float("nan"), ""), (12345.678, "12346"), (1e-12, "1e-12")],
)
def test_significant(value, shown):
    assert tables.significant(value) == shown


def test_decimals_show_no_negative_zero():
    assert tables.decimals(-0.0001, 3) == "0.000"
    assert tables.decimals(-0.1, 3) == "-0.100"


def test_csv_does_not_depend_on_the_last_bits_of_floats():
    frame = pd.DataFrame({"name": ["a,b"], "x": [0.1 + 0.2], "n": [3]})
    nudged = frame.assign(x=np.nextafter(frame["x"], 1))
    assert tables.csv_text(frame) == tables.csv_text(nudged) == 'name,x,n\n"a,b",0.3,3\n'


def test_latex_is_escaped_and_names_its_evidence():
    frame = pd.DataFrame({"name": ["a_b & 5%"], "delta": [-0.1234], "ok": [True]})
    text = tables.latex_text(frame, {"name": "name", "delta": "Δα̂", "ok": "‖ΔW‖"}, MEASURED)
    assert text.startswith("% evidence: measured - tier: pocket\n")
    assert r"a\_b \& 5\% & $-0.123$ & yes \\" in text
    assert r"$\Delta\hat{\alpha}$" in text
    assert text.isascii()


def test_latex_groups_rows_and_tells_identifiers_in_words(figures):
    frame = pd.DataFrame(
        {"family": ["code", "code", "text"], "adapter": ["c-r8", "b_x", "d"], "moved": ["none", "up", "none"]}
    )
    headers = {"family": "family", "adapter": "adapter", "moved": "moved"}
    words = {"c-r8": "C, rank 8", "none": "not told", "text": "Text"}
    saved = tables.save_table(frame, "one", MEASURED, headers, words=words, group="family")
    lines = saved.tex.read_text().splitlines()
    body = lines[lines.index(r"\midrule") + 1 : -2]
    assert body == [
        r"\multicolumn{2}{l}{\emph{code}} \\",
        r"C, rank 8 & not told \\",
        r"b\_x & up \\",
        r"\midrule",
        r"\multicolumn{2}{l}{\emph{Text}} \\",
        r"d & not told \\",
    ]
    assert saved.csv.read_text().splitlines()[1] == "code,c-r8,none,measured"


def test_saved_table_has_the_evidence_class_in_every_row(figures):
    saved = tables.save_table(pd.DataFrame({"x": [1.0, 2.0]}), "one", MEASURED.joined("modelled"))
    assert saved.csv.read_text() == "x,evidence_class\n1,measured+modelled\n2,measured+modelled\n"
    assert saved.tex.is_file()
