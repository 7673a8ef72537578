"""The examples run, at their smallest size, and say what they claim to say."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from portable_ops.inductor_ext import explain

from examples import llama, sparse_attention

EXAMPLES = sorted(path for path in Path(llama.__file__).parent.glob("*.py") if path.name != "__init__.py")
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_example
def test_is_a_program(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert isinstance(tree.body[-1], ast.If), "the last statement calls main()"


@each_example
def test_runs_at_its_smallest_size(path: Path) -> None:
    main = importlib.import_module(f"examples.{path.stem}").main
    assert main(["--size", "tiny", "--tokens", "4", "--device", "cpu"]) in (None, 0)


def test_llama_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--size", "tiny", "--tokens", "6", "--device", "cpu"]
    llama.main(tiny)
    eager = capsys.readouterr().out
    llama.main([*tiny, "--compile"])
    assert capsys.readouterr().out == eager


def test_llama_decodes_what_it_would_prefill() -> None:
    torch.manual_seed(0)
    model, _ = llama.make_model("tiny", batch=2, dtype=torch.float64)
    tokens = torch.randint(128, (2, 11))
    at_once = model(tokens, torch.arange(11))
    one_by_one = [model(tokens[:, i : i + 1], torch.tensor([i])) for i in range(11)]
    torch.testing.assert_close(torch.cat(one_by_one, 1), at_once)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("module", ["llama", "hf_llama"])
def test_every_norm_and_attention_is_recognised(module: str, device: str) -> None:
    make_model = importlib.import_module(f"examples.{module}").make_model
    model, inputs = make_model("tiny", device=device)
    with torch.no_grad():
        report = explain(model)(*inputs)
    layers = 2
    assert report.counts["rms_norm"] == 2 * layers + 1
    assert report.counts["attention"] == layers
    assert not report.graph_breaks


def test_sparse_attention_over_everything_is_attention() -> None:
    torch.manual_seed(0)
    model, (x, _) = sparse_attention.make_model("tiny", batch=2, dtype=torch.float64)
    c = model.config
    xs = torch.randn(c.k, *x.shape, dtype=torch.float64)
    sparse = sparse_attention.decode(model, xs)[-1]  # the k positions that there are, all of them chosen
    keys = model.kv(xs).transpose(0, 1)
    q = model.q(xs[-1]).view(2, c.num_heads, 1, c.head_dim)
    expanded = keys.unsqueeze(1).expand(-1, c.num_heads, -1, -1)
    dense = torch.nn.functional.scaled_dot_product_attention(q, expanded, expanded)
    torch.testing.assert_close(sparse, model.out(dense.flatten(1)))


def test_sparse_attention_selects_without_sorting_or_masking() -> None:
    torch.manual_seed(0)
    model, inputs = sparse_attention.make_model("tiny", batch=2)
    with torch.no_grad():
        report = explain(model, gate="always")(*inputs)
        expected = model(*inputs)
        options = {"portable_ops.gate": "always"}
        torch.testing.assert_close(torch.compile(model, backend="portable_ops", options=options)(*inputs), expected)
    (site,) = [site for site in report.sites if site.kind == "topk"]
    assert site.decision == "rewritten"
    assert {name: site.bound[name] for name in ("sorted", "span", "used")} == {
        "sorted": "False",
        "span": "end",
        "used": "indices",
    }
