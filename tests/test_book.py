"""The web book in a real browser: each page opens, draws, asks for nothing outside."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from filelock import FileLock
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
PAGES = ["index", *[path.stem for path in NOTEBOOKS]]
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


@pytest.fixture(params=["light"])
def page(chromium, request):
    """A page that must end without an error and without a request to the outside."""
    context = chromium.new_context(color_scheme=request.param)
    page, faults = context.new_page(), []
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
    yield page
    context.close()
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

# In the page: move each slider and menu to another value, and say what moved nothing.
MOVE_ALL = """async () => {
  const still = [];
  for (const chart of document.querySelectorAll(".live-chart")) {
    for (const control of chart.querySelectorAll("input[type=range], select")) {
      const svg = () => chart.querySelector("svg").outerHTML;
      const before = svg();
      if (control.options) {
        control.selectedIndex = control.selectedIndex ? 0 : 1;
      } else {
        const { min, max, value } = control;
        control.value = (+value + (2 * value > +min + +max ? +min : +max)) / 2;
      }
      control.dispatchEvent(new Event(control.options ? "change" : "input"));
      for (let wait = 0; wait < 40 && svg() === before; wait++) {
        await new Promise((done) => setTimeout(done, 25));
      }
      if (svg() === before) still.push(control.closest(".vega-bind").textContent);
    }
  }
  return still;
}"""

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

    assert page.evaluate(MOVE_ALL) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CUT) == []


@pytest.mark.parametrize("stem", PAGES)
def test_links_lead_somewhere(book, stem):
    links = re.findall(r'href="([^"#?]+)', (book / f"{stem}.html").read_text("utf-8"))
    here = [unquote(link) for link in links if not link.startswith("http")]
    assert [link for link in here if not (book / link).exists()] == []
    if stem != "index":
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


def test_the_contents_list_every_notebook_in_its_part(page, book):
    visit(page, book, "index")
    listed = page.eval_on_selector_all(
        ".bd-article .toctree-wrapper a", "all => all.map((a) => a.pathname)"
    )
    assert [Path(path).stem for path in listed] == PAGES[1:]
    captions = page.locator(".bd-article .toctree-wrapper .caption").all_inner_texts()
    assert captions[0] == "The model" and len(captions) >= 3


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
