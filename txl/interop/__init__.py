"""Other people's checkpoints: models of the authors' code to ours and back."""

from txl.interop.original import from_original, to_original

__all__ = ["from_original", "to_original"]
