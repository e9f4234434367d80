"""What a run writes down: metrics, events, its folder, its report. No jax, no TensorFlow."""
