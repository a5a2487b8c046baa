"""deepthin: pick the shape of a small language model by measured latency before paying to train it."""

from deepthin._version import VERSION
from deepthin.engine.errors import DeepthinError
from deepthin.engine.shape import Shape

__version__ = VERSION

__all__ = ["DeepthinError", "Shape", "__version__"]
