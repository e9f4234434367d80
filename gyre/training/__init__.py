"""Turning packed micro-steps into optimizer updates: streaming, step, sum, optimizer."""
