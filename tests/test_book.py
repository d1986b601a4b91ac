"""The web book in a real browser: each page opens, draws, asks for nothing outside."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from filelock import FileLock
from playwright.sync_api import sync_playwright

from annotated_transformer.copy_task import toy_translation

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
STEMS = [path.stem for path in NOTEBOOKS]
PAGES = ["index", *STEMS, "cheat_sheet"]
VEGA_LITE = "application/vnd.vegalite.v5+json"
CHROMIUM = shutil.which("chromium")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync"""

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="needs Debian's chromium: apt-get install chromium"
)


@pytest.fixture(scope="session")
def book(tmp_path_factory, worker_id):
    """The book, built once, also where several processes share the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "book"
    with FileLock(f"{folder}.lock"):
        if not (folder / "warnings").exists():
            (folder / "src").mkdir(parents=True, exist_ok=True)
            tool = Path(sys.executable).with_name("sphinx-build")
            places = [ROOT / "book", folder / "src", folder / "html"]
            command = [tool, "--quiet", "-c", *places]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            (folder / "warnings").write_text(done.stderr)
    return folder / "html"


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS.split()
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(chromium):
    """A page for all tests, as opening one costs as much as a visit; and its faults."""
    page, faults = chromium.new_page(), []
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda sent: faults.append(f"no answer: {sent.url}"))

    def console(message) -> None:
        if message.type == "error":
            faults.append(message.text)

    def asked(sent) -> None:
        if not sent.url.startswith(("file:", "data:", "blob:")):
            faults.append(f"asks for {sent.url}")

    page.on("console", console)
    page.on("request", asked)
    return page, faults


@pytest.fixture(params=["light"])
def page(window, request):
    """A page that must end without an error and without a request to the outside."""
    page, faults = window
    faults.clear()
    page.emulate_media(color_scheme=request.param, media="null")
    page.set_viewport_size({"width": 1280, "height": 720})
    yield page
    page.evaluate("() => { try { localStorage.clear() } catch {} }")
    page.goto("about:blank")
    assert faults == []


def visit(page, book: Path, stem: str) -> None:
    """Open a page and wait until its charts are drawn and its maths is typeset."""
    page.goto((book / f"{stem}.html").as_uri())
    page.wait_for_function("!document.querySelector('.live-chart > img')")
    page.wait_for_function("!window.MathJax || MathJax.startup?.promise !== undefined")
    page.evaluate("window.MathJax ? MathJax.startup.promise : null")


def outputs(stem: str) -> list[dict]:
    path = ROOT / "notebooks" / f"{stem}.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.exists() else []
    return [output for cell in cells for output in cell.get("outputs", [])]


# In the page: the height and width of each chart, and what a screen reader hears of it.
CHARTS = """() => [...document.querySelectorAll(".live-chart svg")].map((svg) => {
  const { width, height } = svg.getBoundingClientRect();
  return [width, height, svg.getAttribute("aria-label") || ""];
})"""

# In the page: each slider, menu and button that the keyboard or a screen reader misses.
MUTE = """() => [...document.querySelectorAll(".live-chart input, .live-chart select")]
  .filter((one) => one.tabIndex !== 0 || !one.checkVisibility()
    || !one.labels[0]?.textContent.trim())
  .map((one) => one.outerHTML)"""

# In the page: move each slider and menu to another value, and say what moved nothing.
MOVE_ALL = """async () => {
  const still = [];
  const controls = "input[type=range], input[type=radio]:not(:checked), select";
  for (const chart of document.querySelectorAll(".live-chart")) {
    for (const control of chart.querySelectorAll(controls)) {
      const svg = () => chart.querySelector("svg").outerHTML;
      const before = svg();
      if (control.options) {
        control.selectedIndex = control.selectedIndex ? 0 : 1;
      } else if (control.type === "radio") {
        control.checked = true;
      } else {
        const { min, max, value } = control;
        control.value = (+value + (2 * value > +min + +max ? +min : +max)) / 2;
      }
      const kind = control.type === "range" ? "input" : "change";
      control.dispatchEvent(new Event(kind));
      for (let wait = 0; wait < 40 && svg() === before; wait++) {
        await new Promise((done) => setTimeout(done, 25));
      }
      if (svg() === before) still.push(control.closest(".vega-bind").textContent);
    }
  }
  return still;
}"""

# In the page: what the marks of a chart say of themselves, once it has come to rest.
SAYS = """async (chart) => {
  await chart.view.runAsync();
  const marks = chart.querySelectorAll("svg :is(path, line)[aria-label]");
  return [...marks].map((mark) => mark.getAttribute("aria-label"));
}"""

# In the page: the words that a chart shows, once it has come to rest.
WORDS = """async (chart) => {
  await chart.view.runAsync();
  return [...chart.querySelectorAll("svg text")].map((text) => text.textContent);
}"""

# In the page: what kind of thing is met first, words (P) or code; quotations aside.
FIRST = """() => [...document.querySelectorAll('.bd-article p, .bd-article .highlight')]
    .find(part => part.checkVisibility() && !part.closest('blockquote'))?.tagName"""

# In the page: the equations that begin to the left of where anybody can scroll.
CUT = """() => [...document.querySelectorAll(".bd-article div.math")]
  .filter((equation) => [...equation.querySelectorAll("mjx-container *")].some(
    (part) => part.getBoundingClientRect().width
      && part.getBoundingClientRect().left < equation.getBoundingClientRect().left - 2))
  .map((equation) => equation.textContent)"""

# In the page: the step at which the first curve of the first chart with knobs peaks.
PEAK = r"""() => {
  const knob = document.querySelector(".live-chart input[type=range]");
  const chart = knob.closest(".live-chart");
  const path = chart.querySelector("g.mark-line path").getAttribute("d");
  const points = [...path.matchAll(/(-?[\d.]+),(-?[\d.]+)/g)];
  const [, x] = points.reduce((top, point) => (+point[2] < +top[2] ? point : top));
  return chart.view.scale("x").invert(+x);
}"""


# What a beam of two makes of the four-word language, worked out with a pencil.
BEAM_OF_TWO = [
    [("kept", "<s> A", "0.600"), ("kept", "<s> B", "0.400")],
    [
        ("found", "<s> B end", "0.360"),
        ("kept", "<s> A x", "0.300"),
        ("dropped", "<s> A end", "0.180"),
        ("kept", "<s> A B", "0.120"),
        ("dropped", "<s> B A", "0.040"),
    ],
    [
        ("found", "<s> A x end", "0.240"),
        ("found", "<s> A B end", "0.108"),
        ("kept", "<s> A x x", "0.060"),
        ("kept", "<s> A B A", "0.012"),
    ],
]


@pytest.mark.parametrize("stem", PAGES)
def test_opens_whole(page, book, stem):
    visit(page, book, stem)
    drawn = page.evaluate(CHARTS)
    expected = [out for out in outputs(stem) if VEGA_LITE in out.get("data", {})]
    assert len(drawn) == len(expected)
    for width, height, words in drawn:
        assert width > 150 and height > 60 and len(words) > 10

    maths = page.locator(".bd-article .math").count()
    assert page.locator(".bd-article mjx-container").count() >= maths
    assert page.locator("[data-mml-node=merror], mjx-merror").count() == 0
    text = page.locator(".bd-article").inner_text()
    assert "#|" not in text.replace("`#|", "") and "$$" not in text

    assert page.evaluate(FIRST) in ("P", None)  # words come before code

    assert page.locator(".bd-article img:not([alt])").count() == 0
    assert page.evaluate(MUTE) == []
    assert page.evaluate(MOVE_ALL) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CUT) == []


@pytest.mark.parametrize("stem", PAGES)
def test_links_lead_somewhere(book, stem):
    links = re.findall(r'href="([^"#?]+)', (book / f"{stem}.html").read_text("utf-8"))
    here = [unquote(link) for link in links if not link.startswith("http")]
    assert [link for link in here if not (book / link).exists()] == []
    if stem in STEMS:
        assert f"_sources/{stem}.ipynb" in here


def test_builds_without_a_warning(book):
    assert (book.parent / "warnings").read_text().splitlines() == []


def test_a_download_is_the_notebook(book):
    for path in NOTEBOOKS:
        assert (book / "_sources" / path.name).read_bytes() == path.read_bytes()


def test_the_peak_follows_the_warm_up(page, book):
    visit(page, book, next(stem for stem in PAGES if stem.endswith("_schedule")))
    knob = page.locator(".live-chart .vega-bind", has_text="warm-up").locator("input")
    for warmup in (2000, 4000, 8000):
        knob.fill(str(warmup))
        page.wait_for_timeout(200)
        assert page.evaluate(PEAK) == pytest.approx(warmup, abs=100)


def with_control(page, name: str):
    """The chart with the slider, the menu or the buttons called `name`, and these."""
    chart = page.locator(".live-chart").filter(has=page.locator(f"[name='{name}']"))
    return chart, chart.locator(f"[name='{name}']")


def told(chart, name: str) -> list[float]:
    """The number that each mark of `chart` gives for `name`, in the order drawn."""
    pattern = rf"(?:^|; ){re.escape(name)}: ([^;]+)"
    found = (re.search(pattern, said) for said in chart.evaluate(SAYS))
    return [float(match[1].replace("−", "-")) for match in found if match]


def test_the_weights_follow_the_scores(page, book):
    visit(page, book, "01_attention")
    for first, second in ((12, 10), (4, 8), (7.5, 7.5), (16, 0)):
        for name, score in (("score_1", first), ("score_2", second)):
            chart, slider = with_control(page, name)
            slider.fill(str(score))
        share = 1 / (1 + math.exp(second - first))
        assert told(chart, "weight") == pytest.approx([share, 1 - share], abs=1e-6)


def test_the_head_menu_picks_an_arc(page, book):
    visit(page, book, "02_multi_head")
    chart, menu = with_control(page, "h")
    names = menu.locator("option").all_inner_texts()
    assert names[0] == "all" and len(names) == 4
    for name in names:
        menu.select_option(name)
        found = (
            re.search(r"head: ([^;]+).*shown: ([^;]+)", one)
            for one in chart.evaluate(SAYS)
        )
        drawn = {match[1]: float(match[2]) for match in found if match}
        assert sorted(drawn) == sorted(names[1:])
        for head, shown in drawn.items():
            assert shown == (1 if name in ("all", head) else 0.15)


def test_the_head_menu_picks_a_map(page, book):
    visit(page, book, "26_attention_maps")
    specs = [
        output.get("data", {}).get(VEGA_LITE) for output in outputs("26_attention_maps")
    ]
    (data,) = (spec["data"]["values"] for spec in specs if spec and "params" in spec)
    maps = {
        tuple(map(row.get, ("attention", "layer", "head"))): row
        for row in csv.DictReader(data.splitlines())
    }
    assert len(maps) == 3 * 2 * 4
    for picked in [*maps][::5]:
        for name, value in zip(("attention", "layer", "head"), picked, strict=True):
            chart, menu = with_control(page, name)
            menu.select_option(value)
        weights = [int(one) / 1000 for one in maps[picked]["thousandths"].split()]
        assert told(chart, "weight") == pytest.approx(weights, abs=1e-6)


def test_positions_turn_the_hands(page, book):
    visit(page, book, "06_embeddings")
    chart, slider = with_control(page, "position")
    for position in (0, 1, 42, 100):
        slider.fill(str(position))
        angles = [position * 10000 ** (-2 * pair / 16) for pair in range(5)]
        for name in ("sin", "cos"):
            wanted = [getattr(math, name)(angle) for angle in angles]
            assert told(chart, name) == pytest.approx(wanted, abs=1e-6)


def test_epsilon_moves_from_the_right_word_to_the_rest(page, book):
    visit(page, book, "12_label_smoothing")
    chart, slider = with_control(page, "epsilon")
    for epsilon in (0, 0.1, 0.4, 0.8):
        slider.fill(str(epsilon))
        rest = epsilon / 4  # <blank> is never asked for; "bin" is right
        wanted = [0, rest, rest, 1 - epsilon, rest, rest]
        assert told(chart, "probability asked for") == pytest.approx(wanted, abs=1e-6)


def test_the_steppers_words_spell_the_translation(page, book):
    visit(page, book, "15_greedy")
    chart, slider = with_control(page, "step")
    said = ["<s>"]
    for step in range(1, 7):
        slider.fill(str(step))
        marks = [
            re.search(r"value: (\S+); word: (\S+)", one).groups()
            for one in chart.evaluate(SAYS)
        ]
        best, looks = marks[:3], marks[3:]
        chances = [float(chance) for chance, _ in best]
        assert chances == sorted(chances, reverse=True) and sum(chances) <= 1.001
        assert sum(float(weight) for weight, _ in looks) == pytest.approx(1, abs=0.01)
        assert f"{' '.join(said)} …" in chart.evaluate(WORDS)
        said.append(best[0][1])
    words, pairs = toy_translation()
    known = {
        tuple(words[w] for w in src): [words[w] for w in tgt] for src, tgt in pairs
    }
    assert said == known[tuple(word for _, word in looks)]


def test_the_tree_grows_with_the_slider(page, book):
    visit(page, book, "16_decoding")
    chart, slider = with_control(page, "step")
    for step in range(1, 4):
        slider.fill(str(step))
        pattern = r"fate: (\w+); said: ([^;]+); probability: ([\d.]+)"
        drawn = {
            re.search(pattern, one).groups()
            for one in chart.evaluate(SAYS)
            if "said: " in one
        }
        grown = {one for rows in BEAM_OF_TWO[:step] for one in rows}
        assert drawn == grown | {("kept", "<s>", "1.000")}


def test_the_buttons_zoom(page, book):
    visit(page, book, "00_start_here")
    code = page.locator("pre", has_text="def arrow(")
    assert code.count() == 1 and not code.is_visible()
    chart, buttons = with_control(page, "zoom")
    inside = ["encoder", "floor 6", "feed-forward", "softmax: weights"]
    for stop, button in enumerate(buttons.all()):
        button.check()
        shown = [word for word in chart.evaluate(WORDS) if word in inside]
        assert [*dict.fromkeys(shown)] == (inside[stop - 1 : stop] if stop else inside)


def test_the_keyboard_reaches_and_moves_what_can_be_moved(page, book):
    for stem, names in (("15_greedy", "step updates"), ("00_start_here", "zoom")):
        visit(page, book, stem)
        chart, _ = with_control(page, names.split()[0])
        chart.evaluate("(chart) => { chart.tabIndex = -1; chart.focus(); }")
        for name in names.split():
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.name") == name
            before = chart.evaluate(WORDS)
            page.keyboard.press("ArrowRight" if name != "updates" else "ArrowUp")
            assert chart.evaluate(WORDS) != before


def test_the_contents_list_every_notebook_in_its_part(page, book):
    visit(page, book, "index")
    listed = page.eval_on_selector_all(
        ".bd-article .toctree-wrapper a", "all => all.map((a) => a.pathname)"
    )
    assert [Path(path).stem for path in listed] == PAGES[1:]
    captions = page.locator(".bd-article .toctree-wrapper .caption").all_inner_texts()
    assert captions[0] == "The model" and len(captions) >= 3


def test_the_cheat_sheet_prints_on_one_sheet_of_a4(page, book):
    visit(page, book, "cheat_sheet")
    sheet = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", sheet)) == 1
    ((width, height),) = re.findall(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", sheet)
    assert [round(float(points) / 72 * 25.4) for points in (width, height)] == [
        210,
        297,
    ]
    page.set_viewport_size({"width": 703, "height": 1032})  # what the margins leave
    page.emulate_media(media="print")
    for code in page.locator(".sheet pre").all():
        assert code.evaluate("(code) => code.scrollWidth <= code.clientWidth")
    said = page.locator(".sheet").inner_text()
    for part in ("EncoderDecoder", "Shapes.", "Masks.", "Recipe.", "Mistakes", "while"):
        assert part in said


def test_equations_are_linked_to(page, book):
    homes = {"1": "attention", "2": "feed_forward", "3": "schedule"}
    pages = {n: next(s for s in STEMS if s[3:] == name) for n, name in homes.items()}
    for number, stem in pages.items():
        text = (book / f"{stem}.html").read_text("utf-8")
        shown = re.search(rf'id="eq-{number}".*?\\\[(.*?)\\\]', text, re.S)
        assert rf"\tag{{{number}}}" in shown[1]
    links = []
    for stem in PAGES:
        text = (book / f"{stem}.html").read_text("utf-8")
        article = text.partition("<article")[2]
        pattern = r'<a[^>]*href="([^"#]*)#eq-(\d)"[^>]*>(?:<\w+[^>]*>)*([^<]*)'
        for home, number, said in re.findall(pattern, article):
            assert (home or f"{stem}.html") == f"{pages[number]}.html"
            assert number in said
            links.append(number)
        prose = re.sub(r"<(pre|script|code|a)\b.*?</\1>", "", article, flags=re.S)
        prose = re.sub(r"<[^>]*>", "", prose)
        assert not re.search(r"Eq\.\s\(?[123]\b", prose), stem
    assert {*links} == {*pages}
    visit(page, book, "00_start_here")
    page.locator(".bd-article a[href$='#eq-2']").first.click()
    page.wait_for_url("**/04_feed_forward.html#eq-2")


def test_search_finds_a_word(page, book):
    page.goto((book / "search.html").as_uri() + "?q=softmax")
    page.locator("#search-results li a[href*='01_attention']").first.wait_for()


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_light_and_dark(page, book, request):
    shown = request.node.callspec.params["page"]
    visit(page, book, "01_attention")
    paper = "getComputedStyle(document.documentElement).colorScheme"
    assert page.locator("html").get_attribute("data-theme") == shown
    assert page.evaluate(paper) == shown
    other = {"light": "dark", "dark": "light"}[shown]
    page.locator("button.theme-switch-button").click()
    page.locator(f"button.theme-change-button[data-mode={other}]").click()
    assert page.evaluate(paper) == other
