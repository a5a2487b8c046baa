"""deepthin: pick the shape of a small language model by measured latency before paying to train it."""

from deepthin._version import VERSION as __version__
from deepthin.engine.errors import DeepthinError
from deepthin.engine.shape import Shape

__all__ = ["DeepthinError", "Shape", "__version__"]
