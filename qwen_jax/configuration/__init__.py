"""What stands behind `qwen_jax.config`: families, spellings of `config.json`, and checks."""
