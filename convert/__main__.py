"""`python -m convert` and `qwen-jax-convert`: the same as `qwen-jax convert`."""

from __future__ import annotations

import sys

from qwen_jax import cli


def main() -> int:
    """Run `qwen-jax convert` with the arguments of this program."""
    return cli.main(["convert", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
