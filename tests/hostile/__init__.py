"""Hostile calls of a patched model: how they are made, what must come of them, what came."""
