"""Several processes on one machine, on the CPU through gloo: what they give is what one gives."""
