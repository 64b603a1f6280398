"""`qwen-jax tune`: what is tried, what is kept, and where; not how fast anything is."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels._compat import H200, targeting
from pallas_kernels.tuning import Decision
from qwen_jax.cli.tuned_work import Timing, Work
from qwen_jax.cli.tuning import cut_model, ordered, sweep, write
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.model import CausalLM, abstract_model, parameter_shapes
from qwen_jax.quant import named_recipe, scheme_of

ROOT = Path(__file__).parents[3]
DENSE, NORM = ("dequant_matmul", "rows=1"), ("rms_norm", "rows=1")


@dataclasses.dataclass(frozen=True)
class Cut:
    """As of some kernel."""

    size: int


DECISIONS = {
    NORM: Decision(Cut(1), (Cut(2),)),
    DENSE: Decision(Cut(1), (Cut(2), Cut(4), Cut(8))),
}


class Device:
    """Takes 100 microseconds, less what configurations save; some do not compile."""

    def __init__(self, saved: dict, together: float = 0.0, broken: tuple = ()) -> None:
        self.saved, self.together, self.broken = saved, together, broken
        self.asked: list = []

    def __call__(self, several):
        self.asked += several
        return [self._timing(configs) for configs in several]

    def _timing(self, configs):
        pairs = [(place, config.size) for place, config in configs.items()]
        if any(pair in self.broken for pair in pairs):
            return None
        time = 100.0 - sum(self.saved.get(pair, 0.0) for pair in pairs)
        return Timing(time + (self.together if len(pairs) > 1 else 0.0), 100.0)


def never() -> bool:
    return False


def test_each_shape_has_its_turn_and_the_longest_go_first():
    places = [(place[0], config.size) for place, config in ordered(DECISIONS)]
    dense, norm = DENSE[0], NORM[0]
    assert places == [(dense, 2), (norm, 2), (dense, 4), (dense, 8)]


def test_the_fastest_are_kept_and_timed_together():
    device = Device({(DENSE, 2): 3.0, (DENSE, 4): 5.0, (NORM, 2): 1.0})
    found = sweep(DECISIONS, device, never)
    assert {place: each.config for place, each in found.items()} == {DENSE: Cut(4), NORM: Cut(2)}
    assert found[DENSE].timing == Timing(95.0, 100.0)
    assert device.asked[-1] == {DENSE: Cut(4), NORM: Cut(2)}
    assert found[DENSE].entry == {
        "config": {"kind": "Cut", "size": 4}, "seconds": 95.0, "heuristic_seconds": 100.0,
    }  # fmt: skip


@pytest.mark.parametrize("broken", [(), ((DENSE, 4),)])
def test_gains_that_do_not_add_up_leave_the_greatest(broken):
    device = Device({(DENSE, 2): 3.0, (DENSE, 4): 5.0, (NORM, 2): 1.0}, 4.0, broken)
    found = sweep(DECISIONS, device, never)
    assert {place: each.config.size for place, each in found.items()} == {DENSE: 2 if broken else 4}


def test_noise_and_losses_are_no_gain():
    device = Device({(DENSE, 2): 0.4, (DENSE, 4): -5.0, (NORM, 2): 0.0})
    assert sweep(DECISIONS, device, never) == {}


def test_nothing_is_begun_when_the_time_is_over():
    device = Device({(DENSE, 2): 3.0})
    assert sweep(DECISIONS, device, lambda: True) == {} and device.asked == []


def test_layers_are_as_many_as_kinds_need():
    for name, layers in (("qwen3.6-35b-a3b", 4), ("qwen3-30b-a3b", 4), ("qwen3.5-0.8b", 4)):
        assert cut_model(QwenConfig.preset(name), None).num_hidden_layers == layers
    assert cut_model(QwenConfig.preset("qwen3.6-35b-a3b"), 2).num_hidden_layers == 2
    odd = QwenConfig.preset("qwen3-30b-a3b").to_hf() | {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}
    assert cut_model(QwenConfig.from_hf(odd), None).num_hidden_layers == 7


def test_entries_are_written_beside_those_of_any_version(tmp_path, monkeypatch):
    path = tmp_path / "new" / "cpu.json"
    one = {"rms_norm": {"a": {"config": {"kind": "Config"}}}}
    two = {"rms_norm": {"b": {"config": {"kind": "Other"}}}}
    assert write(path, one) == path
    write(path, two)
    content = json.loads(path.read_text())
    assert content["jax"][tuning.jax_version()]["rms_norm"].keys() == {"a", "b"}
    assert tuning.mismatch(content, "cpu") is None
    monkeypatch.setattr(tuning, "jax_version", lambda: "0.99")
    write(path, two)
    assert json.loads(path.read_text())["jax"] == content["jax"] | {"0.99": two}
    assert [each.name for each in path.parent.iterdir()] == ["cpu.json"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("{", "is no tuning file"),
        ("[]", "it is no tuning file"),
        ('{"model_type": "qwen3"}', "it is no tuning file"),
        ('{"format": 1, "device": "cpu", "jax": "0.11", "entries": {}}', "its format is 1"),
        ('{"format": 2, "device": "NVIDIA A10", "jax": {}}', "its device is 'NVIDIA A10'"),
    ],
)
def test_other_files_are_not_overwritten(tmp_path, other, words):
    path = tmp_path / "cpu.json"
    path.write_text(other)
    with pytest.raises(RequestError, match=words):
        write(path, {})
    assert path.read_text() == other


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = write(tmp_path / "cpu.json", {"rms_norm": {"a": {}}})
    before = path.read_text()

    def half(self, text, encoding):
        with open(self, "w", encoding=encoding) as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        write(path, {"rms_norm": {"b": {}}})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    fields = {
        "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 256, "dtype": "bfloat16",
        "eos_token_id": None, "tie_word_embeddings": False, "rope_theta": 10000.0,
    }  # fmt: skip
    config = QwenConfig.from_hf(fields)
    return abstract_model(config, scheme_of(parameter_shapes(config), named_recipe("q3")))


def test_a_models_work_says_what_may_be_tried(model):
    work = Work.decode(model, 2, 70)
    with targeting(H200), tuning.listening() as heard:
        work.trace()
    assert {kernel for kernel, _ in heard} == {
        "attention_inputs",
        "block_attention",
        "dequant_matmul",
        "expert_dispatch",
        "rms_norm",
        "router",
    }


def test_work_is_timed_beside_the_heuristics():
    def run(tokens):
        config = tuning.decide(NORM[0], H200, NORM[1], Cut(1), tuple)
        if config.size == 4:
            raise ValueError("too much shared memory")
        return tokens + int(config.size == 3), None

    work = Work("counting", run, (jnp.arange(8),), 1, {})
    # Another result is no timing; nor is a program that does not compile.
    timing, *others = work.times([{NORM: Cut(2)}, {NORM: Cut(3)}, {NORM: Cut(4)}])
    assert timing is not None and timing.seconds > 0 and timing.heuristic > 0
    assert others == [None, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo",), "kernels are tuned on a GPU, and JAX sees cpu"),
        (("demo", "--recipe", "q9"), "there is no recipe 'q9'; accepted are q3, "),
        (("demo", "--num-layers", "99"), "--num-layers"),
        (("demo", "--batch-size", "0"), "--batch-size is 0"),
        (("demo", "--batch-size", "2.5"), "--batch-size"),
        (("demo", "--num-layers", "0"), "--num-layers is 0"),
        (("demo", "--prompt-tokens", "512", "--prompt-tokens", "-1"), "--prompt-tokens is 512, -1"),
        (("demo", "--budget-seconds", "0"), "--budget-seconds is 0"),
    ],
)
def test_bad_request_is_refused(run, arguments, words):
    outcome = run("tune", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err


def test_script_needs_no_command_line_library():
    program = (
        "import runpy, sys\n"
        "sys.modules.update(cyclopts=None)\n"
        "sys.argv = ['benchmarks/tune.py', 'demo', '--batch-size', '1', '4']\n"
        "runpy.run_path('benchmarks/tune.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "kernels are tuned on a GPU" in done.stderr
