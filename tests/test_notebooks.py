"""Each notebook runs on its own, with no network, and keeps to the series' manners."""

import ast
import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
SHORT = {"start_here", "renderer", "charts"}  # the front page and the appendix
GUARD = ROOT / "tests" / "offline"
OFFLINE = os.environ | {"PYTHONPATH": str(GUARD), "HF_HUB_OFFLINE": "1"}
# The processes of `make run`, that start with the large libraries read.
EXECUTE = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))
FORKS = EXECUTE["FORKS"]
FORKS.set_forkserver_preload([*EXECUTE["LIBRARIES"], "pytest"])


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """A copy of the notebooks, so that running them leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("series")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "notebooks").mkdir()
    for path in NOTEBOOKS:
        shutil.copy(path, folder / "notebooks")
    return folder / "notebooks"


def execute(path: Path, log: Path) -> None:
    """Run a notebook in this process, with no network, and write down what is said."""
    from nbdev.test import nbdev_test

    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(path.parent)
    runpy.run_path(str(GUARD / "sitecustomize.py"))
    nbdev_test(path.name)


def on_one_thread(work, *args) -> None:
    """Do work in a process of its own as the tests do theirs: to the same last bit."""
    import torch

    torch.set_num_threads(1)
    work(*args)


def run_apart(path: Path, log: Path) -> None:
    """Run a notebook in a process of its own, and demand that it ends well."""
    child = FORKS.Process(target=execute, args=(path, log))
    child.start()
    child.join()
    said = log.read_text("utf-8")
    assert child.exitcode == 0, said[-8000:]
    assert "Success." in said  # a name that matches nothing ends well, too


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_top_to_bottom(series, path, tmp_path):
    run_apart(series / path.name, tmp_path / "log")


def test_runs_in_a_kernel(series):
    """One notebook here; `make kernels` takes all of them, which is slower."""
    command = [Path(sys.executable).with_name("jupyter-execute"), "19_words.ipynb"]
    done = subprocess.run(
        command, cwd=series, env=OFFLINE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def notebook(path: Path, *cells: str) -> None:
    """Write a small notebook with these cells of code."""
    code = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=code), path)


BARE = """
import sys
sys.path.insert(0, sys.argv[1])
import execute
execute.FORKS.set_forkserver_preload([])
execute.main(sys.argv[2:])
"""


def start(folder: Path) -> subprocess.Popen:
    """Start `execute.py` on a folder, with no libraries read beforehand."""
    command = [sys.executable, "-c", BARE, ROOT / "notebooks", folder]
    said = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **said)


def test_executing_keeps_what_is_shown_and_stops_at_an_error(tmp_path):
    """What `make run` and `make outputs` do, the slow cells included."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    notebook(folder / "00_good.ipynb", "#| slow\nchosen = 17", "chosen + 4")
    notebook(folder / "01_bad.ipynb", "1 + 1", "[].pop()")
    for number in range(2, 9):  # the two that come next may have begun
        notebook(folder / f"0{number}_next.ipynb", "30 + 3")
    done = start(folder)
    shown, said = done.communicate()
    assert done.returncode == 1
    assert "pop from empty list" in said and "[].pop()" in said
    end = f"{folder / '01_bad.ipynb'} stopped at the error above, and the run stops"
    assert said.rstrip().endswith(f"{end} with it.")
    assert "'21'" in (folder / "00_good.ipynb").read_text().replace('"', "'")
    assert "'33'" not in (folder / "08_next.ipynb").read_text().replace('"', "'")
    assert "Success" not in shown and "Executing" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_executing_stops_when_asked_to(tmp_path, number):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for n in range(4):
        code = f"open(r'{tmp_path / str(n)}', 'w').close(); import time; time.sleep(99)"
        notebook(tmp_path / f"0{n}_sleeps.ipynb", code)
    running = start(tmp_path)
    while running.poll() is None and not (tmp_path / "1").exists():
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(running.pid, number)  # as a terminal does
    else:
        running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1 and "stopped" in said.splitlines()[-1]
    assert not (tmp_path / "2").exists()


def test_executing_says_when_a_notebook_was_killed_or_there_is_none(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    _, said = start(tmp_path).communicate()
    assert said == f"there is no notebook in {tmp_path}\n"
    notebook(tmp_path / "00_killed.ipynb", "import os; os.kill(os.getpid(), 9)")
    _, said = start(tmp_path).communicate()
    assert said.rstrip().endswith("was killed (signal 9): is there enough memory?")


def test_the_network_is_shut_off():
    code = "import urllib.request as r; r.urlopen('http://example.invalid')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=OFFLINE, capture_output=True, text=True
    )
    assert "without a network, and this asks for example.invalid" in done.stderr


def words(text: str) -> int:
    """Count the words of a Markdown text; equations and tags are none."""
    return len(re.sub(r"\$\$.*?\$\$|<[^>]+>", "", text, flags=re.S).split())


def code_lines(source: str) -> list[str]:
    """Give a cell's lines of code: no blanks, comments, docstrings; one a signature.

    The cell for Colab has none: it is the same in all notebooks, and read once.
    """
    if "import google.colab" in source:
        return []
    lines = dict(enumerate(source.splitlines(), start=1))
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(source)):
            body = getattr(node, "body", None)
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                for number in range(body[0].lineno, body[0].end_lineno + 1):
                    lines.pop(number, None)
            if isinstance(node, ast.FunctionDef):  # ruff gives each argument a line
                for number in range(node.lineno + 1, body[0].lineno):
                    lines.pop(number, None)
    code = (line.strip() for line in lines.values())
    return [line for line in code if line and not line.startswith("#")]


def output_complaints(output: dict) -> list[str]:
    """Say what one output holds that differs from run to run or shows nowhere."""
    data = output.get("data", {})
    shown = {kind: part for kind, part in data.items() if not kind.startswith("image/")}
    text = json.dumps([output.get("text"), shown], ensure_ascii=False)
    text = re.sub(r'"\$schema": "[^"]*"', "", text)
    found = []
    if leak := re.search(r"/(tmp|home|root|work|Users)/|https?:|0x[0-9a-f]{6,}", text):
        found.append(f"an output holds {leak[0]!r}, a path or an address")
    if "\\r" in text or "%|" in text:
        found.append("an output holds a progress bar")
    if output.get("name") == "stderr" or output["output_type"] == "error":
        found.append("an output is a warning or an error")
    if "text/html" in data and any("vega" in kind for kind in data):
        found.append("a chart comes with text/html, which GitHub would blank")
    return found


def complaints(stem: str, notebook: dict, size: int = 0) -> list[str]:
    """Say where a notebook leaves the limits that keep the series readable."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    code = [source for kind, source in cells if kind == "code"]
    prose = "\n\n".join(source for kind, source in cells if kind == "markdown")
    found = []

    def demand(met: bool, message: str) -> None:
        if not met:
            found.append(message)

    demand(len(cells) <= 50, f"{len(cells)} cells, at most 50")
    demand(len(cells) >= 25 or stem[3:] in SHORT, f"{len(cells)} cells, at least 25")
    lines = sum(len(code_lines(source)) for source in code)
    demand(lines <= 200, f"{lines} lines of code, at most 200")
    demand(words(prose) <= 1200, f"{words(prose)} words, at most 1,200")
    demand(size <= 300_000, f"{size // 1000} kB, at most 300")
    for source in code:
        lines = code_lines(source)
        demand(
            len(lines) <= 30, f"{len(lines)} lines in one cell, at most 30: {lines[:1]}"
        )
    demand(all(source.strip() for _, source in cells), "an empty cell")
    demand(not re.search(r"\bTODO\b", str(cells)), "a TODO")

    title = r"# [^\n]+\n\n?> [^\n]+"
    demand(
        bool(cells)
        and cells[0][0] == "markdown"
        and bool(re.match(title, cells[0][1])),
        "the first cell is not '# Title' and '> subtitle'",
    )
    for link in re.findall(r"\]\(([^)#:]+\.ipynb)", prose):
        demand((ROOT / "notebooks" / link).exists(), f"a link to nowhere: {link}")
    if stem[3:] not in SHORT:
        for heading in ("## What to remember", "## Check yourself"):
            demand(heading in prose, f"no {heading!r}")
        demand("<details>" in prose, "no answer folded in <details>")
    following = [path.name for path in NOTEBOOKS if path.stem > stem][:1]
    for name in following:
        demand(f"]({name})" in prose, f"no link to the next notebook, {name}")

    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    return found + [fault for output in outputs for fault in output_complaints(output)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_keeps_to_the_limits(path):
    notebook = json.loads(path.read_text("utf-8"))
    assert complaints(path.stem, notebook, path.stat().st_size) == []


def markdown(source: str) -> dict:
    return {"cell_type": "markdown", "source": source}


def code(source: str, **output) -> dict:
    return {
        "cell_type": "code",
        "source": source,
        "outputs": [output] if output else [],
    }


def stream(text: str, name: str = "stdout") -> dict:
    return code("x", output_type="stream", name=name, text=text)


def chart(**data: str) -> dict:
    return code("x", output_type="display_data", data=data)


GOOD = [
    markdown("# Title\n\n> Subtitle"),
    *[code("x", output_type="stream", name="stdout", text="1.0")] * 22,
    markdown("## What to remember\n\n## Check yourself\n\n<details>Because.</details>"),
    markdown("Done."),
]
BAD = {
    "51 cells, at most 50": GOOD + [code("x")] * 26,
    "24 cells, at least 25": GOOD[:-1],
    "222 lines of code, at most 200": GOOD + [code("x\n" * 20)] * 10,
    "1206 words, at most 1,200": GOOD + [markdown("word " * 1193)],
    "31 lines in one cell, at most 30: ['class A:']": GOOD
    + [code("class A:\n" + "x\n" * 30)],
    "an empty cell": GOOD + [code(" ")],
    "a TODO": GOOD + [markdown("TODO: say more")],
    "the first cell is not '# Title' and '> subtitle'": [markdown("[badge]"), *GOOD],
    "a link to nowhere: 77_seven.ipynb": GOOD + [markdown("[on](77_seven.ipynb)")],
    "no '## What to remember'": [
        *GOOD[:-2],
        markdown("## Check yourself <details>"),
        code("x"),
    ],
    "an output holds '/tmp/', a path or an address": GOOD + [stream("/tmp/x.json")],
    "an output holds 'https:', a path or an address": GOOD + [stream("https://a.b")],
    "an output holds '0x7f8e9a', a path or an address": GOOD + [stream("at 0x7f8e9a")],
    "an output holds a progress bar": GOOD + [stream("50%|#####     |")],
    "an output is a warning or an error": GOOD + [stream("UserWarning", "stderr")],
    "a chart comes with text/html, which GitHub would blank": GOOD
    + [chart(**{"application/vnd.vegalite.v5+json": "{}", "text/html": "<div>"})],
}


@pytest.mark.parametrize("complaint", BAD)
def test_each_limit_can_be_missed(complaint):
    assert complaints("99_last", {"cells": GOOD}) == []
    assert complaints("99_last", {"cells": BAD[complaint]}) == [complaint]
