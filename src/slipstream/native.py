"""The native kernels: whether they are there, and which instruction set and threads they use.

They come with the package where it was built by a C++ compiler. The environment variable
`SLIPSTREAM_KERNELS` chooses: `torch` does without them, the name of an instruction set forces it.
"""

import hashlib
import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

VARIABLE = "SLIPSTREAM_KERNELS"


class KernelsError(Exception):
    """The variable asks for what this machine or installation does not have."""


@cache
def module() -> ModuleType | None:
    """The extension module, set to the instruction set asked for; None is the torch path.

    Raises:
        KernelsError: see there.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice == "torch":
        return None
    try:
        native = import_module("slipstream._native")
    except ImportError:
        if choice == "auto":
            return None
        raise KernelsError(
            f"{VARIABLE} is {choice}, but this installation has no native kernels; "
            "install a C++ compiler and reinstall slipstream"
        ) from None
    if choice != "auto":
        if choice not in native.isas():
            known = ", ".join([*native.isas(), "torch", "auto"])
            raise KernelsError(f"{VARIABLE} is {choice}; this machine has {known}")
        native.use_isa(choice)
    return native


def is_available() -> bool:
    return module() is not None


def is_missing() -> bool:
    """Whether they are not there although nobody chose to do without them."""
    return module() is None and os.environ.get(VARIABLE, "auto") != "torch"


def digest() -> str:
    """Of the module's file, empty without one: another build has other costs."""
    native = module()
    if native is None or native.__file__ is None:
        return ""
    with open(native.__file__, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def describe() -> str:
    """What computes on a CPU, for people: "avx512", or "torch"."""
    native = module()
    return "torch" if native is None else native.isa()


def load() -> ModuleType:
    """The extension, where it is known to be there."""
    native = module()
    assert native is not None, "asked for native kernels that are not there"
    return native


def use_threads(count: int) -> None:
    """So many CPU threads, for torch and for the kernels."""
    torch.set_num_threads(count)
    if is_available():
        load().use_threads(count)


def num_threads() -> int:
    """CPU threads in use, by whichever of the two has more."""
    return max(torch.get_num_threads(), load().num_threads() if is_available() else 1)


def take_threads() -> None:
    """Hand torch's threads to the kernels: its idle ones spin, and would be in their way."""
    load().use_threads(num_threads())
    torch.set_num_threads(1)


def return_threads() -> None:
    """Hand them back, for a model that torch computes."""
    torch.set_num_threads(num_threads())
