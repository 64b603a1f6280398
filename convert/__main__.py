"""`python -m convert SOURCE DESTINATION`: the same as `qwen-jax convert`."""

import sys

from qwen_jax.cli import main


def convert_main() -> int:
    """Run `qwen-jax convert` with the arguments of this program."""
    return main(["convert", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(convert_main())
