"""Stand-in: some releases import these names; no family of the matrix calls them."""


def apply_rotary_emb(*_: object, **__: object) -> None:
    raise NotImplementedError


RotaryEmbedding = object
