"""Embeddings and positions, against the paper's formula computed number by number."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from annotated_transformer.embeddings import Embeddings, PositionalEncoding
from annotated_transformer.feed_forward import Dropout
from annotated_transformer.layers import clones

DTYPES = pytest.mark.parametrize(
    "dtype, close",
    [
        (torch.float64, 1e-7),  # the table itself is kept in float32
        (torch.float32, 1e-6),
        (torch.float16, 1e-3),
        (torch.bfloat16, 1e-2),
    ],
    ids=["float64", "float32", "float16", "bfloat16"],
)


def formula(pos: int, d_model: int) -> torch.Tensor:
    """One row of the paper's table, in double precision."""
    angles = [pos / 10000 ** (2 * (i // 2) / d_model) for i in range(d_model)]
    row = [math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)]
    return torch.tensor(row, dtype=torch.float64)


def positions(d_model, length, start=0, **options) -> torch.Tensor:
    add = PositionalEncoding(d_model, 0.0, **options)
    return add(torch.zeros(1, length, d_model), start)[0].double()


# PositionalEncoding


def test_the_first_two_positions_at_width_4():
    right = torch.tensor([[0.0, 1, 0, 1], [0.8415, 0.5403, 0.0100, 0.99995]])
    assert_close(positions(4, 2).float(), right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("d_model", [1, 2, 3, 4, 5, 7, 8, 63, 64, 512, 513])
@pytest.mark.parametrize("length", [1, 2, 5000, 5001, 7777])
def test_every_width_and_length_is_the_formula(d_model, length):
    table = positions(d_model, length)
    assert table.shape == (length, d_model)
    for pos in {0, 1, length // 3, length - 2, length - 1} & set(range(length)):
        assert_close(table[pos], formula(pos, d_model), atol=1e-6, rtol=0)


@pytest.mark.parametrize("max_len", [0, 1, 4, 10, 5000])
@pytest.mark.parametrize("start, length", [(0, 10), (3, 1), (9, 4), (5000, 3)])
def test_any_start_before_or_past_the_table(max_len, start, length):
    table = positions(6, length, start, max_len=max_len)
    for i in range(length):
        assert_close(table[i], formula(start + i, 6), atol=1e-6, rtol=0)


def test_growing_changes_nothing_before():
    add = PositionalEncoding(6, 0.0, max_len=4)
    x = torch.randn(2, 4, 6)
    before = add(x)
    add(torch.zeros(1, 50, 6))
    assert add.pe.size(1) == 50
    assert_close(add(x), before, atol=0, rtol=0)


def test_nothing_to_add_to():
    assert positions(6, 0).shape == (0, 6)


def test_step_by_step_is_all_at_once():
    add, x = PositionalEncoding(7, 0.0, max_len=3).eval(), torch.randn(2, 9, 7)
    steps = [add(x[:, t : t + 1], start=t) for t in range(9)]
    assert_close(torch.cat(steps, dim=1), add(x), atol=0, rtol=0)


@DTYPES
def test_the_table_goes_where_the_model_goes(dtype, close):
    add = PositionalEncoding(8, 0.0, max_len=4).to(dtype)
    for length in (3, 9):  # within the table, and past its end
        out = add(torch.zeros(1, length, 8, dtype=dtype))
        assert out.dtype == add.pe.dtype == dtype
        assert_close(
            out[0, -1].double(), formula(length - 1, 8), atol=close, rtol=close
        )
    assert add.to("meta").pe.device.type == "meta"


def test_a_buffer_is_not_learned_and_not_saved():
    add = PositionalEncoding(8, 0.1)
    assert not list(add.parameters())
    assert [name for name, _ in add.named_buffers()] == ["pe"]
    assert not add.state_dict() and not add.pe.requires_grad
    add.load_state_dict({})
    assert_close(copy.deepcopy(add).pe, add.pe)


def test_the_gradient_of_what_it_adds_to_is_untouched():
    x = torch.randn(2, 5, 8, requires_grad=True)
    probe = torch.randn(2, 5, 8)
    out = PositionalEncoding(8, 0.0)(x)
    assert_close(torch.autograd.grad(out, x, probe)[0], probe, atol=0, rtol=0)


def test_dropout_takes_from_the_sum():
    x = torch.randn(3, 40, 8)
    add = PositionalEncoding(8, 0.3)
    torch.manual_seed(0)
    out = add(x)
    torch.manual_seed(0)
    assert_close(out, Dropout(0.3)(x + add.pe[:, :40]))
    assert_close(add.eval()(x), x + add.pe[:, :40])


@pytest.mark.parametrize("d_model", [2, 8, 64])
@pytest.mark.parametrize("shift", [1, 5, 100])
def test_a_shift_is_one_rotation_everywhere(d_model, shift):
    table = positions(d_model, 300 + shift)
    R = torch.linalg.lstsq(table[:-shift], table[shift:]).solution
    if d_model < 64:  # the slowest hands of wider tables cannot be told apart here
        assert_close(R @ R.T, torch.eye(d_model).double(), atol=1e-3, rtol=0)
    assert_close(table[:-shift] @ R, table[shift:], atol=1e-4, rtol=0)
    lengths = table.pow(2).sum(-1)
    assert_close(lengths, torch.full_like(lengths, d_model / 2))
    alike = table @ table.T
    assert_close(alike[0, shift].expand(300), alike.diagonal(shift))


# Embeddings


@DTYPES
@pytest.mark.parametrize("d_model, vocab", [(1, 1), (4, 9), (7, 3), (512, 50)])
def test_look_up_is_scaled(d_model, vocab, dtype, close):
    torch.manual_seed(1)
    embed = Embeddings(d_model, vocab).to(dtype)
    ids = torch.randint(vocab, (2, 5))
    out = embed(ids)
    assert out.shape == (2, 5, d_model) and out.dtype == dtype
    weight = embed.lut.weight.detach().double().requires_grad_()
    right = F.one_hot(ids, vocab).double() @ weight * d_model**0.5
    assert_close(out.double(), right, atol=close, rtol=close)
    probe = torch.randn(out.shape).to(dtype)
    (mine,) = torch.autograd.grad(out, embed.lut.weight, probe)
    (other,) = torch.autograd.grad(right, weight, probe.double())
    assert (mine.double() - other).norm() <= 20 * close * other.norm()


@pytest.mark.parametrize("d_model", [16, 64, 512, 1024])
def test_rows_start_with_length_1_and_words_with_size_1(d_model):
    torch.manual_seed(2)
    embed = Embeddings(d_model, 2000)
    weight = embed.lut.weight
    assert abs(weight.mean()) < 0.05 * d_model**-0.5
    assert_close(weight.std().item(), d_model**-0.5, atol=0, rtol=0.02)
    assert_close(embed(torch.arange(2000)).std().item(), 1.0, atol=0.02, rtol=0)


def test_clones_of_embeddings_are_drawn_the_same_way():
    torch.manual_seed(3)
    one, two = clones(Embeddings(64, 500), 2)
    assert not torch.equal(one.lut.weight, two.lut.weight)
    assert_close(two.lut.weight.std().item(), 64**-0.5, atol=0, rtol=0.02)


def test_an_unknown_id_is_an_error():
    with pytest.raises(IndexError):
        Embeddings(8, 10)(torch.tensor([[10]]))
