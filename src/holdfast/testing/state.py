"""Compare states bit by bit: the names of `holdfast.verify.state`, where tests have always found them."""

from holdfast.verify.state import assert_state_equal, differences, digests, generators, leaves

__all__ = ["assert_state_equal", "differences", "digests", "generators", "leaves"]
