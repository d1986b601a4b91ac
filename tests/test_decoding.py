"""Decoding against languages so small that every sentence can be tried."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch

from annotated_transformer.decoding import beam_search, greedy_decode, length_penalty
from annotated_transformer.masks import padding_mask
from annotated_transformer.model import make_model

START, END = 1, 2
A, B, X = 4, 5, 6
FOUR_WORDS = {
    START: {A: 0.6, B: 0.4},
    A: {X: 0.5, END: 0.3, B: 0.2},
    B: {END: 0.9, A: 0.1},
    X: {END: 0.8, X: 0.2},
}
SETTINGS = [
    dict(alpha=0.0),
    dict(alpha=0.6),
    dict(alpha=1.0, penalty="power"),
    dict(alpha=1.5, penalty="power"),
]


def stand_in(grammars: list[dict], words: int = 7) -> SimpleNamespace:
    """Dress up grammars as a model: source n is a sentence in the n-th of them."""
    table = torch.zeros(len(grammars), words, words, dtype=torch.double)
    for n, grammar in enumerate(grammars):
        for last, row in grammar.items():
            for word, p in row.items():
                table[n, last, word] = p
    return SimpleNamespace(
        encode=lambda src, src_mask: table.log()[src[:, 0]],
        decode=lambda memory, src_mask, tgt, tgt_mask: memory[
            torch.arange(len(tgt)).unsqueeze(1), tgt
        ],
        generator=lambda states: states,
    )


def search(grammars, max_len, **settings):
    src = torch.arange(len(grammars)).unsqueeze(1)
    return beam_search(stand_in(grammars), src, None, max_len, **settings)


def random_grammar(draw: random.Random, sure: int = 6) -> dict:
    """A language over three words; a high power makes it sure of itself."""
    grammar = {}
    for last in (START, A, B, X):
        words = (A, B, X) if last == START else (A, B, X, END)
        row = {word: draw.random() ** sure for word in words}
        grammar[last] = {word: p / sum(row.values()) for word, p in row.items()}
    return grammar


def worth(p: float, length: int, alpha: float, penalty: str = "gnmt") -> float:
    """The score, written out a second time."""
    over = (5 + length) / 6 if penalty == "gnmt" else length
    return math.log(p) / over**alpha


def patient(grammar, width, longest, **settings) -> list[tuple[float, tuple]]:
    """A beam search, one sentence at a time, that never stops before the limit."""
    beam, found = [((START,), 1.0)], []
    for length in range(1, longest + 1):
        grown = [
            ((*said, word), p * q)
            for said, p in beam
            for word, q in grammar[said[-1]].items()
        ]
        grown.sort(key=lambda one: -one[1])
        ends = [one for one in grown[:width] if one[0][-1] == END]
        found += [(worth(p, length, **settings), said[1:]) for said, p in ends]
        beam = [one for one in grown if one[0][-1] != END][:width]
    return sorted(found, reverse=True)


def every_sentence(grammar, longest, **settings) -> list[tuple[float, tuple]]:
    """All sentences of at most `longest` words, by nothing but counting."""
    found = []
    for length in range(1, longest + 1):
        for middle in itertools.product((A, B, X), repeat=length - 1):
            said, p = (START, *middle, END), 1.0
            for last, word in itertools.pairwise(said):
                p *= grammar[last].get(word, 0.0)
            if p > 0:
                found.append((worth(p, length, **settings), said[1:]))
    return sorted(found, reverse=True)


# Greedy


def echo(rows: list[list[int]]) -> tuple[SimpleNamespace, torch.Tensor]:
    """A model that says its own source, word by word."""
    table = torch.eye(10).log()
    parrot = SimpleNamespace(
        encode=lambda src, src_mask: src,
        decode=lambda memory, src_mask, tgt, tgt_mask: memory[:, : tgt.size(1)],
        generator=lambda states: table[states],
    )
    return parrot, torch.tensor(rows)


def test_greedy_stops_at_the_end_mark():
    parrot, src = echo([[5, 6, END, 9, 9]])
    assert greedy_decode(parrot, src, None, 5).tolist() == [[START, 5, 6, END]]
    assert greedy_decode(parrot, src, None, 3).tolist() == [[START, 5, 6, END]]


def test_greedy_pads_the_shorter_and_leaves_the_cut_without_an_end():
    parrot, src = echo([[5, 6, END, 9, 9], [7, END, 9, 9, 9], [5, 6, 7, 8, END]])
    said = greedy_decode(parrot, src, None, 3).tolist()
    assert said == [[START, 5, 6, END], [START, 7, END, 0], [START, 5, 6, 7]]


@pytest.mark.parametrize("decode", [greedy_decode, beam_search])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(max_len=0), "max_len (0)"),
        (dict(max_len=-3), "max_len (-3)"),
        (dict(start_symbol=0), "start_symbol (0)"),
        (dict(start_symbol=3, pad=3), "start_symbol (3)"),
    ],
)
def test_bad_limits_are_refused(decode, wrong, named):
    with pytest.raises(ValueError, match=named.replace("(", r"\(").replace(")", r"\)")):
        decode(None, torch.ones(1, 1).long(), None, **{"max_len": 5, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [dict(beam_size=0), dict(n_best=0), dict(alpha=-0.1), dict(penalty="none")],
)
def test_bad_beam_settings_are_refused_before_any_work(wrong):
    with pytest.raises(ValueError, match=str(*wrong.values())):
        beam_search(None, torch.ones(1, 1).long(), None, 5, **wrong)


# The beam


def test_the_four_word_language():
    def best(**settings):
        found = search([FOUR_WORDS], 9, **settings)[0]
        return found[0].ids, found[0].score, {tuple(h.ids): h.score for h in found}

    ids, score, _ = best(beam_size=1, alpha=0.0)
    assert ids == [A, X, END] and score == pytest.approx(-1.4271, abs=1e-4)
    greedy = greedy_decode(stand_in([FOUR_WORDS]), torch.zeros(1, 1).long(), None, 9)
    assert greedy[0, 1:].tolist() == ids

    ids, score, _ = best(beam_size=2, alpha=0.0)
    assert ids == [B, END] and score == pytest.approx(-1.0217, abs=1e-4)

    ids, score, others = best(beam_size=2, alpha=1.0, penalty="power")
    assert ids == [A, X, END] and score == pytest.approx(-0.4757, abs=1e-4)
    assert others[B, END] == pytest.approx(-0.5108, abs=1e-4)

    ids, score, others = best(beam_size=2, alpha=0.6)
    assert ids == [B, END] and score == pytest.approx(-0.9314, abs=1e-4)
    assert others[A, X, END] == pytest.approx(-1.2009, abs=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_beam_that_drops_nothing_finds_the_best_of_all(settings):
    draw = random.Random(1)
    grammars = [random_grammar(draw, sure) for sure in (1, 3, 6) for _ in range(10)]
    results = search(grammars, 4, beam_size=500, n_best=3, **settings)
    for grammar, found in zip(grammars, results, strict=True):
        right = every_sentence(grammar, 4, **settings)[:3]
        assert [h.score for h in found] == pytest.approx([s for s, _ in right])
        assert tuple(found[0].ids) in {s for v, s in right if v > right[0][0] - 1e-9}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_stopping_early_never_changes_an_answer(settings, width):
    draw = random.Random(2)
    grammars = [random_grammar(draw, sure) for sure in (3, 6, 9) for _ in range(40)]
    results = search(grammars, 12, beam_size=width, **settings)
    for grammar, found in zip(grammars, results, strict=True):
        right = patient(grammar, width, 12, **settings)
        if width == 1:  # greedy: the first end that is met
            right = sorted(right, key=lambda one: len(one[1]))[:1]
        ended = [h.score for h in found if h.finished]
        assert ended == pytest.approx([score for score, _ in right[:width]])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_asking_for_one_answer_gives_the_first_of_many(settings):
    draw = random.Random(3)
    grammars = [random_grammar(draw, 8) for _ in range(100)]
    many = search(grammars, 10, **settings)
    single = search(grammars, 10, n_best=1, **settings)
    for one, several in zip(single, many, strict=True):
        assert len(one) == 1
        assert one[0].score == pytest.approx(several[0].score)


def test_answers_alone_are_answers_in_a_batch():
    draw = random.Random(4)
    grammars = [random_grammar(draw, 4) for _ in range(30)]
    for grammar, found in zip(grammars, search(grammars, 9), strict=True):
        assert search([grammar], 9)[0] == found


def test_answers_come_best_first_and_cut_ones_last():
    draw = random.Random(5)
    for found in search([random_grammar(draw, 4) for _ in range(50)], 6):
        ended = [h.score for h in found if h.finished]
        assert ended == sorted(ended, reverse=True)
        assert [h.finished for h in found] == sorted(
            (h.finished for h in found), reverse=True
        )
        assert all((h.ids[-1] == END) == h.finished for h in found)
        assert all(END not in h.ids[:-1] for h in found)


def test_without_an_end_something_still_comes_back():
    endless = {START: {A: 0.7, B: 0.3}, A: {A: 0.6, B: 0.4}, B: {A: 1.0}}
    found = search([endless], 3, beam_size=2)[0]
    assert [h.finished for h in found] == [False, False]
    assert [h.ids for h in found] == [[A, A, A], [B, A, A]]  # 0.252 and 0.18
    assert found[0].score == pytest.approx(worth(0.252, 3, 0.6))


def test_impossible_words_are_never_said():
    found = search([FOUR_WORDS], 1, beam_size=6)[0]
    assert [h.ids for h in found] == [[A], [B]]  # seven words, but only two can start


def test_no_sentence_has_no_answer():
    model = make_model(7, 7, N=1, d_model=8, d_ff=8, h=2).eval()
    none = torch.zeros(0, 4, dtype=torch.long)
    assert greedy_decode(model, none, padding_mask(none), 5).shape[0] == 0
    assert beam_search(model, none, padding_mask(none), 5) == []


def test_a_beam_wider_than_the_vocabulary():
    wide = search([FOUR_WORDS], 5, beam_size=50, alpha=0.0)[0]
    assert (wide[0].ids, wide[1].ids) == ([B, END], [A, X, END])


def test_the_penalty_counts_the_end_and_not_the_start():
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 2.0) == 4.0
    assert length_penalty(7, 1.0, "power") == 7.0
    only = {START: {END: 1.0}}
    assert search([only], 3, beam_size=1)[0][0].score == 0.0


# A real model


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = make_model(20, 20, N=2, d_model=32, d_ff=64, h=4).eval()
    with torch.no_grad():  # let ends come now and then
        model.generator.proj.bias[END] += 1.0
    return model


@pytest.fixture(scope="module")
def src():
    draw = torch.Generator().manual_seed(0)
    src = torch.randint(3, 20, (12, 9), generator=draw)
    for row in range(12):
        src[row, 9 - row % 6 :] = 0
    return src


def bare(model) -> SimpleNamespace:
    return SimpleNamespace(
        encode=model.encode, decode=model.decode, generator=model.generator
    )


def test_greedy_with_a_cache_or_without_alone_or_in_a_batch(model, src):
    said = greedy_decode(model, src, padding_mask(src), 15)
    assert said.equal(greedy_decode(bare(model), src, padding_mask(src), 15))
    lengths = (said != 0).sum(dim=1)
    assert len(set(lengths.tolist())) > 1  # some leave the batch before others
    for row, one in zip(said, src, strict=True):
        alone = greedy_decode(model, one[one != 0].unsqueeze(0), None, 15)[0]
        assert alone.equal(row[: len(alone)]) and not row[len(alone) :].any()


@pytest.mark.parametrize("width", [1, 4, 30])
def test_beams_with_a_cache_or_without_alone_or_in_a_batch(model, src, width):
    def ids(found):
        return [(h.ids, h.finished) for h in found]

    cached = beam_search(model, src, padding_mask(src), 10, beam_size=width)
    plain = beam_search(bare(model), src, padding_mask(src), 10, beam_size=width)
    for one, found, other in zip(src, cached, plain, strict=True):
        assert ids(found) == ids(other)
        one = one[one != 0].unsqueeze(0)
        alone = beam_search(model, one, None, 10, beam_size=width)[0]
        assert ids(alone) == ids(found)
        scores = [h.score for h in found]
        assert [h.score for h in alone] == pytest.approx(scores, abs=1e-4)


def test_a_beam_of_one_is_greedy(model, src):
    said = greedy_decode(model, src, padding_mask(src), 15)
    found = beam_search(model, src, padding_mask(src), 15, beam_size=1)
    for row, (only,) in zip(said[:, 1:].tolist(), found, strict=True):
        assert row[: len(only.ids)] == only.ids and not any(row[len(only.ids) :])


def test_scores_are_the_models_own(model, src):
    """Add up what the model says of each answer when it is shown the whole of it."""
    results = beam_search(model, src, padding_mask(src), 10)
    for one, found in zip(src, results, strict=True):
        for answer in found:
            said = torch.tensor([[START, *answer.ids]])
            mask = torch.ones(1, said.size(1) - 1, said.size(1) - 1).bool().tril()
            one_src = one[one != 0].unsqueeze(0)
            with torch.no_grad():
                states = model(one_src, said[:, :-1], None, mask)
                log_probs = model.generator(states)[0]
            total = log_probs.gather(1, said[0, 1:, None]).sum().item()
            over = ((5 + len(answer.ids)) / 6) ** 0.6
            assert answer.score == pytest.approx(total / over, abs=1e-3)
