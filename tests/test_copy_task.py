"""The first full run: digits in, the same digits out."""

import os
import subprocess
import sys

import pytest
import torch

from annotated_transformer.copy_task import (
    TASKS,
    data_gen,
    exact_matches,
    toy_translation,
    train_copy_task,
)
from annotated_transformer.greedy import greedy_decode

# Three seeds take some minutes: COPY_TASK_SEEDS=0,1,2 asks for them.
SEEDS = [int(seed) for seed in os.environ.get("COPY_TASK_SEEDS", "0").split(",")]


def answer(task: str, digits: list[int]) -> list[int]:
    return {"copy": digits, "reverse": digits[::-1], "sort": sorted(digits)}[task]


@pytest.mark.parametrize("task", TASKS)
def test_batches_ask_for_the_answer(task):
    batches = list(data_gen(8, 3, length=6, task=task, seed=1))
    assert len(batches) == 3
    for batch in batches:
        assert batch.src.shape == (8, 7) and batch.ntokens == 8 * 7
        for src, tgt, tgt_y in zip(batch.src, batch.tgt, batch.tgt_y, strict=True):
            digits = src[1:].tolist()
            assert src[0] == 1 and set(digits) <= set(range(4, 14))
            assert tgt.tolist() == [1, *answer(task, digits)]
            assert tgt_y.tolist() == [*answer(task, digits), 2]


def test_a_seed_gives_the_same_digits_and_another_seed_others():
    def digits(seed):
        return torch.cat([batch.src for batch in data_gen(4, 2, seed=seed)])

    assert digits(1).equal(digits(1)) and not digits(1).equal(digits(2))
    drawn = next(data_gen(1000, 1)).src[:, 1:]
    assert drawn.unique().tolist() == list(range(4, 14))  # every digit comes


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(task="shuffle"), "'shuffle': one of copy, reverse, sort"),
        (dict(length=0), "length 0"),
        (dict(nbatches=0), "nbatches 0"),
        (dict(batch_size=-1), "batch_size -1"),
    ],
)
def test_bad_settings_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        next(data_gen(**{"batch_size": 2, "nbatches": 2, **wrong}))


def test_training_leaves_the_callers_dice_alone_and_repeats_itself():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rows: list[dict] = []
    one = train_copy_task(updates=3, length=3, log=rows.append)
    assert torch.get_rng_state().equal(before)
    assert [row["step"] for row in rows] == [1, 2, 3] and not one.training
    other = train_copy_task(updates=3, length=3)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert p.equal(q)


class Perfect:
    """Answers right, but for the first `slips` sequences."""

    def __init__(self, task: str, slips: int, length: int):
        self.task, self.slips, self.length = task, slips, length

    def encode(self, src, src_mask):
        rows = [[*answer(self.task, row), 2] for row in src[:, 1:].tolist()]
        for row in rows[: self.slips]:
            row[self.length // 2] = 4 if row[self.length // 2] != 4 else 5
        return torch.tensor(rows)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        return memory[:, : tgt.size(1)]

    def generator(self, states):
        return torch.eye(14)[states].log()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("slips", [0, 1, 7, 20])
def test_exact_matches_counts_whole_sequences(task, slips):
    model = Perfect(task, slips, length=6)
    assert exact_matches(model, 20, length=6, task=task) == 20 - slips


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(900)
def test_a_thousand_updates_copy_what_was_never_seen(seed):
    model = train_copy_task(updates=1000, seed=seed)
    assert exact_matches(model) == 100
    src = next(data_gen(1, 1)).src
    with pytest.raises(ValueError, match="padding"):
        greedy_decode(model, src, None, 11, start_symbol=0)


def test_toy_translation_agrees_in_gender():
    words, pairs = toy_translation()
    texts = [[" ".join(words[id] for id in ids) for ids in pair] for pair in pairs]
    assert texts[0] == ["<s> I am a student </s>", "<s> ich bin ein Student </s>"]
    flower = ["<s> she is a small flower </s>", "<s> sie ist eine kleine Blume </s>"]
    assert flower in texts
    assert ["<s> he is a tall child </s>", "<s> er ist ein großes Kind </s>"] in texts
    assert len({tuple(text) for text in texts}) == 48
    for german in (text[1].split() for text in texts):
        assert ("eine" in german) == ("Blume" in german)


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "annotated_transformer.copy_task", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_from_a_shell():
    done = run("--updates", "3", "--length", "3", "--task", "reverse")
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "reverse 3 digits: 3 updates on the CPU in fp32"
    assert last.endswith("of 100 unseen sequences come out exactly right")
    assert "3/3" in done.stderr  # the progress bar


def test_a_shell_is_told_what_tasks_there_are():
    done = run("--task", "shuffle")
    assert done.returncode != 0
    assert all(task in done.stdout + done.stderr for task in TASKS)
