"""The data: one global sample order, batches for a rank, built-in sources. Imports torch."""

from trimaran.data.collate import default_collate
from trimaran.data.fingerprint import fingerprint
from trimaran.data.loader import BatchLoader, build_loader
from trimaran.data.order import Order
from trimaran.data.padding import pad
from trimaran.data.sources import PythonSource, TokenFile, python_source, token_file

__all__ = [
    "BatchLoader",
    "Order",
    "PythonSource",
    "TokenFile",
    "build_loader",
    "default_collate",
    "fingerprint",
    "pad",
    "python_source",
    "token_file",
]
