"""The web book: each notebook a page, with the outputs that it is committed with.

The pages are put together in Sphinx's source folder, which `make book` gives as
build/book-src. So nothing is written beside the notebooks, and a new notebook needs no
line here. The cheat sheet, a section of the first notebook, has a page of its own that
prints on one sheet. A page asks for nothing outside its own folder.
"""

import html
import json
import re
import shutil
from pathlib import Path

import vl_convert
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
VEGA_LITE = "application/vnd.vegalite.v5+json"
SETUP = re.compile(r"^(import|from|[ )#]|(charts\.)?enable\(|torch\.set_n).*|\n", re.M)
SHEET = """# Cheat sheet

<style>@page { size: A4; margin: 12mm; }</style>
<div class="sheet">

%s

</div>
"""

project = "The Annotated Transformer"
author = "the authors of this series"
copyright = f"{author}. Code and text: MIT"
extensions = ["myst_nb", "sphinx-mathjax-offline"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_links_external_new_tab = True
nb_execution_mode = "off"
nb_code_prompt_show = "The code that draws it"
nb_code_prompt_hide = "Hide the code that draws it"
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {}  # would come from outside
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header"]

html_title = project
html_theme = "sphinx_book_theme"
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 2,
    "show_toc_level": 2,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "navigation_with_keys": True,
    "navbar_persistent": [],  # the search field stands in the sidebar
    "footer_content_items": ["copyright.html"],
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_sourcelink_suffix = ""  # a download is named 01_attention.ipynb, not ….ipynb.txt
html_show_sphinx = False
html_show_search_summary = False  # would be fetched, which a file may not do


def toctrees() -> str:
    """Every notebook in order, under the parts that the README's map puts it in."""
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \| \*\*(.+?)\*\*|\(notebooks/(\w+)\.ipynb\)", readme, re.M)
    opens, part = {}, None
    for caption, stem in rows:
        if stem and part:
            opens[stem] = part
        part = caption or None
    text = "```{toctree}\n:maxdepth: 1\n\n"
    for page in PAGES:
        if caption := opens.get(page.stem):
            text += f"```\n\n```{{toctree}}\n:maxdepth: 1\n:caption: {caption}\n\n"
        first = json.loads(page.read_text("utf-8"))["cells"][0]
        title = "".join(first["source"]).splitlines()[0].removeprefix("# ")
        text += f"{page.stem[:2]} {title} <{page.stem}>\n"
    return text + "cheat_sheet\n```\n"


def linked(text: str) -> str:
    """Markdown with a name for each numbered equation, and links to it in the prose."""
    parts = re.split(r"(\$\$.*?\$\$|```.*?```|`[^`\n]*`)", text, flags=re.S)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            part = re.sub(r"Eq\.\s\(?([123])\b\)?", r"[Eq. \1](#eq-\1)", part)
            parts[i] = re.sub(
                r"^\| \(([123])\) \|", r"| [(\1)](#eq-\1) |", part, flags=re.M
            )
        elif number := re.search(r"\\tag\{(\d)\}", part):
            parts[i] = f"(eq-{number[1]})=\n{part}"
    return "".join(parts)


def cheat_sheet() -> str:
    """The section of that name, without the code that draws its tree."""
    cells = json.loads(PAGES[0].read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    start = next(i for i, text in enumerate(texts) if "## Cheat sheet\n" in text)
    texts[start] = texts[start].partition("## Cheat sheet\n")[2]
    shown = []
    for cell, text in zip(cells[start:], texts[start:], strict=True):
        text, end, _ = text.partition("## How to run it")
        if cell["cell_type"] == "markdown":
            shown.append(linked(text))
        elif cell["outputs"]:
            data = cell["outputs"][0]["data"]
            shown.append("".join(data["text/markdown"]))
        else:
            shown.append(f"```python\n{text}\n```")
        if end:
            break
    return SHEET % "\n\n".join(shown)


def write(path: Path, text: str) -> None:
    """Write a page, unless it is there already: Sphinx reads again what is new."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def gather(app: Sphinx, config) -> None:
    """Put the pages and the chart library into Sphinx's source folder."""
    here = Path(app.srcdir)
    if here.is_relative_to(ROOT) and not here.is_relative_to(ROOT / "build"):
        raise ValueError(f"{here} would be filled with copies: use `make book`")
    for old in here.glob("*.ipynb"):
        if old.name not in {page.name for page in PAGES}:
            old.unlink()
    for page in PAGES:
        shutil.copy2(page, here)
    index = (ROOT / "book" / "index.md").read_text("utf-8") + "\n" + toctrees()
    write(here / "index.md", index)
    write(here / "cheat_sheet.md", cheat_sheet())
    library = here / "library" / f"vega-{vl_convert.__version__}.js"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        code = vl_convert.javascript_bundle(vl_version="5.20")
        library.write_text(f"(() => {{\n{code}\n}})();\n", "utf-8")  # it declares `_`
    config.html_static_path.append(str(library.parent))
    app.add_js_file(library.name)
    app.add_js_file("charts.js")


def page_of(app: Sphinx, name: str, content: list[str]) -> None:
    """Show a notebook to a reader: no `#|` lines, live charts, equations that link.

    The cell for Colab is left out, and its badge, which would be fetched, is a link;
    the imports at the top are folded.
    """
    if not name[0].isdigit():
        return
    notebook, cells, opening = json.loads(content[0]), [], True
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            if "import google.colab" in source:
                continue
            cell["source"] = re.sub(r"^#\|.*\n?", "", source, flags=re.M).lstrip("\n")
            if re.search(r"^#\| export", source, re.M):
                cell["metadata"]["tags"] = ["exported"]
            opening = opening and not SETUP.sub("", cell["source"])
            if opening:  # a page begins with words
                prompts = {"code_prompt_show": "What this page imports"}
                prompts["code_prompt_hide"] = "Hide what this page imports"
                cell["metadata"]["mystnb"] = prompts
            if "#| code-fold: true" in source or opening:  # one fold for a row of them
                if cells[-1]["metadata"].get("tags") == ["hide-input"]:
                    before = cells.pop()["source"]
                    cell["source"] = f"{before}\n\n{cell['source']}".strip()
                cell["metadata"]["tags"] = ["hide-input"]
            for output in cell["outputs"]:
                data = output.get("data", {})
                if spec := data.get(VEGA_LITE):
                    output["data"] = {"text/html": chart(spec, output)}
                elif text := data.get("text/markdown"):
                    data["text/markdown"] = linked("".join(text))
        else:
            source = re.sub(r"\[!\[(.+?)\]\(.+?\)\]", r"[\1]", "".join(cell["source"]))
            cell["source"] = linked(source)
        if "".join(cell["source"]):
            cells.append(cell)
    notebook["cells"] = cells
    content[0] = json.dumps(notebook)


def titles(view: dict) -> list[str]:
    """What a chart and the charts within it are called."""
    title = view.get("title", "")
    title = title.get("text", "") if isinstance(title, dict) else title
    found = [title if isinstance(title, str) else " ".join(title)]
    for kind in ("layer", "concat", "hconcat", "vconcat"):
        found += [name for part in view.get(kind, []) for name in titles(part)]
    return [name for name in found if name]


def chart(spec: dict, output: dict) -> str:
    """A chart as its picture and its specification, which charts.js brings to life."""
    data = output["data"]
    words = html.escape("; ".join(titles(spec)) or "A chart")
    png = "".join(data["image/png"]).replace("\n", "")
    width = output["metadata"].get("image/png", {}).get("width", "")
    code = json.dumps(spec, separators=(",", ":")).replace("</", r"<\/")
    return (
        f'<div class="live-chart"><img src="data:image/png;base64,{png}" alt="{words}" '
        f'width="{width}"><script type="application/json">{code}</script></div>'
    )


def setup(app: Sphinx) -> None:
    app.connect("config-inited", gather)
    app.connect("source-read", page_of)
