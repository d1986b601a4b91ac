"""Charts: what is drawn, from the marks of the picture itself, and what is saved."""

import io
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import altair as alt
import pandas as pd
import pytest
import torch
import vl_convert
from PIL import Image

from annotated_transformer import charts
from annotated_transformer.renderer import _pack, render

ROOT = Path(__file__).parents[1]
LIVE = "application/vnd.vegalite.v5+json"
ODD = ["a:b", "a.b", "a[0]", "it's", 'say "ja"', "x,y", "Öl\nÄrger", "</s>", "\\", "7"]
TITLES = dict(title="Title", x_title="across", y_title="up")
WAVE = charts.formula({"y": "sin(datum.x / slow)"}, 0, 9, 0.1, **TITLES).add_params(
    charts.slider("slow", 1, 5, 1, 2)
)
EVERY = {
    "heatmap": charts.heatmap(torch.eye(3), title="Title"),
    "numbers": charts.heatmap(torch.eye(3), title="Title", numbers=True),
    "signed": charts.heatmap([[-3.0, 2.0]], title="Title", diverging=True),
    "domain": charts.heatmap([[5, 9]], title="Title", domain=(0, 10), numbers=True),
    "heads": charts.heads(torch.rand(2, 3, 4, 5), title="Title"),
    "beside": charts.heads(torch.rand(4, 3, 3), title="Title", columns=2),
    "lines": charts.lines({"a": [1, 2, 4], "b": [3, 2, 1]}, **TITLES),
    "log": charts.lines({"a": [1, 9]}, [1, 9], x_scale="log", y_scale="log", **TITLES),
    "markers": charts.lines(pd.DataFrame({"a:b": [1.0, 2.0]}), markers=True, **TITLES),
    "bars": charts.bars({"a": 1, "b": torch.tensor(2.0)}, **TITLES),
    "groups": charts.bars({"a": [1, 2], "b": (3, 4)}, ["x", "x"], **TITLES),
    "flat": charts.bars({"a very long label": 1, "b": 2.5}, domain=(0, 3), **TITLES),
    "formula": WAVE,
    "row": charts.bars({"a": 1}, **TITLES) | charts.lines({"a": [1, 2]}, **TITLES),
}


@pytest.fixture(autouse=True)
def enabled():
    charts.enable()


def saved(chart) -> dict:
    return render(chart.to_dict())[0][LIVE]


def marks(spec: dict, role: str = "mark") -> list[dict]:
    """The drawn marks of `role`, in order: rectangles, lines or texts."""
    found, waiting = [], [vl_convert.vegalite_to_scenegraph(spec, "5.20")["scenegraph"]]
    while waiting:
        part = waiting.pop()
        if part.get("role") == role:
            found += part["items"]
        waiting += reversed(part.get("items", []))
    return found


def squares(spec: dict) -> list[tuple[str, str, float]]:
    """Query word, key word and weight of each square, line by line."""
    drawn = sorted(marks(spec), key=lambda square: (square["y"], square["x"]))
    pattern = r"weight: (\S+); query word: (.*); key word: (.*)"
    read = [re.search(pattern, square["description"]).groups() for square in drawn]
    return [(query, key, float(weight)) for weight, query, key in read]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [lambda w: w, lambda w: [*w], lambda w: w.tolist()])
def test_a_heatmap_has_queries_down_keys_across_and_words_apart(dtype, given):
    torch.manual_seed(0)
    weights = torch.randn(3, 4, requires_grad=True).to(dtype).softmax(-1)
    queries, keys = ["the", "man", "who"], ["der", "Mann", "der", "liest"]
    chart = charts.heatmap(given(weights), queries, keys, title="Title")
    drawn = squares(saved(chart))
    assert [(q, k) for q, k, _ in drawn] == [(q, k) for q in queries for k in keys]
    values = torch.tensor([weight for *_, weight in drawn]).view(3, 4)
    torch.testing.assert_close(values.double(), weights.double(), rtol=0, atol=1e-3)
    rows = chart.to_dict()["data"]["values"]
    assert len(rows) == 12
    read = torch.tensor([row["weight"] for row in rows]).view(3, 4)
    torch.testing.assert_close(read.double(), weights.double(), rtol=0, atol=1e-5)
    assert chart.to_dict()["encoding"]["color"]["scale"]["domain"] == [0, 1]
    labels = [text["text"] for text in marks(saved(chart), "axis-label")]
    assert labels == keys + queries


def test_a_mask_is_a_heatmap_too():
    drawn = squares(saved(charts.heatmap(torch.ones(3, 3).tril() > 0, title="Title")))
    assert [weight for *_, weight in drawn] == [1, 0, 0, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("head", [1, 2, 3])
@pytest.mark.parametrize("name", ["self", "cross"])
def test_menus_pick_the_map_that_is_drawn(name, layer, head):
    torch.manual_seed(0)
    german, english = "ich bin müde".split(), "I am tired .".split()
    maps = {"self": torch.rand(2, 3, 4, 4), "cross": torch.rand(2, 3, 4, 3)}
    keys = {"self": english, "cross": german}
    spec = saved(charts.heads(maps, english, keys, title="Title"))
    picked = {"attention": name, "layer": layer, "head": head}
    for parameter in spec["params"]:
        assert picked[parameter["name"]] in parameter["bind"]["options"]
        parameter["value"] = picked.pop(parameter["name"])
    assert not picked
    drawn = squares(spec)
    pairs = [(query, key) for query in english for key in keys[name]]
    assert [(query, key) for query, key, _ in drawn] == pairs
    values = torch.tensor([weight for *_, weight in drawn])
    wanted = maps[name][layer - 1, head - 1].flatten()
    torch.testing.assert_close(values, wanted, rtol=0, atol=6e-4)
    labels = [text["text"] for text in marks(spec, "axis-label")]
    assert labels == keys[name] + english


def test_a_map_of_one_head_needs_no_menu():
    assert "params" not in charts.heads(torch.rand(1, 2, 2), title="Title").to_dict()


def test_heads_side_by_side_are_all_there():
    weights = torch.rand(2, 3, 2, 2)
    spec = saved(charts.heads(weights, title="Title", columns=3))
    told = [square["description"] for square in marks(spec)]
    drawn = [float(re.search(r"weight: (\S+?);", text)[1]) for text in told]
    close = pytest.approx(weights.flatten().tolist(), abs=6e-4)
    assert drawn == close


@pytest.mark.parametrize("series", [1, 3, 33])
@pytest.mark.parametrize("steps", [1, 4, 20000])
def test_a_long_schedule_stays_small_and_keeps_its_peak(series, steps):
    step = torch.arange(1, steps + 1)
    rates = {
        f"warm-up {n}": torch.minimum(step**-0.5, step * (1000.0 + n) ** -1.5)
        for n in range(series)
    }
    rows = charts.lines(rates, step, **TITLES).to_dict()["data"]["values"]
    assert len(rows) <= 5000
    for name, values in rates.items():
        points = {row["x"]: row["y"] for row in rows if row["series"] == name}
        assert {1, steps, step[values.argmax()].item()} <= points.keys()
        assert max(points.values()) == pytest.approx(values.max().item(), rel=1e-4)


def test_a_data_frame_has_as_many_series_as_columns():
    table = pd.DataFrame({"loss": range(1, 121), "rate": range(120)})
    curves = charts.lines(table, **TITLES).to_dict()
    assert len(curves["data"]["values"]) == 240
    assert curves["encoding"]["color"]["scale"]["domain"] == ["loss", "rate"]


def test_altair_still_refuses_more_than_5000_rows():
    chart = alt.Chart(pd.DataFrame({"x": range(5001)})).mark_point().encode(x="x:Q")
    with pytest.raises(alt.MaxRowsError):
        chart.to_dict()
    with pytest.raises(ValueError, match="5041"):
        charts.heatmap(torch.zeros(71, 71), title="Title")
    with pytest.raises(ValueError, match="34 series"):
        charts.lines({f"{i}": [1] for i in range(34)}, **TITLES)


def test_any_name_and_any_word_is_drawn_as_it_is():
    series = {name: [float(i), 2.0] for i, name in enumerate(ODD)}
    legend = marks(saved(charts.lines(series, **TITLES)), "legend-label")
    assert [text["text"] for text in legend] == [name for name in ODD]
    words = [(q, k) for q in ODD for k in ODD]
    weights = torch.eye(len(ODD))
    for chart in (
        charts.heatmap(weights, ODD, ODD, title="Title"),
        charts.heads({"a:b": weights}, ODD, ODD, title="Title"),
    ):
        spec = saved(chart)
        assert [text["text"] for text in marks(spec, "axis-label")] == ODD + ODD
        assert len(marks(spec)) == len(words)
    named = charts.heads({name: weights[:2, :2] for name in ODD}, title="Title")
    assert len(marks(saved(named))) == 4


@pytest.mark.parametrize("name", EVERY)
def test_every_shape_is_valid_small_described_and_drawn_without_a_network(
    name, monkeypatch
):
    def offline(*_, **__):
        raise OSError("no network here")

    for call in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, call, offline)
    spec = EVERY[name].to_dict(validate=True)
    bundle, sizes = render(spec)
    assert set(bundle) == {LIVE, "image/png", "text/plain"}  # no text/html
    assert bundle["text/plain"] == "Title" or name == "row"
    assert "Title." in json.dumps(spec)  # the description, for a screen reader
    picture = Image.open(io.BytesIO(bundle["image/png"]))
    assert picture.convert("RGB").getpixel((1, 1)) == (251, 250, 246)  # the card
    assert picture.size[0] == pytest.approx(1.5 * sizes["image/png"]["width"], abs=1)
    assert len(bundle["image/png"]) < 22_000
    assert len(json.dumps(bundle[LIVE], indent=1)) < 8_000
    assert bundle[LIVE]["$schema"].endswith("/v5.json")
    assert marks(bundle[LIVE])


@pytest.mark.parametrize("name", EVERY)
def test_packing_the_data_changes_no_mark(name):
    spec = EVERY[name].to_dict()
    assert marks(_pack(spec, spec.get("datasets", {}))) == marks(spec)


def test_tables_of_plain_altair_are_packed_too():
    table = pd.DataFrame({"word": ["ja", "7"], "n": [1, 2], "share": [0.5, 1e-9]})
    chart = alt.Chart(table).mark_point().encode(x="n", y="share", color="word")
    spec = chart.to_dict()
    packed = saved(chart)
    assert packed["data"]["values"].startswith("word,n,share\nja,1,0.5\n")
    assert "datasets" not in packed
    assert marks(packed) == marks(spec)
    for column in ([1.0, None], ["", "ja"], [True, False], ["ja", None]):
        odd = pd.DataFrame({"n": [1, 2], "odd": column})
        spec = alt.Chart(odd).mark_point().encode(x="n", y="odd").to_dict()
        assert marks(_pack(spec, spec["datasets"])) == marks(spec)


def test_a_slider_changes_the_curve():
    spec = saved(WAVE)
    heights = []
    for value in (1, 5):
        (slider,) = spec["params"]
        slider["value"] = value
        heights.append([point["y"] for point in marks(spec)])
    assert heights[0] != heights[1]
    spec["params"][0]["value"] = 2
    drawn = [point["y"] for point in marks(spec)]
    wanted = [-torch.tensor(i * 0.05).sin().item() for i in range(len(drawn))]
    low, high = min(wanted), max(wanted)
    span = max(drawn) - min(drawn)
    for y, value in zip(drawn, wanted, strict=True):
        height = (value - low) / (high - low) * span
        assert y - min(drawn) == pytest.approx(height, abs=1)


def test_a_live_chart_leaves_nearly_all_the_time_to_the_work(monkeypatch):
    now, drawn = [0.0], []

    def draw(rows):
        now[0] += 2.0  # drawing is slow
        drawn.append(len(rows))

    monkeypatch.setattr("annotated_transformer.curves.time.monotonic", lambda: now[0])
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys)  # as in a kernel
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: MagicMock())
    rows = charts.Live(draw, pause=1.0)
    for step in range(200):
        now[0] += 1.0
        rows.append(step)
    assert drawn == [1, 39, 77, 115, 153, 191]


def test_outside_a_kernel_a_live_chart_is_drawn_once_at_the_end(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel.zmqshell", raising=False)
    drawn = []
    rows = charts.Live(lambda rows: drawn.append(len(rows)), pause=0.0)
    for step in range(5):
        rows.append(step)
    assert drawn == [] and rows == [0, 1, 2, 3, 4]
    rows.show()
    assert drawn == [5]


def test_each_formula_has_its_own_colour():
    up_down = {"it's \\ up": "datum.x", "a:b": "-datum.x"}
    spec = saved(charts.formula(up_down, 0, 1, 0.5, **TITLES))
    drawn = {colour: [] for colour in charts.CATEGORIES[:2]}
    for point in marks(spec):
        drawn[point["stroke"]].append(point["y"])  # pixels from the top
    up, down = drawn.values()
    assert up == sorted(up, reverse=True) and down == sorted(down)
    assert len(up) == len(down) == 3
    legend = [text["text"] for text in marks(spec, "legend-label")]
    assert legend == [*up_down]


DRAW = """
import hashlib, json
from annotated_transformer import charts
from annotated_transformer.renderer import render
charts.enable()
for chart in (
    charts.heads({"a": [[[0.5, 0.5], [0, 1]]], "b": [[[1, 0], [0, 1]]]}, title="T"),
    charts.lines({"a": [1, 2], "b": [2, 1]}, title="T", x_title="x", y_title="y"),
):
    bundle, _ = render(chart.to_dict())
    print(hashlib.sha256(bundle.pop("image/png")).hexdigest(), json.dumps(bundle))
"""


def test_a_new_process_draws_the_same_bytes(capsys):
    """It draws from other hashes, in another order of what Python does not order."""
    seed = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRAW]
    there = subprocess.run(command, cwd=ROOT, env=seed, capture_output=True, check=True)
    exec(DRAW, {})
    here = capsys.readouterr().out
    assert here.count("\n") == 2 and there.stdout.decode() == here


def test_data_behind_an_address_is_never_fetched():
    far = alt.Chart("http://127.0.0.1:9/data.csv").mark_point()
    with pytest.raises(ValueError, match="not allowed"):
        render(far.to_dict())


def test_colab_gets_html(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    charts.enable()
    assert alt.renderers.active == "html"
    monkeypatch.delitem(sys.modules, "google.colab")
    charts.enable()
    assert alt.renderers.active == "annotated_transformer"


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_without_the_packages_one_sentence_says_what_to_install(error):
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("altair", "vl_convert", "PIL", "pandas"):
            raise {error}(name)
sys.meta_path.insert(0, Absent())
from annotated_transformer import charts, renderer
calls = (
    charts.enable,
    lambda: charts.slider("a", 0, 1, 1, 0),
    lambda: charts.heatmap([[1]], title="T"),
    lambda: charts.heads([[[1]]], title="T"),
    lambda: charts.lines(dict(a=[1]), title="T", x_title="x", y_title="y"),
    lambda: charts.bars(dict(a=1), title="T", x_title="x", y_title="y"),
    lambda: charts.formula(dict(a="1"), 0, 1, 1, title="T", x_title="x", y_title="y"),
    lambda: renderer.render(dict()),
)
for call in calls:
    try:
        call()
    except ImportError as error:
        assert "pip install" in str(error) and "\\n" not in str(error), error
    else:
        raise AssertionError(call)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: charts.heatmap([[1, 0]], ["a", "b"], title="T"), "2 query .* 1 query"),
        (lambda: charts.heatmap([[1, 0]], None, ["a"], title="T"), "1 key .* 2 key"),
        (lambda: charts.heatmap([[1, NAN], [INF, 0]], title="T"), "2 of 4 .* NaN"),
        (lambda: charts.heatmap([], title="T"), r"\[0\]"),
        (lambda: charts.heatmap(torch.zeros(0, 4), title="T"), r"\[0, 4\]"),
        (lambda: charts.heatmap(torch.zeros(2, 3, 4), title="T"), r"\[2, 3, 4\]"),
        (lambda: charts.heatmap([[1.5]], title="T"), "1.5 .* 0 to 1: .*domain"),
        (lambda: charts.heatmap([[-0.5]], title="T"), "-0.5 .* 0 to 1: .*diverging"),
        (lambda: charts.heatmap([[7]], domain=(0, 5), title="T"), "7 .* 0 to 5"),
        (lambda: charts.heads(torch.zeros(2), title="T"), r"2 or 3 or 4 .*\[2\]"),
        (lambda: charts.heads({}, title="T"), "0 "),
        (lambda: charts.heads(torch.full((2, 2, 2), NAN), title="T"), "8 of 8"),
        (lambda: charts.heads(torch.full((2, 2, 2), 3.0), title="T"), "3 .* 0 to 1"),
        (lambda: charts.heads(torch.zeros(2, 2, 2), ["a"], title="T"), "1 query .* 2"),
        (
            lambda: charts.heads(
                dict(a=[[1, 0]], b=[[1]]), None, None, title="T", columns=2
            ),
            "same labels",
        ),
        (lambda: charts.lines({}, **TITLES), "0 series"),
        (lambda: charts.lines({"a": []}, **TITLES), r"a: .*\[0\]"),
        (lambda: charts.lines({"a": [1, NAN]}, **TITLES), "a: 1 of 2 .* NaN"),
        (lambda: charts.lines({"a": [1, 2]}, [1, 2, 3], **TITLES), "2 values for 3"),
        (lambda: charts.lines({"a": [1, 2]}, points=3, **TITLES), "3 points"),
        (lambda: charts.lines({"a": [0, 1]}, y_scale="log", **TITLES), "log"),
        (lambda: charts.bars({}, **TITLES), r"\[0\]"),
        (lambda: charts.bars({"a": NAN}, **TITLES), "1 of 1 .* NaN"),
        (lambda: charts.bars({"a": [1, 2]}, ["x"], **TITLES), "1 bar .* 2 bar"),
        (lambda: charts.bars({"a": [1, 2], "b": [1]}, ["x", "y"], **TITLES), "2 bar"),
        (lambda: charts.bars({"a": range(5001)}, **TITLES), "5001 bars"),
        (lambda: charts.formula({}, 0, 1, 0.1, **TITLES), "0 "),
        (lambda: charts.formula({"a": "1"}, 0, 1, 1e-4, **TITLES), "10000 points"),
        (lambda: charts.formula({"a": "1"}, 0, 1, 0, **TITLES), "0"),
        (lambda: charts.menu("a", []), "0 options"),
        (lambda: charts.slider("a", 1, 0, 1, 5), "5"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_its_numbers(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_committed_pictures_are_small_and_never_html():
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert notebook.stat().st_size <= 300_000, notebook.name
        for cell in json.loads(notebook.read_text())["cells"]:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if LIVE in data or "image/png" in data:
                    assert "text/html" not in data, notebook.name
