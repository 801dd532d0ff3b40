"""A stand-in for flash-attn on machines without a GPU: tests only."""
