"""compile=true: the numbers of the uncompiled model, from one program, whatever the length of the memory. Not under the type hook."""

import pytest
import torch
from conftest import TINY, command, in_process, tiny_model
from test_evaluation import nll_of, split_of
from torch._dynamo.utils import counters

from txl import checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def programs():
    return counters["stats"]["unique_graphs"]


PLAIN = [[], ["model.same_length=true"], ["model.pre_norm=true"], ["model/memory=none"]]
OTHERS = [[f"model/position={name}"] for name in ("shaw", "rotary", "alibi", "absolute", "absolute_per_layer")]


@pytest.mark.parametrize(
    ("variant", "borders"),
    [*((variant, borders) for variant in PLAIN for borders in (False, True)), *((other, False) for other in OTHERS)],
)
def test_training_needs_one_program_while_the_memory_grows(variant, borders):
    """Losses, gradients and memory of seven segments; the memory is full after four."""
    variant = [*variant, *([] if "model/memory=none" in variant else ["model.memory.mem_len=20"])]
    plain, compiled = (tiny_model(*variant, "model.n_layer=3").train() for _ in range(2))
    compiled.compile_layers()
    mems, compiled_mems = None, None
    generator = torch.Generator().manual_seed(0)
    for _ in range(7):
        tokens = torch.randint(50, (2, 7), generator=generator)
        starts = torch.rand(2, 6, generator=generator) < 0.2 if borders else None
        nll, mems = plain(tokens[:, :-1], mems, tokens[:, 1:], starts=starts)
        ours, compiled_mems = compiled(tokens[:, :-1], compiled_mems, tokens[:, 1:], starts=starts)
        torch.testing.assert_close(ours, nll, rtol=1e-10, atol=1e-10)
        nll.sum().backward()
        ours.sum().backward()
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)
    assert programs() == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("variant", ["memory", "same_length"])
def test_evaluation_needs_one_program_while_the_memory_grows(variant):
    """But for the last segment, which is shorter."""
    overrides = ["model.memory.mem_len=20", *["model.same_length=true"] * (variant == "same_length")]
    model, split = tiny_model(*overrides), split_of(101)
    expected = nll_of(model, split, tgt_len=5, batch_size=1)
    model.compile_layers()
    assert nll_of(model, split, tgt_len=5, batch_size=1, length=5) == pytest.approx(expected, rel=1e-12)
    assert programs() == 1 and not counters["graph_break"]


def test_a_memory_that_learns_is_left_out_of_the_program():
    model, plain = (tiny_model("model/memory=compressive", "model.memory.mem_len=8").train() for _ in range(2))
    model.compile_layers()
    mems, plain_mems = None, None
    for segment in torch.randint(50, (5, 2, 9)):
        ours, mems, loss = model(segment[:, :-1], mems, segment[:, 1:], with_auxiliary=True)
        nll, plain_mems, plain_loss = plain(segment[:, :-1], plain_mems, segment[:, 1:], with_auxiliary=True)
        torch.testing.assert_close((ours, loss), (nll, plain_loss), rtol=1e-10, atol=1e-10)
    assert loss > 0 and programs() == 1 and not counters["graph_break"]


def test_the_whole_model_compiles_without_a_break():
    model = tiny_model().train()
    tokens = torch.randint(50, (2, 6))
    _, mems = model(tokens)
    whole = torch.compile(model, fullgraph=True)
    nll, _ = whole(tokens, mems, tokens)
    torch.testing.assert_close(nll, model(tokens, mems, tokens)[0], rtol=1e-10, atol=1e-10)


def test_dropout_on_compiled_attention_is_that_of_both_passes():
    """The gradient of a dropped result, against differences with the same seed."""
    model = tiny_model("model.dropatt=0.3", "model.n_layer=1").train()
    model.compile_layers()
    tokens = torch.randint(50, (2, 6))
    _, mems = model(tokens)
    weight = model.layers[0].attention.o_net.weight
    direction = torch.randn_like(weight)

    def loss():
        torch.manual_seed(3)
        return model(tokens, mems, tokens)[0].sum()

    loss().backward()
    slope = (weight.grad * direction).sum()
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            weight.add_(step * direction)
        values.append(loss().detach())
        with torch.no_grad():
            weight.sub_(step * direction)
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=1e-5)


def test_a_compiled_run_that_was_stopped_goes_on_to_the_same_figures(tmp_path):
    """Bit for bit with deterministic=true, which leaves out additions whose order depends on timing."""
    given = [*TINY, "compile=true", "deterministic=true", "steps=8", "save_every=100", "model.dropout=0.1"]
    weights = []
    for name, minutes in (("whole", ["null"]), ("cut", ["1e-9", "null"])):
        for limit in minutes:
            outcome = command("train", f"name={name}", *given, f"max_minutes={limit}", cwd=tmp_path)
            assert outcome.status == (0 if limit == "null" else 75), outcome.stderr
        (path,) = (tmp_path / "outputs" / name).iterdir()
        weights.append(checkpoint.load(path / "last.pt")["model"])
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


def test_points_of_a_sweep_are_compiled_as_if_alone(tmp_path):
    """More models than torch keeps programs for: earlier ones are forgotten."""
    replaced = ("steps", "eval_every", "model.d_inner")
    given = ["compile=true", "steps=2", "eval_every=2", *(one for one in TINY if not one.startswith(replaced))]
    with torch._dynamo.config.patch(recompile_limit=4):
        outcome = in_process("train", "-m", "name=sweep", "model.d_inner=32,48,64", *given)
        assert outcome.status == 0, outcome.stderr
        assert in_process("train", "name=alone", "model.d_inner=64", *given).status == 0
    (alone,) = (tmp_path / "outputs" / "alone").iterdir()
    one, other = (checkpoint.load(run / "last.pt") for run in (alone, tmp_path / "outputs" / "sweep" / alone.name))
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())
