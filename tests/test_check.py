"""`make check` catches each fault that it is there for, and changes nothing."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import check
import pytest
from test_notebooks import FORKS

ROOT = Path(__file__).parents[1]
MASKS = "notebooks/03_masks.ipynb"  # the notebook that most faults are planted in
EXERCISE = "exercises/1_attention.ipynb"
RUN_NBDEV = check.run_nbdev
LAST = next((ROOT / "notebooks").glob("*_beyond_the_notebook.ipynb")).name


@pytest.fixture
def tree(tmp_path):
    """A copy of what `check` looks at."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder, ignored in [("notebooks", "runs"), (check.PACKAGE, "__pycache__")]:
        ignore = shutil.ignore_patterns(ignored, ".ipynb_checkpoints")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    return tmp_path


def export_and_clean(folder: Path) -> None:
    """Do what `check.run_nbdev` does, in a process that has nbdev already."""
    from nbdev.clean import nbdev_clean
    from nbdev.doclinks import nbdev_export

    os.chdir(folder)
    with open(os.devnull, "w") as sys.stderr:
        nbdev_export()
        nbdev_clean()


def run_nbdev_in_a_fork(folder: Path) -> str | None:
    """Be quicker than `check.run_nbdev`; leave it to that to say what went wrong."""
    child = FORKS.Process(target=export_and_clean, args=(folder,))
    child.start()
    child.join()
    return RUN_NBDEV(folder) if child.exitcode else None


@pytest.fixture
def part(tree, monkeypatch):
    """The notebooks that faults are planted in or refer to: a few, to be quick."""
    monkeypatch.setattr(check, "run_nbdev", run_nbdev_in_a_fork)
    kept = ("multi_head", "masks", "model", "batches", "charts", LAST[3:-6])
    for path in (tree / "notebooks").glob("[0-9]*.ipynb"):
        if path.stem[3:] not in kept:
            path.unlink()
    for folder in ("solutions", "exercises"):
        for path in (tree / "notebooks" / folder).glob("[2-9]*.ipynb"):
            path.unlink()
    return tree


def edit(path: Path, change: Callable[[list[dict]], None]) -> None:
    """Change a notebook's cells and write it as a clean notebook is written."""
    notebook = json.loads(path.read_text("utf-8"))
    change(notebook["cells"])
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", "utf-8")


def add(root: Path, notebook: str, source: str, **extra) -> None:
    """Put one more code cell at the end of a notebook."""
    cell = {"cell_type": "code", "execution_count": None, "id": "feed0001"}
    cell |= {"metadata": {}, "outputs": [], "source": source.splitlines(True)} | extra
    edit(root / "notebooks" / notebook, lambda cells: cells.append(cell))


def rename(root: Path, old: str, new: str) -> None:
    (root / "notebooks" / old).rename(root / "notebooks" / new)


def append(root: Path, file: str, text: str) -> None:
    with open(root / file, "a", encoding="utf-8") as stream:
        stream.write(text)


def rename_with_its_module(root: Path) -> None:
    rename(root, "03_masks.ipynb", "03_shields.ipynb")
    file = root / "notebooks/03_shields.ipynb"
    file.write_text(file.read_text("utf-8").replace("_exp masks", "_exp shields"))


def look_up(module: str, where: str = "top") -> Callable[[Path], None]:
    """Make 03_masks import a module of the package."""
    line = f"from annotated_transformer.{module} import x"
    if where == "function":
        line = f"def peek():\n    {line}"
    return lambda root: add(root, "03_masks.ipynb", f"#| export\n{line}")


FAULTS = {
    "a hand edit": (
        lambda root: append(root, "annotated_transformer/masks.py", "# mine\n"),
        f"annotated_transformer/masks.py: is not what {MASKS} exports",
    ),
    "a hand edit of __init__": (
        lambda root: append(root, "annotated_transformer/__init__.py", "import os\n"),
        "annotated_transformer/__init__.py: is not what the series exports",
    ),
    "a notebook not exported": (
        lambda root: add(root, "03_masks.ipynb", "#| export\nclass New:\n    pass"),
        f"annotated_transformer/masks.py: is not what {MASKS} exports",
    ),
    "a missing module": (
        lambda root: (root / "annotated_transformer/masks.py").unlink(),
        "annotated_transformer/masks.py: is missing",
    ),
    "a stray module": (
        lambda root: append(root, "annotated_transformer/utils.py", "x = 1\n"),
        "annotated_transformer/utils.py: no notebook exports it",
    ),
    "a stray file": (
        lambda root: append(root, "annotated_transformer/words.json", "{}"),
        "annotated_transformer/words.json: no notebook exports it",
    ),
    "a renamed notebook's old module": (
        rename_with_its_module,
        "annotated_transformer/masks.py: no notebook exports it",
    ),
    "a module of a notebook in a subfolder": (
        lambda root: add(root, "solutions/1_attention.ipynb", "#| export\nx = 1"),
        "notebooks/solutions/1_attention.ipynb: exports from a subfolder",
    ),
    "a second module in a notebook": (
        lambda root: add(root, "03_masks.ipynb", "#| export extra\ny = 1"),
        f"{MASKS}: a cell exports to extra",
    ),
    "a name that is not the module's": (
        lambda root: rename(root, "03_masks.ipynb", "03_masking.ipynb"),
        "notebooks/03_masking.ipynb: exports to masks, not to masking",
    ),
    "an execution count": (
        lambda root: add(root, "03_masks.ipynb", "1 + 1", execution_count=7),
        f"{MASKS}: has execution counts",
    ),
    "a cell without an id": (
        lambda root: edit(root / MASKS, lambda cells: cells[-1].pop("id")),
        f"{MASKS}: a cell has no id",
    ),
    "an unclean cell": (
        lambda root: add(root, "03_masks.ipynb", "1", metadata={"scrolled": True}),
        f"{MASKS}: is not clean",
    ),
    "an exported cell that is no Python": (
        lambda root: add(root, "03_masks.ipynb", "#| export\ndef f(:"),
        f"{MASKS}: 'def f(:' is no Python",
    ),
    "half a notebook": (
        lambda root: (root / MASKS).write_text('{"cells": ['),
        f"{MASKS}: is not a notebook that can be read",
    ),
    "a hand edit of an exercise": (
        lambda root: edit(root / "notebooks" / EXERCISE, lambda cells: cells.pop()),
        f"notebooks/{EXERCISE}: is not what its solution gives",
    ),
    "a solution whose exercise is not made anew": (
        lambda root: add(root, "solutions/1_attention.ipynb", "1 + 1"),
        f"notebooks/{EXERCISE}: is not what its solution gives",
    ),
    "a solution without an exercise": (
        lambda root: (root / "notebooks" / EXERCISE).unlink(),
        f"notebooks/{EXERCISE}: is missing",
    ),
    "an exercise without a solution": (
        lambda root: rename(root, EXERCISE, "exercises/6_attention.ipynb"),
        "notebooks/exercises/6_attention.ipynb: there is no solution",
    ),
    "a mark that stands alone": (
        lambda root: add(
            root, "solutions/1_attention.ipynb", "### BEGIN SOLUTION Write x.\nx = 1"
        ),
        "notebooks/solutions/: ValueError: 1_attention.ipynb: a mark stands alone",
    ),
    "a letter suffix": (
        lambda root: rename(root, "03_masks.ipynb", "03a_masks.ipynb"),
        "notebooks/03a_masks.ipynb: the name must be two digits",
    ),
    "a number used twice": (
        lambda root: rename(root, "03_masks.ipynb", "02_masks.ipynb"),
        "notebooks/02_multi_head.ipynb: 02_masks has the same number",
    ),
    "an upward import": (
        look_up("model"),
        "annotated_transformer/masks.py: is of notebook 03 and imports model of",
    ),
    "an upward import inside a function": (
        look_up("model", "function"),
        "annotated_transformer/masks.py: is of notebook 03 and imports model of",
    ),
    "an upward import of the plain kind": (
        lambda root: add(
            root, "03_masks.ipynb", "#| export\nimport annotated_transformer.model as m"
        ),
        "annotated_transformer/masks.py: is of notebook 03 and imports model of",
    ),
    "an import of the package as a whole": (
        lambda root: add(
            root, "03_masks.ipynb", "#| export\nimport annotated_transformer"
        ),
        "annotated_transformer/masks.py: imports annotated_transformer, which no",
    ),
    "an import of itself": (
        look_up("masks"),
        "annotated_transformer/masks.py: is of notebook 03 and imports masks of",
    ),
    "a circle": (
        look_up("batches"),
        "annotated_transformer/: ",
    ),
    "charts in the model": (
        look_up("charts", "function"),
        "annotated_transformer/masks.py: is of notebook 03 and imports charts",
    ),
    "charts in the last module before them": (
        lambda root: add(
            root,
            LAST,
            "#| export\nfrom annotated_transformer import charts",
        ),
        f"annotated_transformer/interchange.py: is of notebook {LAST[:2]} "
        "and imports charts of",
    ),
    "an optional package at the top": (
        lambda root: add(root, "03_masks.ipynb", "#| export\nimport altair as alt"),
        "annotated_transformer/masks.py: imports altair at the top",
    ),
    "an optional package in a try at the top": (
        lambda root: add(
            root,
            "03_masks.ipynb",
            "#| export\ntry:\n    import spacy\nexcept ImportError:\n    spacy = None",
        ),
        "annotated_transformer/masks.py: imports spacy at the top",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught(part, fault):
    plant, sentence = FAULTS[fault]
    plant(part)
    found = list(check.faults(part))
    assert any(line.startswith(sentence) for line in found), "\n".join(found)


def test_a_gap_is_caught(tree):
    (tree / MASKS).unlink()
    assert "notebooks/: no notebook has the number 03; renumber" in "".join(
        check.faults(tree)
    )


def test_without_a_fault_none_of_their_sentences_comes(part):
    found = list(check.faults(part))
    assert not [s for _, s in FAULTS.values() if any(f.startswith(s) for f in found)]


def test_the_tree_is_in_step_and_stays_as_it_is(tree):
    def contents():
        return {p: p.read_bytes() for p in tree.rglob("*") if p.is_file()}

    before = contents()
    assert list(check.faults(tree)) == []
    assert contents() == before
