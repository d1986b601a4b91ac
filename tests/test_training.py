"""Training counts tokens and stops when it must; checkpoints survive any accident."""

import copy
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from annotated_transformer import checkpoints
from annotated_transformer.batches import collate
from annotated_transformer.checkpoints import (
    atomic_folder,
    average_checkpoints,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    read_checked,
    save_checkpoint,
    save_weights,
)
from annotated_transformer.label_smoothing import LabelSmoothing
from annotated_transformer.model import make_model
from annotated_transformer.schedule import rate
from annotated_transformer.training import (
    TrainState,
    make_optimizer,
    run_epoch,
    summed_loss,
)

V = 9


def small_model(seed: int = 0, vocab: int = V, dropout: float = 0.1, **sizes):
    torch.manual_seed(seed)
    sizes = dict(N=1, d_model=8, d_ff=16, h=2) | sizes
    return make_model(vocab, vocab, dropout=dropout, **sizes)


def pairs(number: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    draw = torch.Generator().manual_seed(seed)

    def sentence() -> list[int]:
        length = int(torch.randint(1, 6, (), generator=draw))
        words = torch.randint(4, V, (length,), generator=draw).tolist()
        return [1, *words, 2]

    return [(sentence(), sentence()) for _ in range(number)]


def batches(number: int, seed: int = 0):
    """Batches of two pairs; made anew each time, since they move to the device."""
    drawn = pairs(2 * number, seed)
    return [collate(drawn[i : i + 2]) for i in range(0, 2 * number, 2)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


class Fixed(nn.Module):
    """A model with one weight, whose loss for target id n is that weight times n."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.padding_idx = 0

    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.weight.expand(*tgt.shape, 1)

    def generator(self, states):
        return states


def loss_by_id(log_probs, target):
    return (log_probs.squeeze(-1) * target).sum()


loss_by_id.padding_idx = 0


# The loop


def test_each_token_weighs_the_same():
    """Token losses 1, 2, 3 in one batch and 10 in the other: 4, not 6."""
    model = Fixed()
    micro = [collate([([1, 2], [1, 1, 2, 3])]), collate([([1, 2], [1, 10])])]
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    loss, state = run_epoch(micro, model, loss_by_id, sgd, accum_iter=2)
    assert loss == 4.0
    assert (state.step, state.accum_step, state.tokens, state.samples) == (1, 2, 4, 2)
    assert model.weight.item() == 1.0 - 4.0  # the gradient is that of the mean, too
    assert run_epoch(micro, Fixed(), loss_by_id)[0] == 4.0


def test_padding_does_not_count():
    both = collate([([1, 2], [1, 1, 2, 3]), ([1, 2], [1, 10])])
    assert run_epoch([both], Fixed(), loss_by_id)[0] == 4.0


def test_the_generator_is_not_paid_for_padding():
    model, rows = small_model(), []
    model.generator.register_forward_hook(
        lambda _, given, __: rows.append(len(given[0]))
    )
    given = batches(3)
    assert any((batch.tgt_y == 0).any() for batch in given)
    run_epoch(given, model, LabelSmoothing(V, 0))
    assert rows == [batch.ntokens for batch in given]


def test_five_batches_two_at_a_time_are_three_updates():
    model, rows = small_model(), []
    optimizer, scheduler = make_optimizer(model, warmup=4)
    criterion = LabelSmoothing(V, 0)
    _, state = run_epoch(
        batches(5),
        model,
        criterion,
        optimizer,
        scheduler,
        accum_iter=2,
        log=rows.append,
    )
    assert (state.step, state.accum_step, state.batch, state.samples) == (3, 5, 5, 10)
    assert [row["rate"] for row in rows] == [rate(n, 8, 1.0, 4) for n in (1, 2, 3)]
    assert scheduler.last_epoch == 3
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["tokens"] == state.tokens == sum(b.ntokens for b in batches(5))


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_accumulation_equals_one_big_batch(parts):
    whole = small_model(dropout=0.0).double()
    pieces, drawn = copy.deepcopy(whole), pairs(6)
    size = 6 // parts
    micro = [collate(drawn[i : i + size]) for i in range(0, 6, size)]
    for model, given in (whole, [collate(drawn)]), (pieces, micro):
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        run_epoch(given, model, LabelSmoothing(V, 0, 0.1), sgd, accum_iter=len(given))
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert_close(one, other, rtol=0, atol=1e-12)


def test_clipping_shortens_the_gradient_and_keeps_its_direction():
    free = small_model(dropout=0.0).double()
    clipped = copy.deepcopy(free)
    before = torch.cat([p.detach().flatten() for p in free.parameters()])
    moves = []
    for model, clip in (free, None), (clipped, 0.01):
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        run_epoch(batches(1), model, LabelSmoothing(V, 0), sgd, clip=clip)
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        moves.append(now - before)
    assert moves[0].norm() > 0.02
    assert moves[1].norm().item() == pytest.approx(0.01, rel=1e-3)
    assert torch.cosine_similarity(*moves, dim=0).item() == pytest.approx(1.0)


def test_measuring_changes_nothing_and_leaves_dropout_out():
    model = small_model(dropout=0.5)
    before = weights(model)
    criterion = LabelSmoothing(V, 0)
    first, state = run_epoch(batches(3), model, criterion)
    assert first == run_epoch(batches(3), model, criterion)[0]
    assert_same(before, weights(model))
    assert all(p.grad is None for p in model.parameters())
    assert state == TrainState()
    total = tokens = 0.0
    for batch in batches(3):
        states = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        every = (
            model.generator(states).gather(-1, batch.tgt_y.unsqueeze(-1)).squeeze(-1)
        )
        total -= every[batch.tgt_y != 0].sum().item()
        tokens += batch.ntokens
    assert first == pytest.approx(total / tokens, rel=1e-5)


def test_training_returns_to_training():
    model = small_model(dropout=0.5)
    optimizer, scheduler = make_optimizer(model, warmup=4)
    run_epoch(batches(1), model, LabelSmoothing(V, 0))
    run_epoch(batches(1), model, LabelSmoothing(V, 0), optimizer, scheduler)
    assert model.training


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (dict(accum_iter=0), "0"),
        (dict(clip=0.0), "0.0"),
        (dict(clip=-1.0), "-1.0"),
        (dict(precision="fp16"), "fp16"),
    ],
)
def test_bad_settings_are_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        run_epoch(batches(1), small_model(), LabelSmoothing(V, 0), **wrong)


def test_bf16_is_near_fp32():
    criterion, losses = LabelSmoothing(V, 0), []
    for precision in "fp32", "bf16":
        model = small_model(dropout=0.0)
        losses.append(run_epoch(batches(2), model, criterion, precision=precision)[0])
        assert all(p.dtype == torch.float32 for p in model.parameters())
        total = summed_loss(model, criterion, batches(1)[0], precision)
        assert total.dtype == torch.float32  # sums of thousands need the digits
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_gone_wrong_stops_before_the_weights_are_touched(value, tmp_path):
    model = small_model()
    optimizer, scheduler = make_optimizer(model, warmup=4)
    plain, state, rows = LabelSmoothing(V, 0), TrainState(), []

    def criterion(log_probs, target):
        return plain(log_probs, target) * (value if state.step == 2 else 1.0)

    criterion.padding_idx = 0

    def log(row):
        rows.append(row)
        save_checkpoint(tmp_path, model, optimizer, scheduler, state)

    with pytest.raises(FloatingPointError) as raised:
        run_epoch(
            batches(5), model, criterion, optimizer, scheduler, state=state, log=log
        )
    said = str(raised.value)
    assert "update 3" in said and str(value) in said
    assert f"{rate(3, 8, 1.0, 4):.3g}" in said
    assert str(rows[-1]["loss"]) in said  # the last finite loss
    assert state.step == len(rows) == 2
    kept = list_checkpoints(tmp_path)
    other = small_model(seed=1)
    load_weights(other, kept[-1])
    assert_same(weights(other), weights(model))


def test_a_gradient_gone_wrong_stops_before_the_weights_are_touched():
    """The loss is a number, and its slope is none."""
    model, plain = small_model(), LabelSmoothing(V, 0)
    optimizer, scheduler = make_optimizer(model, warmup=4)
    before = weights(model)

    def criterion(log_probs, target):
        return plain(log_probs, target) + (0 * log_probs.sum()).sqrt()

    criterion.padding_idx = 0
    with pytest.raises(FloatingPointError, match="update 1.*gradient nan"):
        run_epoch(batches(1), model, criterion, optimizer, scheduler)
    assert_same(before, weights(model))


def test_no_batches_have_no_loss():
    model = small_model()
    optimizer, scheduler = make_optimizer(model, warmup=4)
    for how in ((), (optimizer, scheduler)):
        loss, state = run_epoch([], model, LabelSmoothing(V, 0), *how)
        assert math.isnan(loss) and state.step == 0


def test_measuring_leaves_the_other_processes_alone():
    """A wrapped model would wait for the others, which may have fewer batches."""

    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            raise AssertionError("the wrapper was called")

    model, plain = small_model(dropout=0.0), LabelSmoothing(V, 0)
    wrapped = run_epoch(batches(2), Wrapped(model), plain)[0]
    assert wrapped == run_epoch(batches(2), model, plain)[0]


# Checkpoints


def run(model, optimizer, scheduler, state, given, **more):
    run_epoch(
        given, model, LabelSmoothing(V, 0), optimizer, scheduler, state=state, **more
    )


def fresh(seed: int = 0, **sizes):
    model = small_model(seed, **sizes)
    return model, *make_optimizer(model, warmup=4)


@pytest.fixture
def saved(tmp_path):
    """A run of three updates, and the checkpoint of it."""
    model, optimizer, scheduler = fresh()
    state = TrainState()
    run(model, optimizer, scheduler, state, batches(3))
    path = save_checkpoint(tmp_path, model, optimizer, scheduler, state)
    return path, model, optimizer, scheduler, state


def test_resuming_is_going_on(saved):
    """Dropout and all: the same weights, moments, rate and dice, bit for bit."""
    path, model, optimizer, scheduler, state = saved
    rest = batches(3, seed=7)
    run(model, optimizer, scheduler, state, rest)
    dice = torch.get_rng_state()

    model_2, optimizer_2, scheduler_2 = fresh(seed=99)
    state_2 = load_checkpoint(path, model_2, optimizer_2, scheduler_2)
    assert state_2.step == 3
    run(model_2, optimizer_2, scheduler_2, state_2, batches(3, seed=7))
    assert_same(weights(model), weights(model_2))
    assert state == state_2 and dice.equal(torch.get_rng_state())
    assert scheduler.get_last_lr() == scheduler_2.get_last_lr()
    moments, moments_2 = (o.state_dict()["state"] for o in (optimizer, optimizer_2))
    assert moments.keys() == moments_2.keys()
    for number in moments:
        assert_same(moments[number], moments_2[number])


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    model, optimizer, scheduler = fresh(share_embeddings=True)
    state = TrainState()
    run(model, optimizer, scheduler, state, batches(1))
    path = save_checkpoint(tmp_path, model, optimizer, scheduler, state)
    other, *rest = fresh(seed=3, share_embeddings=True)
    load_checkpoint(path, other, *rest)
    assert other.generator.proj.weight is other.tgt_embed[0].lut.weight
    assert_same(weights(model), weights(other))


def test_the_last_few_are_kept(tmp_path):
    model, optimizer, scheduler = fresh()
    state = TrainState()
    for _ in range(5):
        run(model, optimizer, scheduler, state, batches(1))
        save_checkpoint(tmp_path, model, optimizer, scheduler, state, keep=2)
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-00000004", "step-00000005"]
    assert sorted(os.listdir(tmp_path)) == names  # and nothing else lies about


def test_none_kept_is_refused(saved):
    path, *mine, state = saved
    with pytest.raises(ValueError, match=r"keep \(0\)"):
        save_checkpoint(path.parent, *mine, state, keep=0)
    assert list_checkpoints(path.parent) == [path]


def test_what_a_killed_run_left_behind_is_removed(saved):
    path, *mine, state = saved
    for left in ".step-00000002.gone", ".step-00000004.k1ll3d":
        (path.parent / left / "new").mkdir(parents=True)
    save_checkpoint(path.parent, *mine, state)
    assert os.listdir(path.parent) == [path.name]


def test_a_missing_library_is_named(saved, monkeypatch):
    path, *mine, state = saved
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for work in (
        lambda: load_checkpoint(path, *mine),
        lambda: save_checkpoint(path.parent, *mine, state),
    ):
        with pytest.raises(ImportError, match="pip install safetensors"):
            work()


FILES = ["model.safetensors", "training.safetensors", "training.json", "checksums.json"]


def snapshot(model, optimizer, scheduler):
    moments = {
        f"{n}.{k}": v.clone()
        for n, row in enumerate(optimizer.state.values())
        for k, v in row.items()
    }
    return weights(model), moments, copy.deepcopy(scheduler.state_dict())


def assert_refused(path, mine, *words, error=ValueError):
    """Loading raises one sentence with these words, and changes nothing."""
    before, dice = snapshot(*mine), torch.get_rng_state()
    with pytest.raises(error) as raised:
        load_checkpoint(path, *mine)
    for word in words:
        assert word in str(raised.value)
    after = snapshot(*mine)
    assert_same(before[0], after[0])
    assert_same(before[1], after[1])
    assert before[2] == after[2] and dice.equal(torch.get_rng_state())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_a_flipped_byte_is_found(saved, name, place):
    path, *mine, _ = saved
    data = bytearray((path / name).read_bytes())
    data[int(place * len(data))] ^= 0xFF
    (path / name).write_bytes(data)
    assert_refused(path, mine, name, "damaged")


@pytest.mark.parametrize("key", ["state", "groups", "schedule"])
def test_what_another_version_saved_is_refused(saved, key):
    path, *mine, _ = saved
    rest = json.loads((path / "training.json").read_text())
    del rest[key]
    kept = {file.name: file.read_bytes() for file in path.iterdir()}
    kept["training.json"] = json.dumps(rest).encode()
    del kept["checksums.json"]
    with atomic_folder(path) as scratch:
        for name, data in kept.items():
            (scratch / name).write_bytes(data)
    assert_refused(path, mine, str(path), key)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved, name):
    path, *mine, _ = saved
    (path / name).unlink()
    assert_refused(path, mine, str(path / name), "missing", error=FileNotFoundError)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found(saved, name):
    path, *mine, _ = saved
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])
    assert_refused(path, mine, name)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(vocab=V + 2), ["(9, 8)", "(11, 8)"]),
        (dict(d_ff=32), ["16", "32"]),
        (dict(N=2), ["layers.1."]),
        (dict(share_embeddings=True), ["not in this model"]),
    ],
)
def test_another_model_is_told_apart(saved, sizes, words):
    path, *_ = saved
    assert_refused(path, fresh(**sizes), "model.safetensors", *words)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(saved, value):
    path, model, optimizer, scheduler, state = saved
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.generator.proj.bias[3] = value
    path = save_checkpoint(path.parent, broken, optimizer, scheduler, state)
    mine = (model, optimizer, scheduler)
    assert_refused(path, mine, "model.safetensors", "generator.proj.bias")


def test_the_mean_of_checkpoints(tmp_path):
    model, optimizer, scheduler = fresh()
    state, seen = TrainState(), []
    for _ in range(3):
        run(model, optimizer, scheduler, state, batches(1))
        save_checkpoint(tmp_path, model, optimizer, scheduler, state)
        seen.append(weights(model))
    average_checkpoints(model, list_checkpoints(tmp_path))
    for name, p in model.named_parameters():
        assert_close(p.detach(), sum(one[name] for one in seen) / 3)


def test_a_mean_with_a_bad_one_is_refused_whole(tmp_path):
    model, optimizer, scheduler = fresh()
    state = TrainState()
    for _ in range(2):
        run(model, optimizer, scheduler, state, batches(1))
        save_checkpoint(tmp_path, model, optimizer, scheduler, state)
    (list_checkpoints(tmp_path)[1] / "model.safetensors").unlink()
    before = weights(model)
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        average_checkpoints(model, list_checkpoints(tmp_path))
    with pytest.raises(ValueError, match="no checkpoints"):
        average_checkpoints(model, [])
    assert_same(before, weights(model))


def test_what_a_gpu_saved_is_read_without_one(saved, monkeypatch, tmp_path):
    path, *mine, state = saved
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(16).byte())
        there = save_checkpoint(tmp_path, *mine, state)
    other = fresh(seed=5)
    assert load_checkpoint(there, *other).step == state.step
    assert_same(weights(other[0]), weights(mine[0]))


# What happens while one is written


@pytest.mark.parametrize(
    "trouble", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
@pytest.mark.parametrize("where", ["save_file", "write_text", "fsync", "replace"])
def test_trouble_while_writing_leaves_the_last_one_whole(
    saved, monkeypatch, trouble, where
):
    path, *mine, state = saved
    before = weights(mine[0])
    run(*mine, state, batches(1))

    def fail(*args, **kwargs):
        if where == "save_file":
            Path(args[1]).write_bytes(b"half a file")
        raise trouble

    target = {"save_file": "safetensors.torch", "fsync": "os", "replace": "os"}
    with monkeypatch.context() as patch:
        if where == "write_text":
            patch.setattr(Path, "write_text", fail)
        else:
            patch.setattr(f"{target[where]}.{where}", fail)
        with pytest.raises(type(trouble)):
            save_checkpoint(path.parent, *mine, state)
    assert list_checkpoints(path.parent) == [path]
    other = fresh(seed=5)
    assert load_checkpoint(path, *other).step == 3
    assert_same(weights(other[0]), before)
    left = [name for name in os.listdir(path.parent) if os.listdir(path.parent / name)]
    assert left == [path.name]  # and no half-written folder keeps its room
    save_checkpoint(path.parent, *mine, state)
    assert len(list_checkpoints(path.parent)) == 2


def test_what_a_power_cut_could_take_is_pushed_out_in_time(saved, monkeypatch):
    """The files and their names before the new folder has its own, that at once."""
    path, *mine, state = saved
    push, rename, events = checkpoints.push, os.replace, []

    def pushed(one):
        events.append(f"push {one.name}")
        push(one)

    def renamed(old, new):
        events.append(f"rename {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(checkpoints, "push", pushed)
    monkeypatch.setattr(os, "replace", renamed)
    run(*mine, state, batches(1))
    save_checkpoint(path.parent, *mine, state, keep=1)
    *files, folder, name, names, gone = events
    assert len(files) == 4 and folder == "push new"
    assert name.startswith("rename step-") and names == f"push {path.parent.name}"
    assert gone == f"rename .{path.name}.gone"


def test_between_two_renames_the_old_one_comes_back(tmp_path, monkeypatch):
    with atomic_folder(tmp_path / "best") as scratch:
        (scratch / "text").write_text("old")
    rename, calls = os.replace, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(*args)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with atomic_folder(tmp_path / "best") as scratch:
            (scratch / "text").write_text("new")
    assert len(calls) == 3 and os.listdir(tmp_path) == ["best"]
    assert (tmp_path / "best" / "text").read_text() == "old"


def test_a_folder_is_replaced_whole(tmp_path):
    for seed in 1, 2:
        with atomic_folder(tmp_path / "best") as scratch:
            save_weights(small_model(seed), scratch)
    assert os.listdir(tmp_path) == ["best"]
    model = small_model(0)
    load_weights(model, tmp_path / "best")
    assert_same(weights(model), weights(small_model(2)))
    with pytest.raises(RuntimeError):
        with atomic_folder(tmp_path / "best") as scratch:
            (scratch / "model.safetensors").write_bytes(b"")
            raise RuntimeError
    load_weights(model, tmp_path / "best")
    assert json.loads(
        read_checked(tmp_path / "best", "model.safetensors")
        .parent.joinpath("checksums.json")
        .read_text()
    ).keys() == {"model.safetensors"}


KILLS = """
import os, random, resource, signal, sys, time
import torch
import test_training as t

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
folder, kills = sys.argv[1], int(sys.argv[2])
updates = 20 * kills  # more than are made before the last kill


def resume():
    mine = t.fresh(seed=random.randrange(1000))
    found = t.list_checkpoints(folder)
    return mine, t.load_checkpoint(found[-1], *mine) if found else None


def train():
    mine, state = resume()
    if state is None:
        mine, state = t.fresh(), t.TrainState()
    save = lambda row: t.save_checkpoint(folder, *mine, state, keep=3)
    t.run(*mine, state, t.batches(updates)[state.step :], log=save)
    return mine[0]


def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


random.seed(0)
whole, state = t.fresh(), t.TrainState()
t.run(*whole, state, t.batches(updates))
done = hit = 0
while not done:
    pid = child(train)
    if hit < kills:
        time.sleep(random.uniform(0.01, 0.12))
        number = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL][hit % 3]
        hit += os.waitpid(pid, os.WNOHANG)[0] == 0
        try:
            os.kill(pid, number)
            done = os.waitpid(pid, 0)[1] == 0
        except (ProcessLookupError, ChildProcessError):
            done = True
    else:
        done = os.waitpid(pid, 0)[1] == 0
    for path in t.list_checkpoints(folder):  # whatever is there is whole
        t.load_checkpoint(path, *t.fresh())

mine, state = resume()
assert state.step == updates, state
t.assert_same(t.weights(mine[0]), t.weights(whole[0]))


def on_a_full_disk():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    state.step += 1
    try:
        t.save_checkpoint(folder, *mine, state)
    except OSError as error:
        os._exit(3 if "model.safetensors could not be written" in str(error) else 4)


assert os.waitstatus_to_exitcode(os.waitpid(child(on_a_full_disk), 0)[1]) == 3
again, state = resume()
assert state.step == updates
t.assert_same(t.weights(again[0]), t.weights(whole[0]))
print("killed", hit)
"""


def test_killing_a_run_at_any_moment_costs_nothing(tmp_path):
    """SIGINT, SIGTERM and SIGKILL in turn, then a disk that takes no more.

    TRAINING_KILLS=100 asks for a hundred of them.
    """
    kills = os.environ.get("TRAINING_KILLS", "6")
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), kills],
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"killed {kills}" in done.stdout
