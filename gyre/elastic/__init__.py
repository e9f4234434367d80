"""Cells that move between rollout and training while live executions go on."""
