import math
from functools import partial

import pytest
import torch
from conftest import compose, mostly_slow, tiny_model
from golden import part, read

from txl import optim
from txl.config import build
from txl.data.streams import Lanes, Prefetched, Segment
from txl.interop import from_original, to_original
from txl.training import Diverged, Run, updates


class GoldenLanes(Lanes):
    """The golden file's segments: its lanes do not share their border tokens."""

    def __init__(self, tokens, tgt_len):
        self.borders = None
        self.tokens, self.tgt_len, self.position, self.epoch, self.lane_len = tokens, tgt_len, 0, 0, tokens.shape[1]

    def __next__(self):
        start, self.position = self.position, self.position + self.tgt_len
        both = self.tokens[:, start : self.position + 1]
        return Segment(tokens=both[:, :-1], targets=both[:, 1:], begins=start == 0)


def make_run(model, lanes, optimizer="adam", lr=0.01):
    made = build(compose(f"optimizer={optimizer}", f"optimizer.lr={lr}").optimizer)(optim.parameter_groups(model))
    return Run(model=model, optimizer=made, lanes=lanes, scaler=torch.amp.GradScaler("cpu", enabled=False))


def small_lanes(n_token=50, batch_size=2, tgt_len=8, n=400):
    tokens = torch.randint(n_token, (n,), generator=torch.Generator().manual_seed(4)).numpy()
    return Lanes(tokens, batch_size=batch_size, tgt_len=tgt_len)


def constant(step, *, lr, steps, valid_nll):
    return lr


def test_golden_training_run_adam_cosine():
    """Forty updates of the authors' code: losses, learning rates, gradient norms and final weights."""
    tensors, meta = read("train_adam_cosine")
    settings = meta["optim"]
    model = from_original(part(tensors, "weight."), meta["config"]).double()
    run = make_run(model, GoldenLanes(tensors["tokens"], meta["config"]["tgt_len"]), lr=settings["lr"])
    schedule = build(compose("schedule=cosine", f"schedule.warmup={settings['warmup_step']}").schedule)
    done = list(updates(run, steps=settings["max_step"], lr=settings["lr"], schedule=schedule, clip=settings["clip"]))
    assert len(done) == 40
    for name, ours in {"loss": "nll", "lr": "lr", "grad_norm": "grad_norm"}.items():
        reached = torch.tensor([getattr(update, ours) for update in done], dtype=torch.float64)
        torch.testing.assert_close(reached, tensors[name], rtol=0, atol=1e-8)
    state, _ = to_original(model)
    for name, expected in part(tensors, "final.").items():
        torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-8)


def test_each_update_reads_the_next_segment_with_the_memory_carried():
    """Against a loop by hand: plain SGD, memory passed on, emptied where the lanes begin again."""
    model, twin = tiny_model(), tiny_model()
    run = make_run(model, small_lanes(), "sgd", lr=0.01)
    list(updates(run, steps=30, lr=0.01, schedule=constant))
    lanes, mems = small_lanes(), None
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    for _ in range(30):
        segment = next(lanes)
        nll, mems = twin(segment.tokens, None if segment.begins else mems, segment.targets)
        optimizer.zero_grad()
        nll.mean().backward()
        optimizer.step()
    assert run.step == 30 and run.tokens == 30 * 16 - 2  # the last segment of each lane is a token short
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_clipping_bounds_the_global_norm():
    model = tiny_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = Run(model=model, optimizer=optimizer, lanes=small_lanes(), scaler=torch.amp.GradScaler("cpu", enabled=False))
    (update,) = updates(run, steps=1, lr=1.0, schedule=constant, clip=0.25)
    moved = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(model.parameters(), before, strict=True)))
    assert update.grad_norm > 0.25
    assert moved == pytest.approx(0.25, rel=1e-4)


def test_a_non_finite_loss_stops_the_run_before_it_harms_the_weights():
    model = tiny_model()
    run = make_run(model, small_lanes())
    steps = updates(run, steps=10, lr=0.01, schedule=constant)
    next(steps)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    position, mems = run.lanes.position, run.mems
    forward = model.forward
    model.forward = lambda *given, **marks: (forward(*given, **marks)[0] * math.nan, [])
    with pytest.raises(Diverged, match=r"optimizer\.lr: at update 2 the loss is nan"):
        next(steps)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (run.step, run.lanes.position) == (1, position) and run.mems is mems


def test_a_non_finite_gradient_stops_the_run_too():
    model = tiny_model()
    run = make_run(model, small_lanes())
    model.softmax.out_bias.register_hook(lambda gradient: gradient * math.inf)
    before = model.softmax.weight.clone()
    with pytest.raises(Diverged, match=r"norm (nan|inf)"):
        next(updates(run, steps=10, lr=0.01, schedule=constant))
    assert torch.equal(model.softmax.weight, before)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("optimizer", mostly_slow(["adam", "sgd", "lamb", "adagrad"], fast=2))
def test_a_saved_state_goes_on_bit_for_bit(optimizer, dropout, tmp_path):
    def begin(seed):
        torch.manual_seed(seed)
        return make_run(tiny_model(f"model.dropout={dropout}").float(), small_lanes(), optimizer)

    schedule = partial(optim.cosine, warmup=3)
    whole = begin(0)
    torch.manual_seed(7)
    losses = [update.nll for update in updates(whole, steps=35, lr=0.01, schedule=schedule)]
    first = begin(0)
    torch.manual_seed(7)
    part_one = updates(first, steps=35, lr=0.01, schedule=schedule)
    before = [next(part_one).nll for _ in range(13)]
    torch.save({"model": first.model.state_dict(), "run": first.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second = begin(1)
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["run"])
    after = [update.nll for update in updates(second, steps=35, lr=0.01, schedule=schedule)]
    assert before + after == losses
    assert all(map(torch.equal, second.model.parameters(), whole.model.parameters()))
    assert second.tokens == whole.tokens


def test_a_scaler_goes_on_where_it_was_and_begins_where_there_was_none():
    """The scale and its growth are saved; fp16 may also be asked for only when a run goes on."""
    run = make_run(tiny_model().float(), small_lanes(), "sgd")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    list(updates(run, steps=4, lr=0.01, schedule=constant, precision="fp16"))
    again, plain = (make_run(tiny_model().float(), small_lanes(), "sgd") for _ in range(2))
    again.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
    again.load_state_dict(run.state_dict())
    assert again.scaler.state_dict() == run.scaler.state_dict() and again.scaler.get_scale() == 128.0
    list(updates(plain, steps=2, lr=0.01, schedule=constant))
    again.load_state_dict(plain.state_dict())
    assert again.step == 2


def test_settings_asked_for_outlive_a_saved_optimizer():
    """torch's load_state_dict brings the old weight decay back without a word."""
    run = make_run(tiny_model(), small_lanes())
    next(updates(run, steps=1, lr=0.01, schedule=constant))
    other = make_run(tiny_model(), small_lanes())
    other.optimizer.param_groups[0]["weight_decay"] = 0.5
    other.load_state_dict(run.state_dict())
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.5, 0.0]
    assert len(other.optimizer.state) == len(run.optimizer.state) > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains_about_as_well(precision):
    """Matrix products in 16 bits, weights and updates in 32."""
    last = {}
    for name in ("fp32", precision):
        model = tiny_model().float()
        run = make_run(model, small_lanes(n=81))
        run.scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16", init_scale=64.0)
        last[name] = [update.nll for update in updates(run, steps=60, lr=0.01, schedule=constant, precision=name)]
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert last[precision][-1] < 0.7 * last[precision][0]
    assert last[precision] != last["fp32"]
    assert last[precision][5] == pytest.approx(last["fp32"][5], rel=0.03)


def test_an_overflow_in_fp16_skips_the_update_and_lowers_the_scale():
    model = tiny_model().float()
    run = make_run(model, small_lanes())
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    rates, before = [], model.softmax.weight.clone()

    def schedule(step, *, lr, steps, valid_nll):
        assert torch.equal(model.softmax.weight, before) or step
        rates.append(step)
        return lr

    (update,) = updates(run, steps=1, lr=0.01, schedule=schedule, precision="fp16")
    skipped = len(rates) - 1
    assert skipped > 0 and rates == [0] * len(rates)  # nothing of the schedule is used up
    assert run.scaler.get_scale() == 2.0 ** (60 - skipped)
    assert math.isfinite(update.grad_norm) and not torch.equal(model.softmax.weight, before)
    assert (run.step, run.tokens) == (1, 16)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_where_nothing_is_waited_for_the_weights_take_no_harm_either(where):
    """As on an accelerator: the figures are read when something is logged or saved, and then the first bad update is named."""
    model = tiny_model()
    run = make_run(model, small_lanes(), "sgd")
    steps = updates(run, steps=10, lr=0.01, schedule=constant, wait=False)
    next(steps)
    run.read_figures()
    assert run.unlogged_tokens == 16 and run.unread == []
    if where == "loss":
        forward = model.forward
        model.forward = lambda *given, **marks: (forward(*given, **marks)[0] * math.nan, [])
    else:
        model.softmax.out_bias.register_hook(lambda gradient: gradient * math.inf)
    for _ in range(3):
        next(steps)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(state.isfinite().all() for state in run.optimizer.state_dict()["state"][0].values())
    left = list(run.unread)
    for ask in (run.state_dict, run.take_unlogged, lambda: run.note_valid(1.0)):
        run.unread = list(left)
        with pytest.raises(Diverged, match="at update 2 the loss is"):
            ask()
    assert run.valid_nll == []


def test_waiting_or_not_makes_no_difference_to_a_good_run():
    results = []
    for wait in (True, False):
        model = tiny_model("model.dropout=0.1")
        run = make_run(model, Prefetched(small_lanes(), pin=False))
        torch.manual_seed(1)
        done = list(updates(run, steps=30, lr=0.01, schedule=constant, clip=0.25, wait=wait))
        results.append((run.take_unlogged(), [update.nll for update in done], run.state_dict()["lanes"], model))
    assert results[0][:3] == results[1][:3]
    assert all(map(torch.equal, results[0][3].parameters(), results[1][3].parameters()))


def test_no_update_waits_for_the_device(monkeypatch):
    """Nothing turns a tensor into a number between two lines of the log."""
    run = make_run(tiny_model().float(), small_lanes(), "sgd")
    steps = updates(run, steps=10, lr=0.01, schedule=constant, clip=0.25, wait=False)
    next(steps)

    def refuse(*_):
        raise AssertionError("a tensor was read")

    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for _ in range(5):
        next(steps)


ADAPTIVE = ["model/softmax=adaptive", "model.softmax.cutoffs=[10,30]"]


@pytest.mark.parametrize(
    ("softmax", "options"),
    [
        ([], []),
        ([], ["model/memory=none"]),
        ([*ADAPTIVE, "model.tie_weight=false"], ["model.same_length=true", "model.pre_norm=true"]),
    ],
)
def test_a_step_needs_no_number_from_the_device(softmax, options):
    """On a device that has none: torch's `meta` computes shapes, and raises where a value is asked for.

    Tied adaptive tables have sparse gradients, which `meta` lacks: their forward pass is tried alone.
    """
    model = tiny_model(*softmax, *options).train().to("meta")
    run = make_run(model, Prefetched(small_lanes(), pin=False), "sgd")
    done = list(updates(run, steps=9, lr=0.01, schedule=constant, clip=0.25))
    assert len(done) == 9 and done[-1].figures.device.type == "meta"
    with pytest.raises((NotImplementedError, RuntimeError)):
        run.read_figures()
    tied = tiny_model(*softmax[:-1], *options).to("meta")
    tokens = torch.randint(50, (2, 9))
    assert tied(tokens[:, :-1], None, tokens[:, 1:])[0].device.type == "meta"
