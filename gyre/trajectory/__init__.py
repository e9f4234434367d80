"""What an execution leaves: its calls, their tree, samples, packed micro-steps, the store."""
