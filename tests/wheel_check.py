"""Run away from the checkout with the wheel on the path: the registry ships, and apply works."""

import logging

import torch
import transformers

import fa2_pack_patch
from fa2_pack_patch import registry

logging.disable(logging.WARNING)
assert "site" in fa2_pack_patch.__file__, fa2_pack_patch.__file__
assert registry.folder().parent.name == "fa2_pack_patch", registry.folder()
assert len(registry.families()) >= 23
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.arange(3, 13)[None]
alone = model(input_ids=ids[:, 4:]).logits
fa2_pack_patch.apply(model)
positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
packed = model(input_ids=ids, position_ids=positions).logits[:, 4:]
assert torch.allclose(alone, packed, atol=1e-4)
print(f"wheel: {len(registry.families())} families, packed = separate")
