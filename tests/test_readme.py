"""What the front page promises is there: links, targets, notebooks and modules."""

import base64
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
MODULES = sorted((ROOT / "annotated_transformer").glob("[a-z]*.py"))


@pytest.mark.parametrize("page", ["README.md", "data/README.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    folder = (ROOT / page).parent
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_command_is_a_target():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):.*## ", makefile, re.M))
    named = set(re.findall(r"^(?:\| `)?make ([a-z]+)", README, re.M))
    assert named == targets - {"help"}


def test_the_map_shows_every_notebook_and_every_module():
    rows = re.findall(r"\(notebooks/(\S+)\.ipynb\).*\|(.*)\|", README)
    assert [row[0] for row in rows] == [path.stem for path in NOTEBOOKS]
    shown = {name for _, cell in rows for name in re.findall("`([a-z_]+)`", cell)}
    assert shown == {path.stem for path in MODULES}


def sections(text: str) -> list[str]:
    """The numbers of the paper's sections in a text."""
    text = re.sub(r"Table \d", "", text)
    return re.findall(r"\d(?:\.\d)*", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_map_names_the_sections_that_the_notebook_names(path):
    (row,) = re.findall(rf"^\|(.*)\|.*notebooks/{path.stem}\.ipynb", README, re.M)
    title = "".join(json.loads(path.read_text("utf-8"))["cells"][0]["source"])
    named = re.search(r"> Sections? ([\d., and]*)", title)
    if path.stem != "00_start_here":
        assert sections(row) == (sections(named[1]) if named else [])


def test_the_picture_is_the_one_in_the_notebook():
    """`make outputs` may draw it anew; then it is saved here once more."""
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    notebook = ROOT / "notebooks" / "26_attention_maps.ipynb"
    outputs = (
        output.get("data", {}).get("image/png")
        for cell in json.loads(notebook.read_text("utf-8"))["cells"]
        for output in cell.get("outputs", ())
    )
    shown = [base64.b64decode("".join(png)) for png in outputs if png]
    assert (ROOT / picture).read_bytes() in shown
