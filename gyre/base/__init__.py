"""Vocabulary shared by every layer: identifiers, enums, errors, protocols, registry. No jax."""
