"""The whole model: against torch's own, tied, causal, cached, and with bad settings."""

import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer.masks import make_std_mask, padding_mask, subsequent_mask
from annotated_transformer.model import EncoderDecoder, make_model
from annotated_transformer.multi_head import MultiHeadedAttention

V = 50
ORDERS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
TORCHS_NAMES = {
    r"w_[qkv]\.": "in_proj_",
    "w_o": "out_proj",
    "src_attn": "multihead_attn",
    r"feed_forward\.w_": "linear",
    r"sublayer\.0\.norm": "norm1",
    r"sublayer\.1\.norm": "norm2",
    r"sublayer\.2\.norm": "norm3",
    "gain": "weight",
}


def small(norm_first: bool = True, **changes) -> EncoderDecoder:
    """A model whose norms and biases are not the ones that all start alike."""
    torch.manual_seed(0)
    sizes = dict(N=3, d_model=32, d_ff=48, h=4, dropout=0.0) | changes
    model = make_model(V, V, norm_first=norm_first, **sizes)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def sentences(lengths_src=(10, 6, 1), lengths_tgt=(12, 12, 4)) -> tuple:
    """Padded ids of these lengths, and their masks."""
    generator = torch.Generator().manual_seed(1)
    sides = []
    for lengths in (lengths_src, lengths_tgt):
        shape = len(lengths), max(lengths)
        ids = torch.randint(4, V, shape, generator=generator)
        sides.append(
            ids * (torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1))
        )
    src, tgt = sides
    return src, tgt, padding_mask(src), make_std_mask(tgt)


def in_torchs_names(tensors: dict) -> dict:
    renamed = {}
    for name, tensor in tensors.items():
        for ours, theirs in TORCHS_NAMES.items():
            name = re.sub(ours, theirs, name)
        if name.startswith(("encoder", "decoder")):
            renamed[name] = torch.cat([renamed.get(name, tensor[:0]), tensor])
    return renamed


def torchs(model: EncoderDecoder, norm_first: bool) -> nn.Transformer:
    """`torch.nn.Transformer` with the weights of a `small` model."""
    sizes = dict(d_model=32, nhead=4, dim_feedforward=48, dropout=0.0)
    sizes |= dict(batch_first=True, norm_first=norm_first)
    layer = nn.TransformerEncoderLayer(**sizes)
    encoder = nn.TransformerEncoder(
        layer, 3, nn.LayerNorm(32), enable_nested_tensor=False
    )
    theirs = nn.Transformer(**sizes, num_decoder_layers=3, custom_encoder=encoder)
    theirs.load_state_dict(in_torchs_names(model.state_dict()))
    return theirs.to(next(model.parameters()).dtype)


def both(ours, theirs, src, tgt, src_mask, tgt_mask) -> tuple:
    """The states of both for the same sentences."""
    hidden = ~src_mask.squeeze(1)
    witness = theirs(
        ours.src_embed(src),
        ours.tgt_embed(tgt),
        tgt_mask=~subsequent_mask(tgt.size(1))[0],
        src_key_padding_mask=hidden,
        tgt_key_padding_mask=tgt == 0,
        memory_key_padding_mask=hidden,
    )
    return ours(src, tgt, src_mask, tgt_mask), witness


@ORDERS
@pytest.mark.parametrize("record", [False, True], ids=["fused", "five lines"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
def test_equals_torchs_transformer(norm_first, record, dtype, tolerance):
    ours = small(norm_first).to(dtype)
    for part in ours.modules():
        if isinstance(part, MultiHeadedAttention):
            part.record = record
    theirs = torchs(ours, norm_first)
    states, witness = both(ours, theirs, *sentences())
    assert_close(states, witness, atol=tolerance, rtol=tolerance)

    gradient = torch.randn_like(states)
    torch.autograd.backward([states, witness], [gradient, gradient])
    found = {n: w.grad for n, w in ours.named_parameters() if w.grad is not None}
    wanted = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert_close(in_torchs_names(found), wanted, atol=tolerance, rtol=10 * tolerance)


@ORDERS
def test_bf16_is_as_good_as_torchs(norm_first):
    exact, _ = both(
        small(norm_first), torchs(small(norm_first), norm_first), *sentences()
    )
    ours = small(norm_first).bfloat16()
    states, witness = both(ours, torchs(ours, norm_first), *sentences())
    assert states.dtype == torch.bfloat16
    errors = [(x.float() - exact).square().mean().sqrt() for x in (states, witness)]
    assert errors[0] < 1.25 * errors[1]
    assert errors[1] < 0.05  # the states have a size of 1


@ORDERS
def test_words_are_log_probabilities(norm_first):
    model = small(norm_first)
    log_probs = model.generator(model(*sentences()))
    assert log_probs.shape == (3, 12, V)
    assert_close(log_probs.exp().sum(-1), torch.ones(3, 12))
    states = model(*sentences())
    scores = states @ model.generator.proj.weight.mT + model.generator.proj.bias
    gaps = log_probs - log_probs[..., :1]
    assert_close(gaps, scores - scores[..., :1], atol=1e-5, rtol=1e-5)


# C20: three tables or one


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("tied", "total"), [(False, 101_009_544), (True, 63_121_544)], ids=["three", "one"]
)
def test_base_has_the_size_it_should(tied, total):
    with torch.device("meta"):
        model = make_model(37_000, 37_000, share_embeddings=tied)
    assert parameters(model) == total


def tables(model: EncoderDecoder) -> list[nn.Parameter]:
    source, target = model.src_embed[0].lut, model.tgt_embed[0].lut
    return [source.weight, target.weight, model.generator.proj.weight]


def test_tied_tables_stay_one(tmp_path):
    model = small(share_embeddings=True)
    before = tables(model)[0].detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    src, tgt, src_mask, tgt_mask = sentences()
    model.generator(model(src, tgt, src_mask, tgt_mask))[..., 5].sum().backward()
    optimizer.step()
    one, *others = tables(model)
    assert all(other is one for other in others)
    assert not torch.equal(one, before)

    torch.save(model.state_dict(), tmp_path / "weights.pt")
    again = make_model(V, V, 3, 32, 48, 4, dropout=0.0, share_embeddings=True)
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert len({id(table) for table in tables(again)}) == 1
    assert torch.equal(tables(again)[0], one)
    assert_close(again(src, tgt, src_mask, tgt_mask), model(*sentences()))


def test_tied_gradients_add_up():
    tied = small(share_embeddings=True)
    apart = small()
    apart.load_state_dict(tied.state_dict())
    for model in (tied, apart):
        model.generator(model(*sentences()))[..., 7].sum().backward()
    summed = sum(table.grad for table in tables(apart))
    assert_close(tables(tied)[0].grad, summed, atol=1e-4, rtol=1e-4)


def test_untied_tables_are_three():
    assert len({id(table) for table in tables(small())}) == 3


def test_unequal_vocabularies_cannot_share():
    with pytest.raises(ValueError, match="500.*700"):
        make_model(500, 700, share_embeddings=True)


# C21, the model's part: nothing flows back in time; C4: nothing comes out of padding


@ORDERS
def test_a_later_word_changes_no_earlier_state(norm_first):
    model = small(norm_first).eval()
    src, tgt, src_mask, tgt_mask = sentences((10, 6), (12, 12))
    before = model.generator(model(src, tgt, src_mask, tgt_mask))
    for t in range(1, 12):
        other = tgt.clone()
        other[:, t] = 4 + (tgt[:, t] - 3) % (V - 4)
        after = model.generator(model(src, other, src_mask, tgt_mask))
        assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=0)
        assert not torch.allclose(after[:, t:], before[:, t:], atol=1e-3)


@ORDERS
def test_what_is_behind_the_padding_changes_nothing(norm_first):
    model = small(norm_first).eval()
    src, tgt, src_mask, tgt_mask = sentences()
    before = model(src, tgt, src_mask, tgt_mask)
    src, tgt = src.where(src > 0, 9), tgt.where(tgt > 0, 11)
    after = model(src, tgt, src_mask, tgt_mask)
    for row, length in enumerate((12, 12, 4)):
        assert_close(after[row, :length], before[row, :length], atol=1e-6, rtol=0)


@ORDERS
def test_a_batch_says_what_its_sentences_say_alone(norm_first):
    model = small(norm_first).eval()
    src, tgt, src_mask, tgt_mask = sentences()
    together = model(src, tgt, src_mask, tgt_mask)
    for row, (s, t) in enumerate([(10, 12), (6, 12), (1, 4)]):
        alone = model(
            src[row : row + 1, :s], tgt[row : row + 1, :t], None, subsequent_mask(t)
        )
        assert_close(together[row, :t], alone[0], atol=1e-5, rtol=1e-5)


# Cached is uncached


@ORDERS
@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 1, 6), (12,)], ids=str)
@torch.no_grad()
def test_cached_is_uncached(norm_first, sizes):
    model = small(norm_first).eval()
    src, tgt, src_mask, tgt_mask = sentences()
    memory = model.encode(src, src_mask)
    wanted = model.decode(memory, src_mask, tgt, tgt_mask)
    cache, start = model.new_cache(), 0
    for size in sizes:
        end = start + size
        new, seen = tgt[:, start:end], tgt_mask[:, start:end, :end]
        states = model.decode(memory, src_mask, new, seen, cache)
        assert_close(states, wanted[:, start:end], atol=1e-5, rtol=1e-5)
        assert cache.length == end
        start = end


@torch.no_grad()
def test_a_cache_serves_several_rows_of_one_sentence():
    """Rows of a sentence share its memory, and change places as in a beam search."""
    model = small().eval()
    src, _, src_mask, _ = sentences((10, 6), (1, 1))
    memory = model.encode(src, src_mask)
    ids = torch.tensor([[1], [1]])
    cache = model.new_cache()
    model.decode(memory, src_mask, ids, None, cache)
    moves = [[0, 0, 0, 1, 1, 1], [2, 2, 1, 4, 3, 4], [0, 1, 2, 5, 5, 3]]
    sentence = torch.tensor([0, 0, 0, 1, 1, 1])
    for step, rows in enumerate(moves):
        rows = torch.tensor(rows)
        ids = torch.cat([ids[rows], 4 + 6 * step + torch.arange(6)[:, None]], dim=1)
        cache.select(rows)
        states = model.decode(memory, src_mask, ids[:, -1:], None, cache)
        mask = make_std_mask(ids)
        wanted = model.decode(memory[sentence], src_mask[sentence], ids, mask)
        assert_close(states, wanted[:, -1:], atol=1e-5, rtol=1e-5)
    cache.select(torch.tensor([4, 3, 5]), torch.tensor([1]))  # sentence 0 has ended
    ids = torch.cat([ids[[4, 3, 5]], torch.tensor([[30], [31], [32]])], dim=1)
    states = model.decode(memory[1:], src_mask[1:], ids[:, -1:], None, cache)
    memory, src_mask = memory[[1] * 3], src_mask[[1] * 3]
    wanted = model.decode(memory, src_mask, ids, make_std_mask(ids))
    assert_close(states, wanted[:, -1:], atol=1e-5, rtol=1e-5)


# How it starts


@ORDERS
def test_no_two_matrices_start_alike(norm_first):
    model = make_model(V, V, 3, 32, 48, 4, norm_first=norm_first)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    assert len(matrices) == 3 * (12 + 4) + 3
    for place, one in enumerate(matrices):
        for other in matrices[:place]:
            assert one.shape != other.shape or not torch.equal(one, other)


def test_a_seed_gives_one_model():
    models = [small().state_dict() for _ in range(2)]
    assert_close(models[0], models[1], atol=0, rtol=0)


def test_embeddings_start_at_the_width_that_scaling_asks_for():
    with torch.no_grad():
        model = make_model(2000, 2000, N=1, d_model=64, d_ff=64, h=4)
        for embed in (model.src_embed, model.tgt_embed):
            spread = embed[0](torch.arange(2000)[None]).std().item()
            assert spread == pytest.approx(1, rel=0.02)


# C29, the model's part: settings that cannot be


BAD = {
    "h": (dict(h=5), "512.*5"),
    "h of nothing": (dict(h=0), "h.*0"),
    "width": (dict(d_model=-8), "d_model.*-8"),
    "inner width": (dict(d_ff=0), "d_ff.*0"),
    "no layers": (dict(N=0), "N.*0"),
    "no source": (dict(src_vocab=0), "src_vocab.*0"),
    "no target": (dict(tgt_vocab=-1), "tgt_vocab.*-1"),
    "dropout": (dict(dropout=1.5), r"dropout.*1\.5.*0.*1"),
    "all dropped": (dict(dropout=1.0), r"dropout.*1\.0.*below 1"),
    "less than none": (dict(dropout=-0.1), r"dropout.*-0\.1"),
    "no number": (dict(dropout=float("nan")), "dropout.*nan"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named_before_any_work(name, monkeypatch):
    bad, message = BAD[name]
    monkeypatch.setattr(nn.init, "xavier_uniform_", lambda *_: pytest.fail("too late"))
    with pytest.raises(ValueError, match=message):
        make_model(**dict(src_vocab=V, tgt_vocab=V) | bad)


@pytest.mark.parametrize("sizes", [dict(h=1), dict(h=32), dict(N=1), dict(dropout=0)])
def test_settings_at_the_edge_work(sizes):
    model = small(**sizes)
    assert model(*sentences()).isfinite().all()
