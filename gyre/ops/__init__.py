"""Numerical operations over packed token trees. They know neither models nor algorithms."""
