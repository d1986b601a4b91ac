"""Are the package and the notebooks in step? One sentence a fault; changes nothing.

Usage: python tests/check.py [folder]
"""

import ast
import graphlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "annotated_transformer"
OTHER_NAME = {"beyond_the_notebook": "interchange"}  # notebook -> module
UPWARD = {("attention_maps", "charts")}  # the one import that may look ahead
EAGER = sys.stdlib_module_names | {"torch", PACKAGE}  # may be imported at the top


def number_faults(stems: list[str]) -> Iterator[str]:
    """Find names that are not `NN_word`, numbers used twice, and gaps."""
    owner = {}
    for stem in stems:
        if not re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", stem):
            yield (
                f"notebooks/{stem}.ipynb: the name must be two digits, an underscore "
                "and words in lower case; rename it."
            )
        elif stem[:2] in owner:
            yield (
                f"notebooks/{stem}.ipynb: {owner[stem[:2]]} has the same number; "
                "renumber one of them."
            )
        else:
            owner[stem[:2]] = stem
    numbers = (f"{number:02}" for number in range(int(max(owner, default="0"))))
    if missing := [number for number in numbers if number not in owner]:
        yield (
            f"notebooks/: no notebook has the number {', '.join(missing)}; renumber "
            "so that the series has no gap."
        )


def cell_faults(name: str, notebook: dict) -> Iterator[str]:
    """Find in one notebook what would break its export or make it unstable."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        exports = re.search(r"^#\|\s*export\w*[ \t]*(\S*)", source, re.M)
        if cell["cell_type"] != "code" or not exports:
            continue
        if exports[1]:
            yield f"{name}: a cell exports to {exports[1]}; give that its own notebook."
        try:
            ast.parse(source)
        except SyntaxError as error:
            yield f"{name}: {(error.text or '').strip()!r} is no Python; mend it."
    if any("id" not in cell for cell in notebook["cells"]):
        yield f"{name}: a cell has no id; run `make export`, which gives it one."
    if any(
        part.get("execution_count") is not None
        for cell in notebook["cells"]
        for part in [cell, *cell.get("outputs", [])]
    ):
        yield f"{name}: has execution counts; run `make export`, which removes them."


def module_of(notebook: dict) -> str | None:
    """Give the module that a notebook exports to, or None."""
    for cell in notebook["cells"]:
        found = re.search(r"^#\|\s*default_exp\s+(\S+)", "".join(cell["source"]), re.M)
        if found:
            return found[1]
    return None


def run_nbdev(folder: Path) -> str | None:
    """Export and clean in `folder`, in one process; give the last word of a failure."""
    code = """from nbdev.clean import nbdev_clean
from nbdev.doclinks import nbdev_export
for tool in nbdev_export, nbdev_clean:
    print(tool.__name__.replace("_", "-"), flush=True)
    tool()"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    tool = (done.stdout.split() or ["nbdev"])[-1]
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{tool} fails on them: {said}"


def package_imports(tree: ast.AST) -> Iterator[str]:
    """Name each module of the package that a module imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{PACKAGE}.{node.module or ''}" if node.level else node.module
            base = base.strip(".")
            whole = base == PACKAGE
            paths = [f"{base}.{a.name}" for a in node.names] if whole else [base]
        else:
            continue
        for first, *rest in (path.split(".") for path in paths):
            if first == PACKAGE:
                yield rest[0] if rest else ""


def eager_imports(node: ast.AST) -> Iterator[str]:
    """Name each outside package that importing a module would import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and re.search(
            "__name__|TYPE_CHECKING", ast.unparse(child.test)
        ):
            continue  # not run on import
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield child.module.split(".")[0]
        yield from eager_imports(child)


def import_faults(sources: dict[str, str], number: dict[str, int]) -> Iterator[str]:
    """Find imports that look upward, run in a circle, or cost at import."""
    graph = {}
    for module, source in sources.items():
        name, here = f"{PACKAGE}/{module}.py", number[module]
        tree = ast.parse(source)
        graph[module] = sorted(set(package_imports(tree)))
        for other in graph[module]:
            if other not in number:
                yield f"{name}: imports {other or PACKAGE}, which no notebook exports."
            elif number[other] >= here and (module, other) not in UPWARD:
                yield (
                    f"{name}: is of notebook {here:02} and imports {other} of "
                    f"{number[other]:02}; import from lower numbers only."
                )
        for other in sorted(set(eager_imports(tree)) - EAGER):
            yield (
                f"{name}: imports {other} at the top; import it inside the function "
                "that uses it."
            )
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        yield f"{PACKAGE}/: {circle} is a circle of imports; break it."


def package_faults(
    ours: Path, fresh: Path, origin: dict[str, str], unstable: set[str]
) -> Iterator[str]:
    """Compare the package as it stands with a fresh export, byte by byte."""

    def files(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*"))
        return {
            str(path)
            for path in found
            if "__pycache__" not in path.parts and (folder / path).is_file()
        }

    for file in sorted(files(ours) | files(fresh)):
        name, source = f"{PACKAGE}/{file}", origin.get(file.removesuffix(".py"))
        if not (fresh / file).exists():
            yield f"{name}: no notebook exports it; delete it."
        elif not (ours / file).exists():
            yield f"{name}: is missing; run `make export`."
        elif (
            source not in unstable
            and (ours / file).read_bytes() != (fresh / file).read_bytes()
        ):
            yield (
                f"{name}: is not what {source or 'the series'} exports; make the "
                "change in the notebook, then run `make export`."
            )


def exercise_faults(root: Path, fresh: Path, problem: str) -> Iterator[str]:
    """Compare the exercises as they stand with what their solutions give."""
    if problem:
        yield f"notebooks/solutions/: {problem}."
        return
    for path in sorted((fresh / "notebooks/exercises").glob("*.ipynb")):
        name = str(path.relative_to(fresh))
        if not re.fullmatch(r"\d_[a-z_]+", path.stem):
            continue  # a reader's own copy
        if not (fresh / "notebooks/solutions" / path.name).exists():
            yield f"{name}: there is no solution of that name; delete it."
        elif not (root / name).exists():
            yield f"{name}: is missing; run `make exercises`."
        elif path.read_bytes() != (root / name).read_bytes():
            yield (
                f"{name}: is not what its solution gives; make the change in "
                f"notebooks/solutions/{path.name}, then run `make exercises`."
            )


def faults(root: Path) -> Iterator[str]:
    """Find everything in the tree at `root` that is not in step."""
    paths = sorted((root / "notebooks").glob("*.ipynb"))
    yield from number_faults([path.stem for path in paths])

    origin, number = {}, {}  # module -> its notebook, and that one's number
    unstable = set()  # notebooks whose export cannot be compared
    for path in paths:
        name = f"notebooks/{path.name}"
        try:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            module = module_of(notebook)
        except (ValueError, KeyError):
            yield f"{name}: is not a notebook that can be read; mend or restore it."
            return
        for fault in cell_faults(name, notebook):
            unstable.add(name)
            yield fault
        if module is None:
            continue
        origin[module] = name
        number[module] = int(path.stem[:2]) if path.stem[:2].isdigit() else 100
        title = path.stem.partition("_")[2]
        expected = OTHER_NAME.get(title, title)
        if module != expected:
            yield f"{name}: exports to {module}, not to {expected}; rename one of them."

    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        shutil.copy(root / "pyproject.toml", fresh)
        ignored = shutil.ignore_patterns("runs", ".ipynb_checkpoints")
        shutil.copytree(root / "notebooks", fresh / "notebooks", ignore=ignored)
        clear = [sys.executable, fresh / "notebooks/solutions/clear.py"]
        cleared = subprocess.run(clear, capture_output=True, text=True)
        if problem := run_nbdev(fresh):
            yield f"notebooks/: {problem}"
            return
        problem = cleared.stderr.strip().rpartition("\n")[2]
        problem = problem if cleared.returncode else ""
        yield from exercise_faults(root, fresh, problem)
        exports = r'"#\|\s*(default_exp|export)'
        for path in sorted((fresh / "notebooks").rglob("*.ipynb")):
            name = str(path.relative_to(fresh))
            below = path.parent != fresh / "notebooks"
            if below and re.search(exports, path.read_text("utf-8")):
                yield f"{name}: exports from a subfolder; move it up, with a number."
            if path.parent.name == "exercises":
                continue
            if name not in unstable and path.read_bytes() != (root / name).read_bytes():
                yield f"{name}: is not clean; run `make export`, which cleans it."
        yield from package_faults(root / PACKAGE, fresh / PACKAGE, origin, unstable)
        files = {module: fresh / PACKAGE / f"{module}.py" for module in origin}
        sources = {m: p.read_text("utf-8") for m, p in files.items() if p.exists()}
        yield from import_faults(sources, number)


def main() -> int:
    """Print the faults of a tree; 1 if there are any."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    found = list(faults(root.resolve()))
    print(*found or ["Notebooks and package are in step."], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
