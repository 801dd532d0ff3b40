"""Where a release calls its attention kernel: a method, a function, a dictionary or an interface.

Each interceptor runs the attention module's own forward code, on this module and for this call
only, with the one name it calls its kernel by bound to ours. Nothing process-wide is changed.
"""

from __future__ import annotations

from . import dictionary, function, interface, method
from .base import Interceptor, home_of, layers_of

INTERCEPTORS: dict[str, Interceptor] = {
    "method": method.INTERCEPTOR,
    "function": function.INTERCEPTOR,
    "dict": dictionary.INTERCEPTOR,
    "interface": interface.INTERCEPTOR,
}

__all__ = ["INTERCEPTORS", "Interceptor", "home_of", "layers_of"]
