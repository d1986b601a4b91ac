"""What several test files share."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before a library reads it


@pytest.fixture(scope="module")
def one_thread():
    """Compute on one thread: small models are quickest so, and tests share cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
