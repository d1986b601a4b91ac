"""Norms, residuals and layers, against their definitions and torch's own layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from annotated_transformer.feed_forward import Dropout, PositionwiseFeedForward
from annotated_transformer.layers import (
    DecoderLayer,
    EncoderLayer,
    LayerNorm,
    SublayerConnection,
    clones,
)
from annotated_transformer.masks import make_std_mask, padding_mask, subsequent_mask
from annotated_transformer.multi_head import KeyValueCache, MultiHeadedAttention

MODES = pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
CLOSE = {
    torch.float64: dict(atol=1e-10, rtol=1e-8),
    torch.float32: dict(atol=2e-5, rtol=1e-4),
    torch.bfloat16: dict(atol=5e-2, rtol=5e-2),
    torch.float16: dict(atol=5e-3, rtol=5e-3),
}
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=lambda dtype: str(dtype)[6:])


# LayerNorm


@pytest.mark.parametrize(
    "x, right",
    [
        ([1.0, 0, 0, 0], [1.7320, -0.5773, -0.5773, -0.5773]),
        ([1.0, 1, 1, 1], [0.0, 0, 0, 0]),
        ([0.0, 0, 0], [0.0, 0, 0]),
        ([5.0], [0.0]),
        ([-3.0, 3.0], [-1.0, 1.0]),
    ],
)
def test_norm_of_known_vectors(x, right):
    x, right = torch.tensor(x), torch.tensor(right)
    assert_close(LayerNorm(len(x))(x), right, atol=1e-4, rtol=0)


@DTYPES
@pytest.mark.parametrize(
    "shape", [(1,), (3, 1), (4, 2), (2, 5, 7), (3, 4, 512), (2, 3, 4, 6), (0, 4)]
)
def test_norm_is_torchs_and_the_definition(shape, dtype):
    torch.manual_seed(len(shape))
    ours = LayerNorm(shape[-1]).to(dtype)
    theirs = nn.LayerNorm(shape[-1]).to(dtype)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        p.data = q.data = torch.randn(p.shape).to(dtype)
    x = (3 * torch.randn(shape) + 2).to(dtype).requires_grad_()
    out, expected = ours(x), theirs(x)
    assert out.dtype == dtype
    assert_close(out, expected, **CLOSE[dtype])

    exact = x.double()
    centred = exact - exact.mean(-1, keepdim=True)
    exact = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = ours.gain.double() * exact + ours.bias.double()
    assert_close(out.double(), exact, **CLOSE[dtype])

    probe = torch.randn(shape).to(dtype)
    mine = torch.autograd.grad(out, [x, *ours.parameters()], probe)
    other = torch.autograd.grad(expected, [x, *theirs.parameters()], probe)
    assert_close(mine, other, **CLOSE[dtype])


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-2, 1.0])
def test_norm_uses_its_epsilon(eps):
    x = torch.tensor([[0.1, -0.1, 0.2, 0.0]])
    assert_close(LayerNorm(4, eps)(x), F.layer_norm(x, [4], eps=eps))


def test_norm_sees_one_position_only():
    torch.manual_seed(0)
    norm, x = LayerNorm(6), torch.randn(2, 4, 6)
    changed = x.clone()
    changed[1, 2] += 7
    same = torch.ones(2, 4, dtype=torch.bool)
    same[1, 2] = False
    assert_close(norm(changed)[same], norm(x)[same], atol=0, rtol=0)


# SublayerConnection


@MODES
def test_sublayer_stands_in_its_place(norm_first):
    torch.manual_seed(1)
    connection = SublayerConnection(6, 0.0, norm_first)
    for p in connection.parameters():
        nn.init.normal_(p)
    gain, bias = connection.norm.gain, connection.norm.bias

    def norm(x):
        return F.layer_norm(x, [6], gain, bias)

    f = nn.Linear(6, 6)
    x = torch.randn(2, 3, 6, requires_grad=True)
    right = x + f(norm(x)) if norm_first else norm(x + f(x))
    out = connection(x, f)
    assert_close(out, right)
    inputs, probe = [x, gain, bias, *f.parameters()], torch.randn_like(x)
    assert_close(
        torch.autograd.grad(out, inputs, probe),
        torch.autograd.grad(right, inputs, probe),
    )


@MODES
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_takes_from_the_correction_alone(norm_first, p):
    torch.manual_seed(2)
    connection, x = SublayerConnection(50, p, norm_first), torch.randn(40, 10, 50)
    silent = connection(x, torch.zeros_like)
    assert_close(silent, x if norm_first else F.layer_norm(x, [50]))

    given = 0 * x if norm_first else 0 * x + torch.arange(50.0)
    torch.manual_seed(3)
    out = connection(given, torch.ones_like)
    torch.manual_seed(3)
    right = given + Dropout(p)(torch.ones_like(x))
    assert_close(out, right if norm_first else F.layer_norm(right, [50]))
    if norm_first:
        assert abs((out == 0).float().mean() - p) < 0.01
    in_use = connection.eval()(given, torch.ones_like)
    assert_close(in_use, given + 1 if norm_first else F.layer_norm(given + 1, [50]))


def test_pre_norm_leaves_the_road_free():
    x = torch.randn(2, 3, 6, requires_grad=True)
    out = x
    for connection in clones(SublayerConnection(6, 0.1), 12):
        out = connection(out, torch.zeros_like)
    probe = torch.randn_like(x)
    assert_close(out, x, atol=0, rtol=0)
    assert_close(torch.autograd.grad(out, x, probe)[0], probe, atol=0, rtol=0)


# clones


@pytest.mark.parametrize("N", [0, -1, -6])
def test_no_clones_is_an_error_with_the_number(N):
    with pytest.raises(ValueError, match=rf"N \({N}\) must be at least 1"):
        clones(nn.Linear(2, 2), N)


def encoder_layer(size=8, dropout=0.0, norm_first=True, h=2, d_ff=16) -> EncoderLayer:
    attn = MultiHeadedAttention(h, size, dropout)
    ff = PositionwiseFeedForward(size, d_ff, dropout)
    return EncoderLayer(size, attn, ff, dropout, norm_first)


def decoder_layer(size=8, dropout=0.0, norm_first=True, h=2, d_ff=16) -> DecoderLayer:
    attns = [MultiHeadedAttention(h, size, dropout) for _ in range(2)]
    ff = PositionwiseFeedForward(size, d_ff, dropout)
    return DecoderLayer(size, *attns, ff, dropout, norm_first)


@pytest.mark.parametrize("N", [1, 2, 6])
@pytest.mark.parametrize("make", [encoder_layer, decoder_layer])
def test_clones_start_different(make, N):
    model = make()
    before = copy.deepcopy(model.state_dict())
    layers = clones(model, N)
    assert len(layers) == N
    assert_close(model.state_dict(), before, atol=0, rtol=0)
    drawn = [model, *layers]
    for one, two in [(a, b) for i, a in enumerate(drawn) for b in drawn[:i]]:
        for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
            assert p is not q and p.shape == q.shape
            if "norm" in name:  # starts as 1 and 0 everywhere, and is no tie
                assert torch.equal(p, q)
            else:
                assert not torch.equal(p, q), name


def test_clones_leave_the_last_word_to_the_outer_module():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Embedding(500, 8)

        def reset_parameters(self):
            nn.init.uniform_(self.inner.weight, 5.0, 6.0)

    for one in clones(Small(), 2):
        assert one.inner.weight.min() >= 5


def test_clones_keep_the_make():
    drawn = clones(encoder_layer(size=64, h=8, d_ff=256, dropout=0.3), 2)[1]
    weight = drawn.feed_forward.w_1.weight
    assert abs(weight.std() - nn.Linear(64, 256).weight.std()) < 0.01
    assert {m.p for m in drawn.modules() if isinstance(m, nn.Dropout)} == {0.3}


# Layers


@MODES
@pytest.mark.parametrize("make, parts", [(encoder_layer, 2), (decoder_layer, 3)])
def test_every_argument_reaches_every_part(make, parts, norm_first):
    layer = make(size=12, dropout=0.2, norm_first=norm_first)
    assert layer.size == 12 and len(layer.sublayer) == parts
    for connection in layer.sublayer:
        assert connection.norm_first is norm_first
        assert connection.dropout.p == 0.2
        assert connection.norm.gain.shape == (12,)


def in_torch_order(tensors, attentions: int) -> list:
    """torch stacks query, key and value of each attention; else the order is ours."""
    tensors, stacked = list(tensors), []
    for _ in range(attentions):
        (*qkv, weight, bias), tensors = tensors[:8], tensors[8:]
        stacked += [torch.cat(qkv[0::2]), torch.cat(qkv[1::2]), weight, bias]
    return stacked + tensors


def twins(make, theirs, attentions: int, norm_first: bool, dtype, **sizes):
    """Our layer and torch's, with the same random weights."""
    ours = make(norm_first=norm_first, **sizes).to(dtype)
    theirs = theirs(
        sizes["size"],
        sizes["h"],
        sizes["d_ff"],
        dropout=0.0,
        batch_first=True,
        norm_first=norm_first,
    ).to(dtype)
    with torch.no_grad():
        for p in ours.parameters():
            p += (0.3 * torch.randn(p.shape)).to(dtype)
    weights = in_torch_order(ours.parameters(), attentions)
    names = theirs.state_dict()
    theirs.load_state_dict(dict(zip(names, weights, strict=True)))
    return ours, theirs


def assert_twins(ours, theirs, attentions, out, expected, inputs, dtype):
    assert out.dtype == dtype
    assert_close(out, expected, **CLOSE[dtype])
    probe = torch.randn(out.shape).to(dtype)
    mine = torch.autograd.grad(out, [*inputs, *ours.parameters()], probe)
    other = torch.autograd.grad(expected, [*inputs, *theirs.parameters()], probe)
    n = len(inputs)
    mine = [*mine[:n], *in_torch_order(mine[n:], attentions)]
    if dtype == torch.bfloat16:  # rounding may wake or silence a ReLU in one of them
        mine, other = (torch.cat([g.flatten() for g in side]) for side in (mine, other))
        assert F.cosine_similarity(mine.double(), other.double(), dim=0) > 0.98
    else:
        assert_close(mine, list(other), **CLOSE[dtype])


def padded(lengths) -> torch.Tensor:
    """Ids, 4 for a word and 0 for padding."""
    return 4 * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


LAYER_DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:]
)
SIZES = pytest.mark.parametrize(
    "sizes", [dict(size=8, h=2, d_ff=16), dict(size=6, h=1, d_ff=5)], ids=["8", "6"]
)


@MODES
@LAYER_DTYPES
@SIZES
@pytest.mark.parametrize("lengths", [(5, 5), (4, 2, 1), (1,), None])
def test_encoder_layer_is_torchs(norm_first, dtype, sizes, lengths):
    torch.manual_seed(4)
    torchs = nn.TransformerEncoderLayer
    ours, theirs = twins(encoder_layer, torchs, 1, norm_first, dtype, **sizes)
    src = padded(lengths or (3, 3))
    x = torch.randn(*src.shape, sizes["size"]).to(dtype).requires_grad_()
    out = ours(x, padding_mask(src) if lengths else None)
    expected = theirs(x, src_key_padding_mask=src == 0)
    assert_twins(ours, theirs, 1, out, expected, [x], dtype)


@MODES
@LAYER_DTYPES
@SIZES
@pytest.mark.parametrize(
    "source, target",
    [((5, 5), (3, 3)), ((4, 2, 1), (1, 6, 4)), ((1,), (1,)), (None, None)],
)
def test_decoder_layer_is_torchs(norm_first, dtype, sizes, source, target):
    torch.manual_seed(5)
    torchs = nn.TransformerDecoderLayer
    ours, theirs = twins(decoder_layer, torchs, 2, norm_first, dtype, **sizes)
    src, tgt = padded(source or (3, 3)), padded(target or (4, 4))
    memory, x = (
        torch.randn(*ids.shape, sizes["size"]).to(dtype).requires_grad_()
        for ids in (src, tgt)
    )
    if source:
        masks = padding_mask(src), make_std_mask(tgt)
        hidden = dict(
            tgt_mask=~subsequent_mask(tgt.size(1))[0],
            tgt_key_padding_mask=tgt == 0,
            memory_key_padding_mask=src == 0,
        )
    else:
        masks, hidden = (None, None), {}
    out, expected = ours(x, memory, *masks), theirs(x, memory, **hidden)
    assert_twins(ours, theirs, 2, out, expected, [x, memory], dtype)


@MODES
@pytest.mark.parametrize("step", [1, 2, 5])
def test_decoder_layer_with_a_cache_says_the_same(norm_first, step):
    torch.manual_seed(6)
    layer = decoder_layer(norm_first=norm_first)
    src, tgt = padded((4, 2, 1)), padded((5, 5, 5))
    memory, x = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    src_mask, tgt_mask = padding_mask(src), make_std_mask(tgt)
    cache = KeyValueCache(grows=True), KeyValueCache(grows=False)
    parts = []
    for start in range(0, 5, step):
        end = min(start + step, 5)
        mask = tgt_mask[:, start:end, :end]
        parts.append(layer(x[:, start:end], memory, src_mask, mask, cache))
        assert cache[0].key.size(2) == end and cache[1].key.size(2) == 4
    assert_close(torch.cat(parts, dim=1), layer(x, memory, src_mask, tgt_mask))


@MODES
def test_decoder_layer_does_not_see_what_is_hidden(norm_first):
    torch.manual_seed(7)
    layer = decoder_layer(norm_first=norm_first)
    src, tgt = padded((4, 2)), padded((5, 5))
    memory, x = torch.randn(2, 4, 8), torch.randn(2, 5, 8)
    masks = padding_mask(src), make_std_mask(tgt)
    before = layer(x, memory, *masks)
    memory[1, 2:] += 100
    assert_close(layer(x, memory, *masks), before, atol=1e-6, rtol=0)
    for t in range(1, 5):
        later = x.clone()
        later[:, t:] -= 100
        out = layer(later, memory, *masks)
        assert_close(out[:, :t], before[:, :t], atol=1e-6, rtol=0)
        assert not torch.allclose(out[:, t:], before[:, t:])


@MODES
@LAYER_DTYPES
def test_a_sentence_of_padding_alone_is_no_nan(norm_first, dtype):
    torch.manual_seed(8)
    src, tgt = padded((3, 0)), padded((2, 0))
    memory = torch.randn(2, 3, 8).to(dtype).requires_grad_()
    x = torch.randn(2, 2, 8).to(dtype).requires_grad_()
    encoder = encoder_layer(norm_first=norm_first).to(dtype)
    decoder = decoder_layer(norm_first=norm_first).to(dtype)
    mask = padding_mask(src)
    out = decoder(x, encoder(memory, mask), mask, make_std_mask(tgt))
    grads = torch.autograd.grad(out.float().pow(2).sum(), [x, memory])
    assert all(tensor.isfinite().all() for tensor in (out, *grads))


# Dropout


@LAYER_DTYPES
@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.99])
def test_dropout_drops_its_share_and_keeps_the_mean(p, dtype):
    torch.manual_seed(12)
    x = torch.ones(500, 2001, dtype=dtype, requires_grad=True)  # no multiple of four
    out = Dropout(p).train()(x)
    gone = out.detach().eq(0)
    assert abs(gone.float().mean() - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5 + 2**-17
    kept = out[~gone].detach().double()
    right, close = torch.full_like(kept, 1 / (1 - p)), 1e-3 + torch.finfo(dtype).eps
    assert_close(kept, right, atol=0, rtol=close)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())  # what is dropped learns nothing


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_every_place_alike_and_on_its_own(p):
    """Four come from one draw: neither place nor neighbour may show it."""
    torch.manual_seed(13)
    gone = Dropout(p)(torch.ones(100_000, 4)).eq(0).double()  # a row for each draw
    noise = (p * (1 - p)) ** 0.5
    assert (gone.mean(0) - p).abs().max() < 5 * noise / len(gone) ** 0.5
    line = gone.flatten() - p
    for step in (*range(1, 13), 100):
        together = (line[step:] * line[:-step]).mean() / noise**2
        assert together.abs() < 5 / len(line) ** 0.5, step


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(p):
    x = torch.randn(3, 5)
    assert torch.equal(Dropout(p)(x), (1 - p) * x)
    assert torch.equal(Dropout(p).eval()(x), x)
    assert Dropout(0.5)(torch.ones(0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="1.5"):
        Dropout(1.5)


def test_dropout_repeats_itself_from_a_seed():
    x, drop = torch.ones(7, 9), Dropout(0.4)
    twice = []
    for _ in range(2):
        torch.manual_seed(14)
        twice.append(torch.cat([drop(x), drop(x)]))
    assert torch.equal(*twice) and not torch.equal(*twice[0].chunk(2))


# The feed-forward network


@LAYER_DTYPES
@pytest.mark.parametrize(
    "shape, d_ff", [((2, 5, 4), 8), ((1, 1, 1), 1), ((3, 6), 2), ((2, 0, 4), 8)]
)
def test_feed_forward_is_equation_2(shape, d_ff, dtype):
    torch.manual_seed(9)
    ffn = PositionwiseFeedForward(shape[-1], d_ff, dropout=0.3).to(dtype)
    x = torch.randn(shape).to(dtype)
    one, two = ffn.w_1, ffn.w_2
    inner = (x @ one.weight.T + one.bias).clamp(min=0)
    assert_close(ffn.eval()(x), inner @ two.weight.T + two.bias, **CLOSE[dtype])

    torch.manual_seed(10)
    out = ffn.train()(x)
    torch.manual_seed(10)
    assert_close(out, two(Dropout(0.3)(one(x).relu())), **CLOSE[dtype])
