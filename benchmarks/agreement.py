"""Do the accelerator in bf16 and the host in float32 agree?

A cut of a released shape with the same random weights in both.

    python benchmarks/agreement.py --preset qwen3.6-35b-a3b --layers 4 --tokens 256 --out
    result.json

Prints the mean Kullback-Leibler divergence of the next-token distributions (nats, host first) and
exits with 1 above the bar.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen_jax import CausalLM, QwenConfig, initialise
from qwen_jax.cli.measure import first_layers
from qwen_jax.cli.provenance import provenance

BAR = 1e-3


def on_host(model: CausalLM, config: QwenConfig) -> CausalLM:
    """A float32 copy of the model on the CPU."""
    host = jax.devices("cpu")[0]
    copy = CausalLM(dataclasses.replace(config, dtype="float32"))
    wide = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        array = np.asarray(variable.get_value()).astype(np.float32)
        wide.append((path, variable.replace(jax.device_put(array, host))))
    nnx.update(copy, nnx.from_flat_state(wide))
    return copy


def divergence(base: jax.Array, other: jax.Array) -> np.ndarray:
    """KL(base || other) of each position, float64."""
    p = np.asarray(jax.nn.log_softmax(base, axis=-1), np.float64)
    q = np.asarray(jax.nn.log_softmax(other, axis=-1), np.float64)
    return np.sum(np.exp(p) * (p - q), axis=-1)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3.6-35b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="the commit, where the code is a copy without its history")
    args = parser.parse_args()

    shape = [f"--{name}={getattr(args, name)}" for name in ("preset", "layers", "tokens")]
    config = first_layers(QwenConfig.preset(args.preset), args.layers)
    model = initialise(config, jax.random.key(0))
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, args.tokens), np.int32)
    output = model(tokens, capture="ids")
    fast = jax.device_get(output.logits[0])
    begin = time.perf_counter()
    with jax.default_device(jax.devices("cpu")[0]):
        expected = on_host(model, config)(tokens, capture="ids")
        wide = jax.device_get(expected.logits[0])
        kl = divergence(jnp.asarray(wide), jnp.asarray(fast))
    same = [
        np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(x, y, strict=True)])
        for x, y in (
            (np.asarray(output.routing[i].ids[0]), np.asarray(expected.routing[i].ids[0]))
            for i in output.routing
        )
    ]
    figures = {
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1_agreement": float(np.mean(wide.argmax(-1) == fast.argmax(-1))),
        "logit_std": float(wide.std()),
        "experts_in_common": [float(s) for s in same],
    }
    report = {
        "benchmark": "agreement",
        **provenance(["python", "benchmarks/agreement.py", *shape]),
        "preset": args.preset,
        "layers": args.layers,
        "tokens": args.tokens,
        "bar_mean_kl": BAR,
        "host_seconds": time.perf_counter() - begin,
        "figures": figures,
    }
    report["commit"] = report["commit"] or args.commit
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name, value in figures.items():
        print(f"{name:20} {value}")
    return 0 if figures["mean_kl"] <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
