"""The parts of `convert.quantize`: what becomes codes, how each tensor is made, what is reported."""
