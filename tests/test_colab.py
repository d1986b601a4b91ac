"""The notebooks in Colab: tried in an empty venv with stand-ins, without a network."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import check
import pytest
import test_notebooks
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("here", ROOT / "notebooks" / "colab.py")
colab = importlib.util.module_from_spec(spec)
spec.loader.exec_module(colab)
TORCH = """
class Tensor: pass
class cuda:
    is_available = staticmethod(lambda: {gpu})
"""
ALTAIR = """
class theme:
    register = staticmethod(lambda name, enable: lambda look: look)
class renderers:
    active = "default"
    def enable(name):
        renderers.active = name
"""
AFTER = """
import altair, importlib.metadata as m, os, pathlib, torch
import annotated_transformer.charts
here = pathlib.Path(annotated_transformer.__path__[0])
print(here.relative_to(pathlib.Path.cwd()), altair.renderers.active)
print(m.version("torch"), m.version("spacy"), m.version("torchtext"))
print(os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(here.parent))
"""


def cell(root: Path) -> str:
    """Give the source of the first cell, which is the same in all notebooks."""
    paths = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    notebooks = [json.loads(path.read_text("utf-8"))["cells"] for path in paths]
    (source,) = {"".join(cells[1]["source"]) for cells in notebooks}
    assert {cells[1]["cell_type"] for cells in notebooks} == {"code"}
    return source


@pytest.fixture
def tree(tmp_path):
    """A copy of what `make colab` writes to, and of what is fetched."""
    root = tmp_path / "tree"
    ignored = shutil.ignore_patterns("runs", "*_checkpoints", "__pycache__")
    for folder in ("notebooks", "annotated_transformer"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, root)
    return root


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def make_colab(root: Path, repo: str = "") -> None:
    """Do what `make colab REPO=…` does first; the rest is an export."""
    if repo:
        colab.write_address(root, repo)
    colab.write_all(root)


# ---- here


def test_every_notebook_begins_with_the_cell_that_pyproject_asks_for(tree):
    before = contents(tree)
    command = [sys.executable, tree / "notebooks" / "colab.py", ""]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert contents(tree) == before
    assert cell(tree) == "".join(colab.first_cell(colab.address_of(ROOT))["source"])


def test_an_address_can_be_given_changed_and_taken_back(tree):
    before = contents(tree)
    for repo in ("owner/name", "https://github.com/other/na.me", "git@host:some/where"):
        make_colab(tree, repo)
        once = contents(tree)
        make_colab(tree, repo)
        make_colab(tree)
        assert contents(tree) == once != before
        assert colab.address_of(tree).endswith(repo) and repo in cell(tree)
    path = tree / "pyproject.toml"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(x for x in lines if not x.startswith("Repository")))
    make_colab(tree)
    if not colab.address_of(ROOT):
        assert contents(tree) == before


def test_with_an_address_all_stays_in_order(tree):
    paths = sorted((tree / "notebooks").glob("[0-9]*.ipynb"))
    for path in paths[6:]:  # a few are as good as all, and quicker
        path.unlink()
    shutil.rmtree(tree / "annotated_transformer")
    make_colab(tree, "owner/name")
    assert check.run_nbdev(tree) is None  # it notes the address, too
    found = [fault for fault in check.faults(tree) if "exercises" not in fault]
    assert found == []
    tool = Path(sys.executable).with_name("ruff")
    for command in (["check"], ["format", "--check"]):
        subprocess.run([tool, *command, *paths[:6]], cwd=tree, check=True)
    for path in paths[:6]:
        notebook = json.loads(path.read_text("utf-8"))
        assert test_notebooks.complaints(path.stem, notebook) == []
        page = "".join(notebook["cells"][0]["source"])
        link = f"{colab.COLAB}github/owner/name/blob/main/notebooks/{path.name}"
        assert page.count(f"]({link})") == page.count("[![Open in Colab]") == 1
    page = (tree / "README.md").read_text("utf-8")
    assert page.count("/owner/name/blob/main/notebooks/00_start_here.ipynb") == 1


def test_outputs_survive(tree):
    def outputs():
        paths = sorted((tree / "notebooks").glob("[0-9]*.ipynb"))
        return [
            cell.get("outputs")
            for path in paths
            for cell in json.loads(path.read_text("utf-8"))["cells"]
            if cell.get("outputs")
        ]

    before = outputs()
    make_colab(tree, "owner/name")
    assert outputs() == before != []


@pytest.mark.parametrize("repo", ["name", "a b/c", "../up", "x'; rm -rf /'", "a/b/c"])
def test_what_is_no_address_is_refused(tree, repo):
    before = contents(tree)
    with pytest.raises(ValueError, match="neither owner/name nor an address"):
        make_colab(tree, repo)
    assert contents(tree) == before


# ---- in Colab


def wheel(folder: Path, name: str, version: str, code: str = "", needs=()) -> None:
    """Write a package that holds next to nothing."""
    stem = name.replace("-", "_")
    about = f"{stem}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    text += "".join(f"Requires-Dist: {need}\n" for need in needs)
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{stem}.py", code)
        file.writestr(f"{about}/METADATA", text)
        file.writestr(f"{about}/WHEEL", kind)
        file.writestr(f"{about}/RECORD", "")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A venv as Colab is: its own torch, `google.colab`, pip, and no more."""
    home, folder = tmp_path_factory.mktemp("colab"), tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "venv", "--without-pip", home]  # it is quicker
    subprocess.run(command, check=True)
    (site,) = home.glob("lib/python*/site-packages")
    shutil.copytree(Path(find_spec("pip").origin).parent, site / "pip")
    (site / "google" / "colab").mkdir(parents=True)
    (site / "google" / "colab" / "__init__.py").touch()
    wheel(folder, "torch", "2.8.0+cu126", TORCH.format(gpu=False))
    with zipfile.ZipFile(*folder.glob("*")) as file:
        file.extractall(site)
    wheel(folder, "torch", "99.0", "raise SystemExit('another torch')")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, needs in project["optional-dependencies"].items():
        for need in map(Requirement, needs if extra != "all" else []):
            version = next(v for v in ("99.0", "3.99", "0.6.0") if v in need.specifier)
            code = ALTAIR if need.name == "altair" else ""
            wheel(folder, need.name, version, code, ["torch>=2.6"])
    return home / "bin" / "python", site, folder


def open_notebook(machine, source: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a first cell, and what is behind it, as Colab would."""
    python, _, wheels = machine
    pip = dict(
        PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels), PIP_CONFIG_FILE="/dev/null"
    )
    quiet = dict(PIP_DISABLE_PIP_VERSION_CHECK="1", HOME=str(folder))
    where = dict(cwd=folder, env=dict(PATH=os.environ["PATH"], **pip, **quiet))
    command = [python, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, **where)


def commit(tree: Path) -> None:
    """Make a repository of a folder."""
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)


def test_outside_colab_nothing_happens(tree, tmp_path):
    for address in ("", "https://github.com/owner/name"):
        source = "".join(colab.first_cell(address)["source"])
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_without_an_address_a_sentence_says_so(machine, tmp_path):
    done = open_notebook(machine, "".join(colab.first_cell("")["source"]), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1 and "without its package" in done.stdout


def test_the_first_cell_makes_everything_ready(machine, tree, tmp_path):
    make_colab(tree, str(tree))
    commit(tree)
    content = tmp_path / "content"
    content.mkdir()
    source = cell(tree)
    for gpu, words in (
        (False, "No GPU is attached"),
        (True, ""),
    ):  # the second finds all
        (machine[1] / "torch.py").write_text(TORCH.format(gpu=gpu))
        done = open_notebook(machine, source + AFTER, content)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        assert said[-3:] == [
            "series/annotated_transformer html",
            "2.8.0+cu126 3.99 0.6.0",
            "True",
        ]
        assert done.stdout.startswith(words) and len(said) == (3 if gpu else 4)


@pytest.mark.parametrize(
    "need, said", [("gone>=1", "gone>=1"), ("wilful", "Resolution")]
)
def test_what_cannot_be_installed_is_said(machine, tree, tmp_path, need, said):
    wheel(machine[2], "wilful", "1.0", needs=["torch>=98"])
    extra = f'[project]\n[project.optional-dependencies]\na = ["{need}"]\n'
    (tree / "pyproject.toml").write_text(extra)
    commit(tree)
    source = "".join(colab.first_cell(str(tree))["source"])
    done = open_notebook(machine, source, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("OSError") and said in last
    assert "99" not in (machine[1] / "torch.py").read_text()  # nor was torch replaced
    assert not list(machine[1].glob("torch-99*"))


def test_an_address_with_nothing_behind_it_is_named(machine, tmp_path):
    address = str(tmp_path / "nowhere")
    done = open_notebook(
        machine, "".join(colab.first_cell(address)["source"]), tmp_path
    )
    assert done.returncode == 1 and address in done.stderr.strip().splitlines()[-1]
