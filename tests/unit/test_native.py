"""Who has the threads: torch and the kernels never both."""

from collections.abc import Iterator

import pytest
import torch

from slipstream import native


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    native.use_threads(before)


@pytest.mark.skipif(not native.is_available(), reason="no native kernels")
def test_threads_are_taken_and_returned() -> None:
    native.use_threads(3)
    native.take_threads()
    assert (torch.get_num_threads(), native.load().num_threads()) == (1, 3)
    native.take_threads()  # a second model takes no fewer
    assert (native.num_threads(), native.load().num_threads()) == (3, 3)
    native.return_threads()
    assert torch.get_num_threads() == 3


def test_one_setting_is_for_both() -> None:
    native.use_threads(2)
    assert (torch.get_num_threads(), native.num_threads()) == (2, 2)
