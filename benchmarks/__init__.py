"""Ours against the plain recipe, side by side."""
