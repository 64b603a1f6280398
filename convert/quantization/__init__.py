"""The parts of `convert.quantize`: what becomes codes, how they are made, what is reported."""
