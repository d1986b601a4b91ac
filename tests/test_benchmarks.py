"""The speed table can be made: every row is there, with numbers that can be right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBER = r" +([\d,]+\.\d{2,4})"
ROW = re.compile(rf"(.+?){NUMBER}{NUMBER}{NUMBER}  (\S+)")
PEERS = ["plain loop", "ours, fp32", "nn.Transformer, fp32"]
EXPECTED = [
    *(
        f"batching {n} pairs{end}"
        for n in ("1,000", "4,000")
        for end in ("", ": memory growth")
    ),
    *(f"training, {size}: {name}" for size in ("base", "tiny") for name in PEERS),
    "training, base: ours, fp32 / nn.Transformer, fp32",
    "training, tiny: ours, fp32 / plain loop",
    "machine, base: matrix products, fp32",
    "machine, base: ours, fp32 / matrix products, fp32",
    *(
        f"growth, {shape} tokens: ours{end}"
        for shape in ("2 x 8", "2 x 16", "4 x 8")
        for end in ("", " / the five lines", " / nn.Transformer", ", kept")
    ),
    "greedy, base, 2 x 8 tokens: ours / ours, no cache",
    "greedy: ours",
    "greedy: ours / ours, no cache",
    "greedy: ours / plain loop (from 2)",
    "greedy: ours / CTranslate2, fp32",
    "beam 4: ours / CTranslate2, fp32",
]


@pytest.fixture(scope="module")
def table() -> dict[str, tuple]:
    """Run the small version in a process of its own, on the captions."""
    command = [sys.executable, "benchmarks/bench.py", "--quick"]
    bare = {name: v for name, v in os.environ.items() if name != "MULTI30K_DIR"}
    where = dict(cwd=ROOT, env=bare | {"OMP_NUM_THREADS": "1"})
    done = subprocess.run(command, capture_output=True, text=True, **where)
    assert done.returncode == 0, done.stderr
    found = map(ROW.fullmatch, done.stdout.splitlines())
    rows = (match.groups() for match in found if match)
    return {name: (*numbers, unit) for name, *numbers, unit in rows}


def test_every_row_is_there(table):
    assert [name for name in EXPECTED if name not in table] == []


def test_every_number_is_positive_and_between_its_ends(table):
    for name, (*numbers, _) in table.items():
        median, least, most = (float(number.replace(",", "")) for number in numbers)
        assert 0 <= least <= median <= most and most > 0, name


def test_answers_do_not_depend_on_the_cache(table):
    for search in ("greedy", "beam 4"):
        assert table[f"{search}: same answers as no cache"][0] == "100.00"


def test_longer_sentences_and_larger_batches_keep_more(table):
    small, long, many = (
        float(table[f"growth, {shape} tokens: the five lines, kept"][0])
        for shape in ("2 x 8", "2 x 16", "4 x 8")
    )
    assert small < many < long
