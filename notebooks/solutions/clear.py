"""Take the solutions out of these notebooks: what is left are the exercises.

Usage: python notebooks/solutions/clear.py

The marks are those of nbgrader, `### BEGIN SOLUTION` and `### END SOLUTION`. What
stands behind the first says what is to be written, and is what the exercise raises.
"""

import json
import re
from pathlib import Path

SOLUTIONS = Path(__file__).parent
EXERCISES = SOLUTIONS.with_name("exercises")
REGION = re.compile(
    r"^( *)### BEGIN SOLUTION (?P<ask>[^\n]+)\n.*?^\1### END SOLUTION$", re.M | re.S
)


def gap(region: re.Match) -> str:
    """What stands in an exercise for one marked region, laid out as ruff does."""
    indent, ask = region[1], json.dumps(region["ask"], ensure_ascii=False)
    line = f"{indent}raise NotImplementedError({ask})"
    if len(line) > 88:
        line = f"{indent}raise NotImplementedError(\n{indent}    {ask}\n{indent})"
    return line


def clear(notebook: dict, name: str) -> dict:
    """Give a notebook without its solutions and outputs.

    Raises: ValueError if it has none, or if a mark is without the other.
    """
    found = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source, regions = REGION.subn(gap, "".join(cell["source"]))
            if "SOLUTION" in source:
                raise ValueError(f"{name}: a mark stands alone, or asks for nothing")
            cell |= {"source": source.splitlines(True), "outputs": []}
            found += regions
    if not found:
        raise ValueError(f"{name}: nothing is marked as a solution")
    return notebook


def main() -> None:
    """Write one exercise for each solution."""
    EXERCISES.mkdir(exist_ok=True)
    for path in sorted(SOLUTIONS.glob("*.ipynb")):
        notebook = clear(json.loads(path.read_text("utf-8")), path.name)
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
        (EXERCISES / path.name).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
