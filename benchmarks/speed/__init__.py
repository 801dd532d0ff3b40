"""Speed and memory on one GPU: ``python -m benchmarks.speed SECTION --out DIR`` (README.md)."""
