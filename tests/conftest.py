"""What several test files share."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Compute on one thread: small models are quickest so, and tests share cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
