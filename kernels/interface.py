"""What the compiled kernels and the Python files around them have to agree on: a number, raised when their calls change."""

INTERFACE = 3
"""As in kernels/cpu/native/module.cpp."""


class OtherInterface(ImportError):
    """The compiled module was built for other Python files than these."""


def check_interface(found: int) -> None:
    """Refuse a compiled module with another interface; one that tells none has 1."""
    if found != INTERFACE:
        raise OtherInterface(
            f"kernels.cpu._native was built for other Python files: found interface {found}, expected {INTERFACE}; "
            "build it again with `make install`"
        )
