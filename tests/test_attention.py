"""Attention, its heads and its masks: the cases C3 to C5, and torch as the witness."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from torch.testing import assert_close

from annotated_transformer.attention import attention
from annotated_transformer.masks import make_std_mask, padding_mask, subsequent_mask
from annotated_transformer.multi_head import KeyValueCache, MultiHeadedAttention

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]
# what the last digits may differ by: a type keeps 24, 8 or 11 bits of each number
NEAR = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
sizes = some.integers(1, 9)
quick = settings(max_examples=40, deadline=None, derandomize=True)


def fused(query, key, value, mask=None):
    """What the module runs when nobody records weights."""
    return F.scaled_dot_product_attention(query, key, value, mask)


def explicit(query, key, value, mask=None):
    return attention(query, key, value, mask)[0]


def close(got, expected, near):
    """Compare on the scale of the largest number, as rounding errors are."""
    expected = expected.to(got.dtype)
    assert_close(got, expected, rtol=0, atol=near * max(1, expected.abs().max().item()))


def module(h, d_model, record=False, dropout=0.0):
    attn = MultiHeadedAttention(h, d_model, dropout)
    attn.record = record
    return attn


# C3: values


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("path", [explicit, fused])
def test_c3_two_keys(path, dtype):
    query, key = torch.eye(2, dtype=dtype)[:1], torch.eye(2, dtype=dtype)
    value = torch.tensor([[10.0], [20.0]], dtype=dtype)
    got = path(query[None], key[None], value[None])[0]
    near = 1e-4 if dtype == torch.float32 else 0.1
    assert_close(got, torch.tensor([[13.3024]], dtype=dtype), rtol=0, atol=near)
    _, weights = attention(query, key, value)
    expected = torch.tensor([[0.66976, 0.33024]], dtype=dtype)
    assert_close(weights, expected, rtol=0, atol=near / 10)


@quick
@given(T=sizes, S=sizes, d_k=sizes, d_v=sizes, heads=sizes, seed=some.integers(0, 999))
def test_any_shapes(T, S, d_k, d_v, heads, seed):
    """Equal to a loop over single numbers; rows sum to 1."""
    torch.manual_seed(seed)
    query, key = torch.randn(heads, T, d_k), torch.randn(heads, S, d_k)
    value = torch.randn(heads, S, d_v)
    output, weights = attention(query, key, value)
    assert output.shape == (heads, T, d_v) and weights.shape == (heads, T, S)
    assert_close(weights.sum(-1), torch.ones(heads, T))
    for n in range(heads):
        for t in range(T):
            powers = [((query[n, t] * k).sum() * d_k**-0.5).exp() for k in key[n]]
            shares = [power / sum(powers) for power in powers]
            expected = sum(s * v for s, v in zip(shares, value[n], strict=True))
            assert_close(output[n, t], expected, rtol=1e-4, atol=1e-5)


@quick
@given(
    T=sizes,
    S=sizes,
    seed=some.integers(0, 999),
    share=some.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
    dtype=some.sampled_from(PRECISIONS),
)
def test_equals_the_fused_kernel_under_any_mask(T, S, seed, share, dtype):
    """Outputs and gradients, with rows that see all, some or nothing."""
    torch.manual_seed(seed)
    mask = torch.rand(2, 1, T, S) < share
    tensors = [torch.randn(2, 3, size, 4) for size in (T, S, S)]
    results = []
    for path in (explicit, fused):
        leaves = [one.to(dtype).requires_grad_() for one in tensors]
        output = path(*leaves, mask)
        output.float().square().sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == dtype and got.isfinite().all()
        close(got, expected, NEAR[dtype])
    _, weights = attention(*(one.to(dtype) for one in tensors), mask)
    assert weights.masked_select(~mask).eq(0).all()
    full = mask.any(-1).expand(2, 3, T).float()
    assert_close(weights.float().sum(-1), full, rtol=0, atol=NEAR[dtype])


def test_attention_dropout_forgets_weights_and_keeps_the_mean():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 40, 8)
    _, whole = attention(query, key, value)
    output, weights = attention(query, key, value, dropout=nn.Dropout(0.25))
    kept = weights != 0
    assert 0.65 < kept.float().mean() < 0.85
    assert_close(weights[kept], whole[kept] / 0.75)
    assert_close(output, weights @ value)
    resting = nn.Dropout(0.25).eval()
    assert_close(attention(query, key, value, dropout=resting)[1], whole)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_hidden_keys_lose_to_any_score(dtype):
    """A masking constant that is not low enough would win against such scores."""
    query = torch.tensor([[200.0, 0.0]], dtype=dtype)
    key = torch.tensor([[-200.0, 0.0], [0.0, 1.0], [-200.0, 0.0]], dtype=dtype)
    mask = torch.tensor([[True, False, True]])
    _, weights = attention(query, key, key, mask)
    assert weights.tolist() == [[0.5, 0.0, 0.5]]


# C4: masks


def test_c4_the_rows():
    mask = make_std_mask(torch.tensor([[7, 8, 9, 0, 0]]))
    rows = ["".join("01"[may] for may in row) for row in mask[0].tolist()]
    assert rows == ["10000", "11000", "11100", "11100", "11100"]


@quick
@given(
    ids=some.integers(1, 6).flatmap(
        lambda width: some.lists(
            some.lists(some.integers(0, 4), min_size=width, max_size=width),
            min_size=1,
            max_size=4,
        )
    ),
    pad=some.integers(0, 4),
)
def test_masks_equal_their_definition(ids, pad):
    T = len(ids[0])
    tensor = torch.tensor(ids)
    assert padding_mask(tensor, pad).tolist() == [[[i != pad for i in s]] for s in ids]
    back = [[s <= t for s in range(T)] for t in range(T)]
    assert subsequent_mask(T).tolist() == [back]
    kept = [[i != pad for i in s] for s in ids]
    both = [[[ids[s] and row[s] for s in range(T)] for row in back] for ids in kept]
    assert make_std_mask(tensor, pad).tolist() == both
    for mask in (padding_mask(tensor), subsequent_mask(T), make_std_mask(tensor)):
        assert mask.dtype == torch.bool


def test_masks_stay_on_the_device_of_their_input():
    ids = torch.zeros(2, 3, dtype=torch.long, device="meta")
    for mask in (padding_mask(ids), make_std_mask(ids), subsequent_mask(3, "meta")):
        assert mask.device.type == "meta"


@pytest.mark.parametrize("record", [True, False])
@quick
@given(length=some.integers(1, 6), seed=some.integers(0, 999))
def test_c4_nothing_behind_the_padding_matters(record, length, seed):
    """Other ids, other embeddings, or no padding at all: the words stay the same."""
    torch.manual_seed(seed)
    attn, words = module(2, 8, record), nn.Embedding(50, 8)
    ids = torch.randint(4, 50, (2, 6))
    ids[1, length:] = 0
    x = words(ids)
    other = torch.where((ids == 0)[..., None], 100 * torch.randn_like(x), x)
    unlike = words(torch.where(ids == 0, torch.randint(4, 50, ids.shape), ids))
    for mask in (padding_mask(ids), make_std_mask(ids)):
        output = attn(x, x, x, mask)[1, :length]
        for change in (other, unlike):
            changed = attn(change, change, change, mask)[1, :length]
            assert_close(changed, output, rtol=0, atol=1e-6)
        alone = x[1:, :length]
        lonely = attn(alone, alone, alone, mask[1:, :length, :length])[0]
        assert_close(lonely, output, rtol=0, atol=1e-6)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("t", range(5))
def test_c4_nothing_later_matters(record, t):
    torch.manual_seed(t)
    attn, x = module(2, 8, record), torch.randn(2, 6, 8)
    changed = x.clone()
    changed[:, t + 1] += 10
    output, other = (attn(z, z, z, subsequent_mask(6)) for z in (x, changed))
    assert_close(other[:, : t + 1], output[:, : t + 1], rtol=0, atol=1e-6)
    assert not torch.allclose(other[:, t + 1], output[:, t + 1], atol=1e-2)


# C5: a row that may look nowhere


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("path", [explicit, fused])
@pytest.mark.parametrize("scale", [1, 50])
@pytest.mark.parametrize("keys", [2, 70])
def test_c5_dead_row(path, dtype, scale, keys):
    torch.manual_seed(0)
    leaves = [(scale * torch.randn(1, 2, n, 4)).to(dtype) for n in (2, keys, keys)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    mask = torch.tensor([True, False])[:, None].expand(2, keys)
    output = path(*leaves, mask)
    output.float().sum().backward()
    for part in (output, *(leaf.grad for leaf in leaves)):
        assert part.isfinite().all()
    assert output[..., 1, :].eq(0).all() and output[..., 0, :].ne(0).any()
    assert leaves[0].grad[..., 1, :].eq(0).all()
    assert attention(*leaves, mask)[1][..., 1, :].eq(0).all()


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("record", [True, False])
def test_c5_a_sentence_of_blanks_in_the_module(dtype, record):
    torch.manual_seed(0)
    attn = module(2, 8, record).to(dtype)
    x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    output = attn(x, x, x, padding_mask(torch.tensor([[5, 6, 7], [0, 0, 0]])))
    assert_close(output[1], attn.w_o.bias.expand(3, 8))
    output.float().square().sum().backward()
    gradients = [part.grad for part in (x, *attn.parameters())]
    assert all(part.isfinite().all() for part in (output, *gradients))


# Several heads


@pytest.mark.parametrize(("h", "d_model"), [(3, 8), (8, 12), (0, 8), (-2, 8), (16, 8)])
def test_heads_must_divide_the_width(h, d_model):
    with pytest.raises(ValueError) as refused:
        MultiHeadedAttention(h, d_model)
    assert f"d_model ({d_model})" in str(refused.value)
    assert f"h ({h})" in str(refused.value)


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_dropout_is_a_probability(dropout):
    with pytest.raises(ValueError, match=str(dropout)):
        MultiHeadedAttention(2, 8, dropout)


def torchs(attn: MultiHeadedAttention, dropout=0.0) -> nn.MultiheadAttention:
    """torch's module with the weights of ours."""
    theirs = nn.MultiheadAttention(4 * attn.h, attn.h, dropout, batch_first=True)
    three = [attn.w_q, attn.w_k, attn.w_v]
    theirs.in_proj_weight.data = torch.cat([one.weight.data for one in three])
    theirs.in_proj_bias.data = torch.cat([one.bias.data for one in three])
    theirs.out_proj.load_state_dict(copy.deepcopy(attn.w_o.state_dict()))
    return theirs.to(attn.w_q.weight.dtype)


def gradients_of(attn, x, memory) -> list[torch.Tensor]:
    """In torch's order: the three projections as one, then the last, then inputs."""
    if isinstance(attn, nn.MultiheadAttention):
        parts = [attn.in_proj_weight, attn.in_proj_bias]
        parts = [part.grad for part in parts]
        last = attn.out_proj
    else:
        three = [attn.w_q, attn.w_k, attn.w_v]
        parts = [torch.cat([one.weight.grad for one in three])]
        parts += [torch.cat([one.bias.grad for one in three])]
        last = attn.w_o
    return parts + [last.weight.grad, last.bias.grad, x.grad, memory.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("h", [1, 2, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_torchs_module(dtype, record, h, masked):
    """Outputs, weights and the gradients of everything, padding and future hidden."""
    torch.manual_seed(0)
    ours = module(h, 4 * h, record).to(dtype)
    theirs = torchs(ours)
    x, memory = torch.randn(3, 5, 4 * h), torch.randn(3, 7, 4 * h)
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6], [5, 6, 7, 0, 0, 0, 0], [5] + 6 * [0]])
    mask, hidden = None, {}
    if masked:
        future = subsequent_mask(7)[:, 2:]  # the last five of seven queries
        mask = padding_mask(ids) & future
        hidden = {"key_padding_mask": ids == 0, "attn_mask": ~future[0]}
    results = []
    for attn in (ours, theirs):
        a, b = (z.to(dtype).requires_grad_() for z in (x, memory))
        if attn is ours:
            output, weights = ours(a, b, b, mask), ours.weights
        else:
            kept = {"average_attn_weights": False} | hidden
            output, weights = theirs(a, b, b, **kept)
        (output.float() * torch.linspace(-1, 1, 4 * h)).sum().backward()
        results.append([output, *gradients_of(attn, a, b)])
        if record and attn is theirs:
            close(ours.weights, weights, NEAR[dtype])
    for got, expected in zip(*results, strict=True):
        close(got, expected, NEAR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@quick
@given(
    h=some.sampled_from([1, 2, 4]),
    B=some.integers(1, 3),
    T=sizes,
    S=sizes,
    share=some.sampled_from([None, 0.0, 0.3, 0.8]),
    per_query=some.booleans(),
    seed=some.integers(0, 999),
)
def test_both_paths_agree(dtype, h, B, T, S, share, per_query, seed):
    torch.manual_seed(seed)
    one = module(h, 8).to(dtype)
    x, memory = torch.randn(B, T, 8), torch.randn(B, S, 8)
    mask = None if share is None else torch.rand(B, T if per_query else 1, S) < share
    results = []
    for record in (True, False):
        attn = copy.deepcopy(one)
        attn.record = record
        a, b = (z.to(dtype).requires_grad_() for z in (x, memory))
        output = attn(a, b, b, mask)
        output.float().square().sum().backward()
        results.append([output, *gradients_of(attn, a, b)])
        assert (attn.weights is not None) == record
        if record:
            assert attn.weights.shape == (B, h, T, S)
            assert not attn.weights.requires_grad
    for got, expected in zip(*results, strict=True):
        close(got, expected, NEAR[dtype])


@pytest.mark.parametrize("record", [True, False])
def test_both_paths_drop_only_while_training(record):
    torch.manual_seed(0)
    attn, x = module(2, 8, record, dropout=0.5), torch.randn(2, 6, 8)
    assert not torch.equal(attn(x, x, x), attn(x, x, x))
    whole = copy.deepcopy(attn)
    whole.dropout.p = 0.0
    assert_close(attn.eval()(x, x, x), whole(x, x, x))
    many = x.repeat(2000, 1, 1)
    mean = attn.train()(many, many, many).view(2000, 2, 6, 8).mean(0)
    assert_close(mean, whole(x, x, x), rtol=0, atol=0.04)


# The cache


@pytest.mark.parametrize("record", [True, False])
@quick
@given(
    cuts=some.lists(some.integers(1, 3), min_size=1, max_size=4),
    rows=some.lists(some.integers(0, 2), min_size=1, max_size=4),
    seed=some.integers(0, 999),
)
def test_step_by_step_equals_all_at_once(record, cuts, rows, seed):
    """In steps of any width, with the rows chosen anew in between."""
    torch.manual_seed(seed)
    T, rows = sum(cuts), torch.tensor(rows)
    attn, x, cache = module(2, 8, record), torch.randn(3, T, 8), KeyValueCache(True)
    cache.select(torch.tensor([0, 1, 2]))  # nothing in it yet, nothing to do
    at_once, end = attn(x, x, x, subsequent_mask(T)), 0
    for n, width in enumerate(cuts):
        start, end = end, end + width
        new = x[:, start:end]
        mask = subsequent_mask(T)[:, start:end, :end]
        got = attn(new, new, new, mask, cache)
        assert_close(got, at_once[:, start:end], rtol=1e-5, atol=1e-5)
        assert cache.key.shape == (len(x), 2, end, 4) and not cache.filled
        if n == 0:
            cache.select(rows)
            x, at_once = x[rows], at_once[rows]


@pytest.mark.parametrize("record", [True, False])
@quick
@given(tries=some.integers(1, 4), T=some.integers(1, 3), seed=some.integers(0, 999))
def test_query_rows_share_a_memory_row(record, tries, T, seed):
    torch.manual_seed(seed)
    attn, memory = module(2, 8, record), torch.randn(3, 6, 8)
    mask = torch.rand(3, 1, 6) < 0.6
    cache, first = KeyValueCache(grows=False), torch.randn(3, T, 8)
    assert not cache.filled
    got = attn(first, memory, memory, mask, cache)
    assert_close(got, attn(first, memory, memory, mask))
    assert cache.filled and cache.key.shape == (3, 2, 6, 4)
    for rows in ([0, 1, 2], [2, 0]):
        rows = torch.tensor(rows)
        cache.select(rows)
        memory, mask = memory[rows], mask[rows]
        queries = torch.randn(len(rows) * tries, T, 8)
        got = attn(queries, None, None, mask, cache)
        wide, masks = (z.repeat_interleave(tries, 0) for z in (memory, mask))
        expected = attn(queries, wide, wide, masks)
        assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_match_are_refused_without_a_cache():
    """Sharing is what a filled cache is for; elsewhere it would be a mistake."""
    attn = module(2, 8)
    with pytest.raises(RuntimeError):
        attn(torch.randn(4, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8))
