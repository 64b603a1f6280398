"""Classes of tokens, the figures of a report, and the page."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.model import RoutingTrace
from qwen_jax.research import Report, RoutingCounts, statistics, summarise
from qwen_jax.research.token_classes import CLASSES, shown, token_classes

EXPERTS = 4
PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" Moses", "word, capital"),
        (" unto", "word"),
        ("ing", "word, continued"),
        ("7", "number"),
        (",", "punctuation"),
        ("\n", "space"),
        ("<|endoftext|>", "special"),
    ],
)
def test_class_of_a_token(tokenizer, text, name):
    (token,) = tokenizer.encode(text)
    assert CLASSES[token_classes(np.array([token, token]), tokenizer)[1]] == name


def test_tokens_for_a_reader(tokenizer):
    (space, line) = (tokenizer.encode(text)[0] for text in (" unto", "\n"))
    assert (shown(space, tokenizer), shown(line, tokenizer)) == ("\u00b7unto", "\u21b5")
    (special,) = tokenizer.encode("<|endoftext|>")
    assert shown(special, tokenizer) == "<|endoftext|>"


@pytest.fixture(scope="module")
def run(tokenizer) -> tuple[RoutingTrace, RoutingCounts]:
    """Two layers: in layer 2, expert 3 takes the numbers and nothing else takes them.

    Of other tokens expert 0 of that layer takes all, and expert 1 of layer 5 takes all.
    """
    word, number = tokenizer.encode(" unto")[0], tokenizer.encode("7")[0]
    tokens = np.array([word] * 60 + [number] * 40, np.int32)
    ids = np.zeros((2, 100, 2), np.int32)
    ids[0, :, 0] = np.where(tokens == number, 3, 0)
    ids[1, :, 0] = 1
    ids[:, :, 1] = EXPERTS
    weights = np.zeros(ids.shape, np.float32)
    weights[:, :, 0] = 0.75
    zeros = np.zeros(100, np.int32)
    trace = RoutingTrace(ids, weights, None, tokens, zeros, (2, 5), EXPERTS, "f")
    chosen = statistics.counts_of(ids, EXPERTS)
    counts = RoutingCounts(
        jnp.asarray(chosen, jnp.int32),
        jnp.zeros(chosen.shape),
        jnp.asarray(chosen, jnp.float32),
        jnp.int32(100),
        (2, 5),
    )
    return trace, counts


def test_figures_of_layers(run, tokenizer):
    summary = summarise(*run, tokenizer)
    first, second = summary.layers
    assert (first.layer, second.layer) == (2, 5)
    assert first.effective_experts == pytest.approx(np.exp(-0.6 * np.log(0.6) - 0.4 * np.log(0.4)))
    assert (first.largest_load, first.unused) == (pytest.approx(0.6 * 4), 2)
    assert first.balance_loss == pytest.approx(4 * (0.6**2 + 0.4**2))
    assert (first.first_weight, first.empty_slots) == (0.75, 0.5)
    # The choice of the first tells the class, that of the second nothing.
    assert first.class_information == pytest.approx(1)
    assert second.class_information == pytest.approx(0)
    assert summary.pooled_balance_loss == pytest.approx(4 * (0.3**2 + 0.5**2 + 0.2**2))
    assert summary.class_shares == {"word": 0.6, "number": 0.4}


def test_experts_that_stand_out(run, tokenizer):
    best, second, third = summarise(*run, tokenizer).experts
    assert (best.layer, best.expert, best.favourite) == (2, 3, "number")
    assert (best.share, best.share_of_all) == (1, pytest.approx(0.4))
    assert best.divergence == pytest.approx(np.log(1 / 0.4))
    assert best.examples == (("7", 40),)
    assert (second.layer, second.expert, second.examples) == (2, 0, (("\u00b7unto", 60),))
    assert (third.layer, third.expert, third.examples) == (5, 1, ())


def test_without_a_tokenizer_there_are_no_classes(run):
    summary = summarise(*run)
    assert summary.experts == () and summary.class_shares == {}
    assert np.isnan(summary.layers[0].class_information)


def test_counts_of_another_run_are_refused(run):
    trace, counts = run
    with pytest.raises(RequestError, match="counts are of 99 tokens"):
        summarise(trace, dataclasses.replace(counts, tokens=jnp.int32(99)))
    with pytest.raises(RequestError, match="there is no trace"):
        summarise(None, counts)


@pytest.fixture(scope="module")
def report(run, tokenizer) -> Report:
    pytest.importorskip("matplotlib")
    return Report.of(*run, {"model": "a <b> & c", "text": '"quoted" <i>'}, tokenizer)


def test_the_page_holds_its_pictures(report, tmp_path):
    report.write(tmp_path)
    names = {"load", "layers", "co-activation", "transitions", "classes"}
    files = {"report.html", "routing.json"} | {f"{name}.png" for name in names}
    assert {path.name for path in tmp_path.iterdir()} == files
    page = (tmp_path / "report.html").read_text("utf-8")
    sources = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    stored = {(tmp_path / f"{name}.png").read_bytes() for name in names}
    assert {base64.b64decode(source) for source in sources} == stored
    assert all(picture.startswith(PNG) and len(picture) > 3000 for picture in stored)
    # Nothing is fetched, and text is no markup.
    assert page.count("src=") == len(sources) == 5
    assert "http" not in page and "<script" not in page
    assert "a &lt;b&gt; &amp; c" in page and "<b>" not in page and "<i>" not in page
    assert "7</code>40" in page


def test_numbers_are_strict_json(report, tmp_path):
    def refuse(name: str) -> None:
        raise ValueError(name)

    bare = dataclasses.replace(
        report, summary=dataclasses.replace(report.summary, pooled_balance_loss=float("nan"))
    )
    bare.write(tmp_path)
    found = json.loads((tmp_path / "routing.json").read_text(), parse_constant=refuse)
    assert found["pooled_balance_loss"] is None
    assert found["layers"][0]["layer"] == 2 and found["loads"][1] == [0, 1, 0, 0]


def test_one_layer_has_no_transitions(run, tokenizer):
    pytest.importorskip("matplotlib")
    trace, counts = run
    one = dataclasses.replace(
        trace, ids=trace.ids[:1], weights=trace.weights[:1], layers=trace.layers[:1]
    )
    assert counts.probability is not None
    few = RoutingCounts(
        counts.chosen[:1], counts.weight[:1], counts.probability[:1], counts.tokens, (2,)
    )
    report = Report.of(one, few, {"model": "m"})
    assert {picture.name for picture in report.pictures} == {"load", "layers", "co-activation"}
    assert "What experts take" not in report.html


def test_many_experts_show_the_busiest(run):
    pytest.importorskip("matplotlib")
    from qwen_jax.research import report as module

    trace = dataclasses.replace(run[0], experts=60)
    busiest = module._pairs(trace, 2, 5)
    assert busiest.lift.shape == (48, 48)
    assert {0, 3} <= set(busiest.rows.tolist()) and (np.diff(busiest.rows) > 0).all()


def test_matplotlib_is_named_where_it_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"pip install 'qwen-jax\[research\]'"):
        Report.of(*run, {"model": "m"})
