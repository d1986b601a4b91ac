"""Colab: what the notebooks do there, and where they fetch the rest of the series from.

    make colab REPO=owner/name    write the repository's address, for now and for all
    make colab                    the same, as [project.urls] in pyproject.toml says

Colab opens a notebook without the package that it explains. So the first cell of each
fetches the repository and runs this file, which makes everything ready: what is missing
is installed, torch stays as it is, and charts are drawn as Colab can show them.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GITHUB = "https://github.com/"
COLAB = "https://colab.research.google.com/"
BADGE = "\n\n[![Open in Colab]({0}assets/colab-badge.svg)]({0}github/{1}/{2})"

NOWHERE = """\
try:
    import google.colab  # noqa: F401
except ImportError:
    pass  # not in Colab: everything is here
else:
    print("This notebook was opened without its package, which has no address yet.")
"""
SOMEWHERE = """\
try:
    import google.colab  # noqa: F401
except ImportError:
    pass  # not in Colab: everything is here
else:
    import runpy
    import subprocess

    address = "{}"
    get = f"test -d series || git clone -q --depth 1 '{{address}}' series"
    subprocess.run(get, shell=True, check=True)
    runpy.run_path("series/notebooks/colab.py", run_name="colab")
"""


# --- in Colab -------------------------------------------------------------------------


def requirements(root: Path) -> list[str]:
    """List what the notebooks need, and torch exactly as it is."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    needed = [need for extra, needs in extras if extra != "all" for need in needs]
    return [f"torch=={version('torch')}", *needed]


def set_up(root: Path) -> None:
    """Install what is missing, put the series on the path, prepare charts.

    Raises: OSError, with pip's last word, if something cannot be installed.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", *requirements(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        raise OSError(f"pip could not install what the notebooks need: {reason}")
    importlib.invalidate_caches()
    sys.path.insert(0, str(root))
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)  # for processes started from here
    importlib.import_module("annotated_transformer.charts").enable()
    if not importlib.import_module("torch").cuda.is_available():
        print(
            "No GPU is attached. Everything runs, and training takes longer: "
            "Runtime > Change runtime type > GPU."
        )


# --- here -----------------------------------------------------------------------------


def address_of(root: Path) -> str:
    """Read the repository's address: "" if there is none yet."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "")


def write_address(root: Path, repo: str) -> None:
    """Put owner/name on GitHub, or a whole address, into pyproject.toml.

    Raises: ValueError if it is neither.
    """
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", repo):
        repo = GITHUB + repo
    elif not re.fullmatch(r"(\w+://|/|git@)[^\s'\"\\]+", repo):
        raise ValueError(f"REPO={repo} is neither owner/name nor an address")
    path = root / "pyproject.toml"
    section = re.compile(r'^(\[project\.urls\].*\n)(Repository = ".*"\n)?', re.M)
    text, line = path.read_text("utf-8"), f'Repository = "{repo}"\n'
    write(path, section.sub(lambda found: found[1] + line, text, count=1))


def badge(address: str, file: str) -> str:
    """Give the badge that opens a file of the repository in Colab, if that can."""
    if not address.startswith(GITHUB):
        return ""
    return BADGE.format(COLAB, address.removeprefix(GITHUB), f"blob/main/{file}")


def with_badge(text: str, below: str, badge: str) -> str:
    """Put a badge below the part of a page that `below` matches, in place of any."""
    text = re.sub(r"\n\n\[!\[Open in Colab\].*", "", text)
    return re.sub(below, lambda found: found[0] + badge, text, count=1)


def first_cell(address: str) -> dict:
    """Make the cell that every notebook begins with."""
    source = (SOMEWHERE.format(address) if address else NOWHERE).rstrip("\n")
    cell = {"cell_type": "code", "execution_count": None, "id": "colab"}
    return cell | {"metadata": {}, "outputs": [], "source": source.splitlines(True)}


def is_first_cell(cell: dict) -> bool:
    """Tell whether a cell is one that `first_cell` made, for any address."""
    return "".join(cell["source"]).startswith(NOWHERE[:40])


def prepare(notebook: dict, address: str, name: str) -> None:
    """Give a notebook its first cell and its badge, behind its title."""
    title, *rest = notebook["cells"]
    words = with_badge("".join(title["source"]), r"(?s).*", badge(address, name))
    title["source"] = words.splitlines(True)
    rest = [cell for cell in rest if not is_first_cell(cell)]
    notebook["cells"] = [title, first_cell(address), *rest]


def write(path: Path, text: str) -> None:
    """Write a file, unless it holds this text already."""
    if path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def write_all(root: Path) -> None:
    """Make the notebooks and the front page follow what pyproject.toml says."""
    address = address_of(root)
    for path in sorted((root / "notebooks").glob("[0-9]*.ipynb")):
        notebook = json.loads(path.read_text("utf-8"))
        prepare(notebook, address, f"notebooks/{path.name}")
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
        write(path, text + "\n")
    page, start = root / "README.md", "notebooks/00_start_here.ipynb"
    text = with_badge(page.read_text("utf-8"), r"^# .*", badge(address, start))
    write(page, text)


if __name__ == "colab":
    set_up(ROOT)
elif __name__ == "__main__":
    try:
        if repo := "".join(sys.argv[1:2]):
            write_address(ROOT, repo)
        write_all(ROOT)
    except ValueError as error:
        sys.exit(str(error))
