"""Model folders on disk: reading them safely, and naming what they hold.

`header` and `safetensors_io` read files and know nothing of models; `mapping` is the one table
between file keys and tree paths; `plan` matches a folder against a configuration; `parameters`
carries the bytes to the device. Only `parameters` imports jax, and `codes`, which `plan` asks for
folders in codes alone.
"""
