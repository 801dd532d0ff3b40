"""Stand-in: tests only."""


def apply_rotary(*_: object, **__: object) -> None:
    raise NotImplementedError
