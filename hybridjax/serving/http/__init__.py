"""The OpenAI-compatible HTTP server over the engine's front door. Knows nothing of schedulers or jax."""
