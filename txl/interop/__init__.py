"""Other people's checkpoints: models of the authors' code to ours and back. Importing this loads no torch; using it does."""

__all__ = ["from_original", "to_original"]


def __getattr__(name):
    if name in __all__:
        from txl.interop import original

        return getattr(original, name)
    raise AttributeError(f"module 'txl.interop' has no attribute {name!r}")
